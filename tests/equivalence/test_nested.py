"""Nested segments leave training bit for bit as it was, and hold no inputs but those of their anchors.

Every comparison is `torch.equal`, as in `test_recompute.py`.
"""

import copy
import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.settings import Precision, Settings
from brimful.trace import find_units, in_nested_runs, in_runs
from brimful.transforms import apply_units
from brimful.transforms.segments import Call
from helpers.models import GPT, Block, ResNet, vgg
from helpers.trained_alike import (
    WIDTH,
    Loss,
    assert_identical,
    assert_trains_identically,
    images,
    mean_square,
    nesting,
    next_token,
    recomputing,
    tokens,
    train,
    vectors,
    without_collection,
)

__all__ = ["without_collection"]
BLOCKS = tuple(f"blocks.{i}" for i in range(6))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Ran:
    """How often forwards ran again for units behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run_again = Call.run_again

        def counted(call: Call) -> None:
            self.count += 1
            run_again(call)

        monkeypatch.setattr(Call, "run_again", counted)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    return Ran(monkeypatch)


def assert_nests_identically(
    model: nn.Module,
    settings: Settings,
    batches: list[Tensor],
    ran: Ran,
    *,
    runs_again: int,
    loss: Loss = mean_square,
    precision: Precision = Precision.FP32,
) -> None:
    """Training is the same, and in each backward so many forwards run again."""
    other = copy.deepcopy(model)
    apply_units(other, settings)
    plain = train(model, batches, loss=loss, precision=precision)
    assert_identical(plain, train(other, batches, loss=loss, precision=precision))
    assert ran.count == runs_again * 3 * len(batches)


class Chain(nn.Module):
    """Parts one after another, with something between each two."""

    def __init__(self, *parts: nn.Module, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            x = part(self.between(x) if i else x)
        return x


def linear(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Tanh())


def deep() -> nn.Sequential:
    """Two hundred layers, some of which draw random numbers."""
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(100)]
    for each in linears:
        nn.init.orthogonal_(each.weight)  # gradients do not vanish
    return nn.Sequential(*(m for i, each in enumerate(linears) for m in (each, nn.Dropout(0.01 * (i % 2)))))


def test_runs_of_a_long_sequential_train_identically_recomputed_and_nested() -> None:
    job = Job(
        model=deep,
        loss=lambda model, batch: mean_square(model, batch["x"]),
        batch=lambda samples: {"x": torch.randn(samples, WIDTH)},
    )
    trace = capture_step(job, Settings(micro_batch_size=4096), find_device("T4"))
    runs = in_runs(trace, find_units(trace))
    nested = in_nested_runs(trace, runs)
    assert 8 < len(runs) < len(nested)
    batches = vectors()
    assert_trains_identically(deep(), runs, batches)
    third = len(nested) // 3
    settings = nesting(nested[:third], nested[third : 2 * third], nested[2 * third :])
    model = deep()
    other = copy.deepcopy(model)
    apply_units(other, settings)
    assert_identical(train(model, batches), train(other, batches))


PARTS = tuple(f"parts.{i}" for i in range(3))


# Whole models.


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    ("segments", "runs_again"),
    [
        ((BLOCKS,), 5),
        ((BLOCKS[:2], BLOCKS[2:5], BLOCKS[5:]), 3),
        ((("embedding", *BLOCKS, "norm"),), 7),
        ((("blocks.1", "blocks.3"),), 0),  # they do not follow one another, so the input is held
    ],
    ids=["one", "three", "all", "apart"],
)
def test_a_transformer_with_dropout_and_a_tied_weight(
    segments: tuple[tuple[str, ...], ...], runs_again: int, precision: Precision, ran: Ran
) -> None:
    """Masks drawn in the forward are drawn in the forward that runs again and in the recomputation."""
    assert_nests_identically(
        GPT(layers=6),
        nesting(*segments),
        tokens(),
        ran,
        runs_again=runs_again,
        loss=next_token,
        precision=precision,
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_resnet_counts_its_batch_norms_once(precision: Precision, ran: Ran) -> None:
    units = tuple(f"layer{stage}.{i}" for stage in (1, 2, 3) for i in range(2))
    assert_nests_identically(ResNet(), nesting(units), images(), ran, runs_again=5, precision=precision)


def test_runs_of_a_sequential(ran: Ran) -> None:
    units = ("0[0..4]", "0[5..8]", "0[9..9]", "1")
    assert_nests_identically(vgg(), nesting(units), images(), ran, runs_again=3)


def test_accumulated_gradients(ran: Ran) -> None:
    batches = [torch.randn(2, 5, WIDTH) for _ in range(4)]
    model = Chain(*(Block(WIDTH) for _ in range(3)))
    assert_nests_identically(model, nesting(PARTS), batches, ran, runs_again=2)


# What is between units, and what they are given.


class Masked(nn.Module):
    """A residual layer with a mask and a flag by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        y = torch.tanh(self.linear(hidden)) * scale
        return hidden + (y if mask is None else y.masked_fill(mask, 0.0))


class Masking(nn.Module):
    """Calls layers as transformers libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for i, part in enumerate(self.parts):
            x = part(hidden=x, mask=mask if i else None, scale=0.5)
        return x


class Pair(nn.Module):
    """A tuple in, a tuple out, with what is no tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, dict[str, object]]) -> tuple[Tensor, dict[str, object]]:
        x, rest = pair
        y = torch.tanh(self.linear(x))
        assert rest["word"] == "word"
        return y, {"sum": torch.tanh(y + rest["sum"]), "word": "word"}


class Pairs(nn.Module):
    """Hands on all that a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, {"sum": x.cos(), "word": "word"})
        for part in self.parts:
            pair = part(pair)
        return pair[0] + pair[1]["sum"]


class Skipping(Chain):
    """What the first part returns is used again at the end, and so is there all the time."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.parts[0](x)
        return self.parts[2](self.parts[1](first)) * first


class Twice(nn.Module):
    """Its one part is called twice in a row, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linear(nn.Dropout(0.3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.parts
        return three(two(two(one(x))))


class Shared(nn.Module):
    """Two units that share a module with a buffer which changes, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        norm, layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.Sequential(layer, norm, nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    ("model", "runs_again"),
    [
        (Masking(), 2),
        (Pairs(), 2),
        (Skipping(linear(), linear(), linear()), 2),
        (Twice(), 2),
        (Shared(), 2),
        (Chain(linear(), linear(), linear(), between=torch.sin), 0),
        (Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), between=lambda x: x.mul_(2.0)), 0),
        (Chain(linear(), linear(), linear(), between=lambda x: x[:]), 0),
    ],
    ids=["keywords", "pairs", "skip", "twice", "shared", "changed", "in place", "view"],
)
def test_only_what_the_unit_before_returned_is_let_go(
    model: nn.Module, runs_again: int, precision: Precision, ran: Ran
) -> None:
    assert_nests_identically(
        copy.deepcopy(model), nesting(PARTS), vectors(), ran, runs_again=runs_again, precision=precision
    )


class ChangedLater(Chain):
    """Writes over what the second part was given, which that part's gradient does not need in this model."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.parts[0](x)
        second = self.parts[1](first)
        first.add_(1.0)
        return self.parts[2](second)


def test_an_input_may_be_written_over_after_it_was_let_go(ran: Ran) -> None:
    """It is made again, not read. Held, as that of a recomputed unit, it could not be used."""
    model = ChangedLater(Block(WIDTH), linear(), linear())
    recomputed = copy.deepcopy(model)
    apply_units(recomputed, recomputing("parts.1"))
    batch = torch.randn(2, 3, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mean_square(recomputed, batch).backward()
    nested = copy.deepcopy(model)
    apply_units(nested, nesting(PARTS))
    reference = Chain(*copy.deepcopy(model).parts)
    for each in (reference, nested):
        torch.manual_seed(1)
        mean_square(each, batch).backward()
    for expected, found in zip(reference.parameters(), nested.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_an_anchor_s_input_that_was_written_over_is_an_error_not_a_wrong_gradient() -> None:
    model = Chain(linear(), linear(), linear())
    apply_units(model, nesting(PARTS))
    x = torch.randn(2, WIDTH)
    value = mean_square(model, x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# Random numbers and modes.


class Draws(nn.Module):
    """Multiplies by a number drawn anew in each call."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.linear(x)) * self.draw())


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["random", "numpy", "torch"],
)
def test_random_numbers_are_drawn_again_alike(draw: Callable[[], float]) -> None:
    results = []
    model = Chain(*(Draws(draw) for _ in range(3)))
    for settings in (Settings(micro_batch_size=1), nesting(PARTS)):
        other = copy.deepcopy(model)
        apply_units(other, settings)
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        mean_square(other, vectors()[0] * 0 + 1).backward()
        results.append(([p.grad for p in other.parameters()], draw()))
    (plain, plain_next), (nested, nested_next) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))
    assert plain_next == nested_next


class TellsMode(nn.Module):
    """Computes something else without gradients, as fast paths of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * (1.0 if torch.is_grad_enabled() and x.requires_grad else 2.0))


def test_what_runs_again_runs_with_gradients_as_the_forward_did(ran: Ran) -> None:
    model = Chain(nn.Linear(WIDTH, WIDTH), *(TellsMode() for _ in range(3)))
    units = ("parts.1", "parts.2", "parts.3")
    assert_nests_identically(model, nesting(units), vectors(), ran, runs_again=2)


def test_frozen_units_below_trained_ones(ran: Ran) -> None:
    """What they return asks for no gradient."""
    model = Chain(linear(), linear(), linear())
    for part in model.parts[:2]:
        part.requires_grad_(False)
    assert_nests_identically(model, nesting(PARTS), vectors(), ran, runs_again=2)


def test_without_gradients_and_in_eval_mode_units_are_called_straight() -> None:
    model = Chain(*(linear(nn.Dropout(0.3)) for _ in range(3))).eval()
    batch = vectors()[0]
    expected = model(batch)
    apply_units(model, nesting(PARTS))
    with torch.no_grad():
        assert torch.equal(model(batch), expected)


# Several backwards.


def test_a_second_backward_through_the_same_graph(ran: Ran) -> None:
    model = Chain(*(linear(nn.Dropout(0.3)) for _ in range(3)))
    other = copy.deepcopy(model)
    apply_units(other, nesting(PARTS))
    (batch,) = vectors(count=1)
    for each in (model, other):
        torch.manual_seed(1)
        value = mean_square(each, batch)
        value.backward(retain_graph=True)
        value.backward()
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    assert ran.count == 4


def test_two_forwards_before_two_backwards(ran: Ran) -> None:
    model = Chain(*(linear(nn.Dropout(0.3)) for _ in range(3)))
    other = copy.deepcopy(model)
    apply_units(other, nesting(PARTS))
    batches = vectors()
    for each in (model, other):
        torch.manual_seed(1)
        values = [mean_square(each, batch) for batch in batches]
        for value in values:
            value.backward()
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    assert ran.count == 4


def test_without_early_stop(ran: Ran) -> None:
    model = Chain(*(linear(nn.Dropout(0.3)) for _ in range(3)))
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert_nests_identically(model, nesting(PARTS), vectors(), ran, runs_again=2)


# Memory.


class Storages:
    """Which of the storages that units return are still there."""

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self._seen: list[weakref.ref[torch.UntypedStorage]] = []
        for unit in units:
            model.get_submodule(unit).register_forward_hook(self._see)

    def _see(self, _module: nn.Module, _args: object, returned: Tensor) -> None:
        self._seen.append(weakref.ref(returned.untyped_storage()))

    def there(self) -> list[bool]:
        return [seen() is not None for seen in self._seen]


@pytest.mark.usefixtures("without_collection")
def test_inputs_of_nested_units_are_not_there_between_forward_and_backward() -> None:
    """The last unit's result is the norm's input, which is kept."""
    (batch,) = [torch.randint(40, (2, 12))]
    expected = {
        "recomputed": [True] * 6,
        "one": [False] * 5 + [True],
        "two": [False, False, True, False, False, True],
    }
    for name, settings in (
        ("recomputed", recomputing(*BLOCKS)),
        ("one", nesting(BLOCKS)),
        ("two", nesting(BLOCKS[:3], BLOCKS[3:])),
    ):
        model = GPT(layers=6)
        apply_units(model, settings)
        storages = Storages(model, BLOCKS)
        value = next_token(model, batch)
        assert storages.there() == expected[name], name
        value.backward()
        assert storages.there() == [False] * 6, name


@pytest.mark.usefixtures("without_collection")
def test_a_graph_that_is_dropped_without_a_backward_leaves_nothing() -> None:
    model = Chain(*(linear() for _ in range(3)))
    apply_units(model, nesting(PARTS))
    x = torch.randn(2, WIDTH)
    given = weakref.ref(x.untyped_storage())
    value = mean_square(model, x)
    del x
    assert given() is not None
    del value
    assert given() is None


@pytest.mark.usefixtures("without_collection")
def test_inputs_made_again_are_gone_as_their_units_backwards_are() -> None:
    """In the backward of a segment's unit, of inputs made again only those of units before it are there."""
    model = Chain(*(linear() for _ in range(4)))
    made: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []
    units = tuple(f"parts.{i}" for i in range(4))
    apply_units(model, nesting(units))
    run_again = Call.run_again

    def seen(call: Call) -> None:
        run_again(call)
        made.extend(weakref.ref(argument.read().untyped_storage()) for argument in call.wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "run_again", seen)
        for part in model.parts:
            part[0].weight.register_hook(lambda _g: counts.append(sum(one() is not None for one in made)))
        mean_square(model, vectors()[0]).backward()
    assert len(made) == 3
    assert counts == [2, 1, 0, 0]


def test_a_copy_of_an_applied_model_nests_by_itself(ran: Ran) -> None:
    model = Chain(*(linear() for _ in range(3)))
    apply_units(model, nesting(PARTS))
    other = copy.deepcopy(model)
    mean_square(other, vectors()[0]).backward()
    assert ran.count == 2
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())
