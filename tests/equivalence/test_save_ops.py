"""Saving what some ops of a unit return, and recomputing the rest, leaves training bit for bit as it was.

Whichever ops are saved: every one alone, all of them, and sets drawn at random.
"""

import copy
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.settings import Precision, Settings, op_kind
from brimful.transforms import apply_units
from helpers.models import GPT, Block, ResNet
from helpers.trained_alike import (
    WIDTH,
    Between,
    Loss,
    assert_identical,
    mean_square,
    next_token,
    recomputing,
    saving,
    train,
    without_collection,
)

__all__ = ["without_collection"]


class _Named(TorchDispatchMode):
    """Notes the name of every op, as a plan would call it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = op_kind(str(func))
        self.names.append(f"{kind}#{self.seen[kind]}")
        self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


def ops_of(unit: nn.Module, x: Tensor, precision: Precision = Precision.FP32) -> list[str]:
    mode = _Named()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16), mode:
        copy.deepcopy(unit)(x.clone())
    return mode.names


def assert_saves_alike(
    model: nn.Module,
    unit: str,
    ops: tuple[str, ...],
    batches: list[Tensor],
    *,
    loss: Loss = mean_square,
    precision: Precision = Precision.FP32,
) -> None:
    other = copy.deepcopy(model)
    apply_units(other, saving(unit, *ops))
    plain = train(model, batches, loss=loss, precision=precision, steps=2)
    assert_identical(plain, train(other, batches, loss=loss, precision=precision, steps=2))


class Draws(nn.Module):
    """Three draws with work between them: saving one must not move the others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.one(x)), 0.3, self.training)
        x = F.dropout(self.two(x), 0.3, self.training, inplace=True)
        return torch.tanh(x + torch.randn_like(x))


class InPlace(nn.Module):
    """Writes over what it made: right behind it, after reading it, through a view, and over a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.norm(self.one(x)))
        z = self.two(y)
        w = z + 1  # reads z before it is written over
        z.mul_(0.5)
        z.view(-1).add_(0.1)
        u = x.clone()
        u[:, :4] = 0
        return torch.tanh(z) * torch.tanh(w) + F.relu_(u + y)


UNITS = {"block": Block(WIDTH), "draws": Draws(), "in place": InPlace()}


def _input(name: str) -> Tensor:
    return torch.randn(2, 5, WIDTH) if name == "block" else torch.randn(4, WIDTH)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("name", UNITS)
def test_every_op_alone_and_all_together(name: str, precision: Precision) -> None:
    torch.manual_seed(0)
    batches = [_input(name) for _ in range(2)]
    ops = ops_of(UNITS[name], batches[0], precision)
    for chosen in ((op,) for op in ops):
        assert_saves_alike(Between(copy.deepcopy(UNITS[name])), "unit", chosen, batches, precision=precision)
    assert_saves_alike(Between(copy.deepcopy(UNITS[name])), "unit", tuple(ops), batches, precision=precision)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_set_of_ops(data: st.DataObject) -> None:
    torch.manual_seed(0)
    name = data.draw(st.sampled_from(sorted(UNITS)))
    precision = data.draw(st.sampled_from([Precision.FP32, Precision.BF16]))
    batches = [_input(name)]
    ops = ops_of(UNITS[name], batches[0], precision)
    chosen = tuple(data.draw(st.sets(st.sampled_from(ops), min_size=1)))
    assert_saves_alike(Between(copy.deepcopy(UNITS[name])), "unit", chosen, batches, precision=precision)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_blocks_of_a_transformer_with_a_tied_weight(precision: Precision) -> None:
    """Under autocast the recomputation casts weights that the forward found cast already."""
    torch.manual_seed(0)
    batches = [torch.randint(40, (2, 12)) for _ in range(2)]
    for ops in (("addmm#0", "addmm#2", "attention#0"), ("attention#0",), ("_to_copy#0", "_to_copy#1")):
        assert_saves_alike(GPT(), "blocks.1", ops, batches, loss=next_token, precision=precision)


@pytest.mark.parametrize("unit", ["layer1.0", "layer2.0", "layer1[0..1]"])
def test_a_residual_block_with_batch_norm_and_in_place_relu(unit: str) -> None:
    """In-place ReLU writes over what batch norm returned; torch's own selective checkpointing raises there."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    for ops in (
        ("convolution#0",),
        ("native_batch_norm#0", "native_batch_norm#1"),
        ("convolution#1", "add_#0"),
    ):
        assert_saves_alike(ResNet(), unit, ops, batches)


class Counted(TorchDispatchMode):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count = kind, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op_kind(str(func)) == self.kind
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ops", "expected"), [((), 6), (("addmm#0",), 5), (("addmm#0", "addmm#1"), 4)])
def test_what_is_saved_does_not_run_again(ops: tuple[str, ...], expected: int) -> None:
    """Four products in the forward; of the unit's two, those not saved run again."""
    unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = Between(unit)
    applied = apply_units(model, saving("unit", *(ops or ("none#0",))))
    with Counted("addmm") as counted:
        mean_square(model, torch.randn(4, WIDTH)).backward()
    assert counted.count == expected
    applied.remove()


def test_in_place_relu_is_left_out_with_the_norm_it_writes_over() -> None:
    model = Between(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Tanh())
    )
    apply_units(model, saving("unit", "native_batch_norm#0"))
    with Counted("relu_") as counted:
        mean_square(model, torch.randn(4, WIDTH)).backward()
    assert counted.count == 1


def test_a_saved_result_that_is_added_in_place_to_another_stays_saved() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            y = self.one(y)
            y += self.two(x)
            return torch.tanh(y)

    model = Between(Adds())
    apply_units(model, saving("unit", "addmm#1"))
    with Counted("addmm") as counted:
        mean_square(model, torch.randn(4, WIDTH)).backward()
    assert counted.count == 5


def test_a_second_backward_recomputes_what_was_saved_and_used() -> None:
    model = Between(Draws())
    other = copy.deepcopy(model)
    apply_units(other, saving("unit", "addmm#0", "native_dropout#0", "bernoulli_#0"))
    batch = torch.randn(4, WIDTH)
    for each in (model, other):
        torch.manual_seed(0)
        value = mean_square(each, batch)
        value.backward(retain_graph=True)
        value.backward()
    assert torch.equal(model.first.weight.grad, other.first.weight.grad)


@pytest.mark.usefixtures("without_collection")
def test_results_are_freed_with_the_graph() -> None:
    """No cycle holds what was saved when the loss is dropped without a backward."""
    model = Between(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    apply_units(model, saving("unit", "tanh#0"))
    storages: list[weakref.ref[Any]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if op_kind(str(func)) == "tanh":
                storages.append(weakref.ref(out.untyped_storage()))
            return out

    with Watching():
        value = mean_square(model, torch.randn(4, WIDTH))
    assert storages[0]() is not None
    del value
    assert storages[0]() is None


# Where the numbers of ops may mean others than the plan's.


class SkipsLayers(nn.Module):
    """Runs the layers it is told to, by a branch that the length of the input may decide."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            x = self.norm(x)
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        return torch.tanh(self.dropout(x))


SKIPPED = saving("unit", "addmm#0", "native_layer_norm#0", "addmm#1")
"""Of the five products of a step that keeps all but these, none runs again."""


def products(model: nn.Module, batch: Tensor) -> int:
    """Linear layers that run in a step."""
    with Counted("addmm") as counted:
        mean_square(model, batch).backward()
    model.zero_grad()
    return counted.count


def test_another_shape_saves_the_same_ops() -> None:
    model = Between(SkipsLayers())
    apply_units(model, SKIPPED)
    assert [products(model, torch.randn(samples, WIDTH)) for samples in (4, 3, 4, 2)] == [4, 4, 4, 4]


def test_a_shape_that_takes_another_branch_is_recomputed_and_that_is_said_once() -> None:
    """The products were first and second, and are second and third; nothing more is saved, and it is right."""
    model = Between(SkipsLayers())
    other = copy.deepcopy(model)
    apply_units(other, SKIPPED)
    batches = [torch.randn(samples, WIDTH) for samples in (4, 6, 4, 6)]
    plain = train(model, batches, steps=2)
    with pytest.warns(UserWarning, match="unit 'unit'.*native_layer_norm in place of addmm") as warned:
        planned = train(other, batches, steps=2)
    assert len(warned) == 1
    assert_identical(plain, planned)
    assert [products(other, torch.randn(samples, WIDTH)) for samples in (4, 6, 4)] == [4, 6, 4]


def test_training_and_eval_mode_have_orders_of_their_own() -> None:
    """Dropout runs in one of them only; saving it is no change of branch in the other."""
    model = Between(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    other = copy.deepcopy(model)
    apply_units(other, saving("unit", "bernoulli_#0", "empty_like#0", "addmm#1"))
    batches = [torch.randn(4, WIDTH)]
    for mode in (True, False, True, False):
        model.train(mode)
        other.train(mode)
        assert_identical(train(model, batches, steps=1), train(other, batches, steps=1))


def test_a_recomputation_that_runs_other_ops_than_its_forward_is_said_once() -> None:
    class Detached(nn.Module):
        """Takes a negative once, in its first forward of two runs, which it counts in its class."""

        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            Detached.calls += 1
            if Detached.calls % 2:
                x.detach().neg()
            return torch.tanh(self.one(torch.tanh(x)))

    model = Between(Detached())
    apply_units(model, saving("unit", "addmm#0"))
    with pytest.warns(UserWarning, match="recomputation runs other ops.*op 0 is tanh, and was neg") as warned:
        counts = [products(model, torch.randn(4, WIDTH)) for _ in range(3)]
    assert counts == [4, 4, 4]
    assert len(warned) == 1


class TieRouter(nn.Module):
    """Each sample goes to the better of two experts whose scores are equal, but for noise in the last digit.

    The noise comes from Python's side, other in each call, as GPU kernels that add in any order make it.
    """

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        TieRouter.calls += 1
        noise = torch.tensor([0.0, 1e-7 * (-1) ** TieRouter.calls])
        weight, chosen = (torch.sigmoid(self.gate(x)) + noise).topk(1, dim=-1)
        both = torch.stack([torch.tanh(expert(x)) for expert in self.experts], dim=1)
        return weight * both[torch.arange(len(x)), chosen[:, 0]]


@pytest.mark.parametrize(
    ("action", "is_right"), [(recomputing("unit"), False), (saving("unit", "topk#0"), True)]
)
def test_a_saved_choice_of_experts_does_not_change_with_the_last_digit_of_the_scores(
    action: Settings, is_right: bool
) -> None:
    """Recomputed, the other expert gets the gradient, and nothing tells of it."""
    torch.manual_seed(0)
    batch, model = torch.randn(4, WIDTH), Between(TieRouter())
    other = copy.deepcopy(model)
    apply_units(other, action)
    for each in (model, other):
        TieRouter.calls = 0
        mean_square(each, batch).backward()
    for plain, planned in zip(model.unit.experts, other.unit.experts, strict=True):
        alike = torch.allclose(plain.weight.grad, planned.weight.grad, rtol=1e-5, atol=1e-8)
        assert alike is is_right
