"""Which parts of a model are units."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.planner.solutions import peak_allocated_bytes
from brimful.settings import Action, Settings, Span, UnitAction
from brimful.trace import (
    Trace,
    divide_unit,
    find_units,
    in_nested_runs,
    in_runs,
    join_input_ops,
    paired,
    undivided,
)

# B batch, C channels, H × W image


class Twice(nn.Module):
    """Two convolutions, each with BatchNorm and ReLU: (B, C, H, W) to (B, C', H, W)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside)
        self.second, self.norm2 = nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


class Pyramid(nn.Module):
    """A large first part, and smaller ones after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Twice(3, 16)
        self.rest = nn.ModuleList([Twice(16, 16), Twice(16, 16), Twice(16, 16)])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.rest:
            x = part(self.pool(x))
        return self.head(x.mean((2, 3)))


def trace_of(model: Callable[[], nn.Module], batch, units: tuple[UnitAction, ...] = ()) -> Trace:
    job = Job(model=model, loss=lambda m, b: m(b["x"]).square().mean(), batch=batch)
    return capture_step(job, Settings(micro_batch_size=4, units=units), find_device("A100 80GB SXM"))


def units_of(model: Callable[[], nn.Module], batch) -> tuple[str, ...]:
    return find_units(trace_of(model, batch))


def test_a_large_part_of_layers_is_a_unit_and_not_each_layer() -> None:
    """A convolution or a BatchNorm saves what it hands on: recomputing it alone frees nothing."""
    units = units_of(Pyramid, lambda n: {"x": torch.randn(n, 3, 64, 64)})
    assert (
        {"stem", "rest.0", "rest.1", "rest.2"} <= set(units) <= {"stem", "rest.0", "rest.1", "rest.2", "pool"}
    )


class Stack(nn.Module):
    """Layers that save much more than they hand on, in a list that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(16, 16, batch_first=True) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_a_list_of_layers_is_never_a_unit() -> None:
    units = units_of(Stack, lambda n: {"x": torch.randn(n, 32, 16)})
    assert units == ("layers.0", "layers.1", "layers.2")


class Joined(nn.Module):
    """Two convolutions, each with BatchNorm and ReLU in place, behind another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(3, 8, 1)
        self.convolutions = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        self.block = Twice(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.convolutions(self.up(x)))


def test_a_unit_is_divided_where_both_parts_free_something() -> None:
    """Not before a ReLU in place, which writes over what it would be recomputed from."""
    trace = trace_of(Joined, lambda n: {"x": torch.randn(n, 3, 64, 64)})
    halves = ("convolutions[0..2]", "convolutions[3..5]")
    assert divide_unit(trace, "convolutions") == halves
    assert divide_unit(trace, "convolutions[1..5]") == ("convolutions[1..5]",)
    parts = ("convolutions[1..3]", "convolutions[4..5]")
    assert divide_unit(trace, "convolutions[1..5]", freeing_inputs=True) == parts
    assert divide_unit(trace, parts[1], freeing_inputs=True) == (parts[1],)
    assert divide_unit(trace, halves[0]) == (halves[0],)
    assert divide_unit(trace, "") == ("up", "convolutions", "block")


def test_layers_that_free_nothing_alone_are_not_divided() -> None:
    trace = trace_of(Joined, lambda n: {"x": torch.randn(n, 3, 64, 64)})
    assert divide_unit(trace, "block") == ("block",)


def test_a_part_that_saves_most_is_divided_in_its_turn() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joined = JoinedAlone()

        def forward(self, x: Tensor) -> Tensor:
            return self.joined(x)

    class JoinedAlone(Joined):
        def forward(self, x: Tensor) -> Tensor:
            return self.convolutions(self.up(x))

    trace = trace_of(Outer, lambda n: {"x": torch.randn(n, 3, 64, 64)})
    halves = ("joined.convolutions[0..2]", "joined.convolutions[3..5]")
    assert divide_unit(trace, "joined") == ("joined.up", *halves)


def test_a_graph_of_torch_fx_is_not_divided_like_the_sequential_that_was_traced() -> None:
    """Its forward calls the children by itself."""
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    traced = torch.fx.symbolic_trace(plain)
    job = Job(model=traced, loss=lambda model, x: model(x).mean(), batch=lambda n: torch.randn(n, 8))
    trace = capture_step(job, Settings(micro_batch_size=4), find_device("cpu"))
    assert all("[" not in unit for unit in find_units(trace))


class Skipping(nn.Module):
    """A block behind a concatenation with a skip connection, and what makes the other half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Twice(3, 8)
        self.down = nn.Sequential(nn.MaxPool2d(2), Twice(8, 8))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge = nn.Sequential(
            nn.Conv2d(16, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        return self.merge(torch.cat([skip, self.up(self.down(skip))], dim=1))


def skipping_trace() -> Trace:
    return trace_of(Skipping, lambda n: {"x": torch.randn(n, 3, 64, 64)})


def test_a_concatenation_is_joined_to_the_unit_behind_it_with_the_layer_that_makes_half_of_it() -> None:
    units = ("stem", "down.0", "down.1", "up", "merge")
    assert join_input_ops(skipping_trace(), units) == ("stem", "down.0", "down.1", "+merge")
    assert join_input_ops(skipping_trace(), units[:4]) == units[:4]


def test_a_unit_with_a_concatenation_is_cut_where_that_has_been_read() -> None:
    trace = skipping_trace()
    assert divide_unit(trace, "+merge", freeing_inputs=True) == ("+merge.0", "merge[1..5]")
    assert divide_unit(trace, "merge[1..5]", freeing_inputs=True) == ("merge[1..3]", "merge[4..5]")


def test_parts_that_make_up_a_module_can_be_one_unit_again() -> None:
    found = list(undivided(skipping_trace(), ("stem", "down.0", "down.1", "merge[0..2]", "merge[3..5]")))
    assert found == [("stem", "down", "merge[0..2]", "merge[3..5]")]


class Residual(nn.Module):
    """A bottleneck block: (B, 4 · C, H, W) to the same, with C channels inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4 * channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * channels, 1),
            nn.BatchNorm2d(4 * channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Mixing(nn.Module):
    """A block that saves much more than it returns, as a transformer's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Row(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_neighbours_are_paired_where_much_of_what_they_save_is_passed_on() -> None:
    units = tuple(f"blocks.{i}" for i in range(9))
    images = trace_of(lambda: Row(*(Residual(4) for _ in range(9))), lambda n: {"x": torch.randn(n, 16, 8, 8)})
    assert paired(images, units) == (
        *(f"blocks[{i}..{i + 1}]" for i in (0, 2, 4, 6)),
        "blocks.8",
    )
    assert paired(images, units[:2] + units[3:5]) == ("blocks[0..1]", "blocks[3..4]")
    vectors = trace_of(lambda: Row(*(Mixing(16) for _ in range(9))), lambda n: {"x": torch.randn(n, 64, 16)})
    assert paired(vectors, units) == units


def test_a_pair_that_saves_most_of_everything_is_none() -> None:
    units = tuple(f"blocks.{i}" for i in range(4))
    images = trace_of(lambda: Row(*(Residual(4) for _ in range(4))), lambda n: {"x": torch.randn(n, 16, 8, 8)})
    assert paired(images, units) == units


def deep(layers: int) -> Callable[[], Row]:
    return lambda: Row(*(module for _ in range(layers) for module in (nn.Linear(16, 16), nn.Tanh())))


def deep_batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 8192, 16)}


def recomputed_bytes(layers: int, units: tuple[str, ...]) -> int:
    """Peak of a step that recomputes all units."""
    actions = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in units)
    return peak_allocated_bytes(trace_of(deep(layers), deep_batch, actions))


def equal_runs(children: int, count: int) -> tuple[str, ...]:
    length = children // count
    firsts = range(0, count * length, length)
    lasts = [*(first - 1 for first in firsts[1:]), children - 1]
    return tuple(
        str(Span(parent="blocks", first=str(a), last=str(b))) for a, b in zip(firsts, lasts, strict=True)
    )


def test_layers_of_a_sequential_in_runs_take_less_than_any_number_of_equal_segments() -> None:
    kept = trace_of(deep(100), deep_batch)
    runs = in_runs(kept, find_units(kept))
    best = min(recomputed_bytes(100, equal_runs(200, count)) for count in (5, 8, 10, 14, 20))
    assert recomputed_bytes(100, runs) < 0.95 * best
    lengths = [int(span.last) - int(span.first) + 1 for span in filter(None, map(Span.parse, runs))]
    assert sorted(lengths, reverse=True) == lengths


def test_blocks_that_are_sequentials_are_in_runs_as_their_layers_would_be() -> None:
    """Each of 100 blocks is a unit and a Sequential of two layers, whose runs would end with it."""
    blocks = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(100)))  # noqa: E731
    kept = trace_of(blocks, deep_batch)
    units = find_units(kept)
    assert units == tuple(map(str, range(100)))
    runs = in_runs(kept, units)
    assert 8 < len(runs) < 30
    actions = tuple(UnitAction(fqn=run, action=Action.RECOMPUTE) for run in runs)
    flat = trace_of(deep(100), deep_batch)
    as_layers = recomputed_bytes(100, in_runs(flat, find_units(flat)))
    assert peak_allocated_bytes(trace_of(blocks, deep_batch, actions)) <= 1.05 * as_layers
    assert len(in_nested_runs(kept, runs)) > len(runs)


def test_the_search_for_runs_ends_where_units_save_a_few_bytes() -> None:
    """Halving an interval of one byte never ends."""
    kept = trace_of(lambda: Row(nn.Linear(1, 1)), lambda n: {"x": torch.randn(n, 1)})
    units = find_units(kept)
    assert units
    assert in_runs(kept, units) == units


def test_runs_to_be_nested_are_shorter_and_save_as_much_as_each_other() -> None:
    kept = trace_of(deep(100), deep_batch)
    runs = in_runs(kept, find_units(kept))
    nested = in_nested_runs(kept, runs)
    lengths = [int(span.last) - int(span.first) + 1 for span in filter(None, map(Span.parse, nested))]
    assert len(nested) > len(runs)
    assert max(lengths[:-1]) - min(lengths[:-1]) <= 1


def test_small_blocks_of_a_long_sequential_are_units_together() -> None:
    """Each of 300 blocks saves a three-hundredth, which alone is no unit."""
    units = units_of(lambda: Row(*(Mixing(4) for _ in range(300))), lambda n: {"x": torch.randn(n, 64, 4)})
    assert 2 <= len(units) <= 8
    assert all(map(Span.parse, units))


def test_each_small_block_of_a_long_list_is_a_unit() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mixing(4) for _ in range(300))
            self.last = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    units = units_of(Listed, lambda n: {"x": torch.randn(n, 64, 4)})
    assert units == tuple(f"blocks.{i}" for i in range(300))


def test_blocks_whose_runs_would_gain_little_stay_as_they_are() -> None:
    vectors = trace_of(lambda: Row(*(Mixing(16) for _ in range(9))), lambda n: {"x": torch.randn(n, 64, 16)})
    units = find_units(vectors)
    assert in_runs(vectors, units) == units
