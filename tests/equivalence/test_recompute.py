"""Recomputing leaves training bit for bit as it was: losses, gradients, parameters, buffers over several steps.

Only scheduling changes, the same kernels run on the same numbers, so every comparison is `torch.equal` unless a
test says otherwise.
"""

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import UsageError
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.settings import Precision, Settings
from brimful.transforms import apply_units
from helpers.faults import OutOfMemoryAt
from helpers.models import GPT, Block, ResNet, UNet, double_convolution, vgg
from helpers.trained_alike import (
    WIDTH,
    Between,
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
)
from job_zoo import JobCase
from job_zoo.steps import planned_peak_bytes


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# Whole models.


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    "units",
    [
        ("blocks.1",),
        ("blocks.0", "blocks.2"),
        ("embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"),
        ("blocks.0.attention", "blocks.1.mlp[1..3]"),
        ("blocks.1", "blocks.1.mlp"),  # one inside another
        ("",),  # the whole model
    ],
    ids=str,
)
def test_a_transformer_with_dropout_and_a_tied_weight(units: tuple[str, ...], precision: Precision) -> None:
    """Under autocast the weight that is tied is cast, and cached, in several recomputations."""
    assert_trains_identically(GPT(), units, tokens(), loss=next_token, precision=precision)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("units", [("layer1.0",), ("layer1", "layer2.0", "layer2.1", "layer3")], ids=str)
def test_a_resnet_with_batch_norm_and_in_place_ops(units: tuple[str, ...], precision: Precision) -> None:
    assert_trains_identically(ResNet(), units, images(), precision=precision)


@pytest.mark.parametrize(
    "units",
    [("down1", "down2", "bottom", "merge2", "merge1"), ("down1[0..2]", "merge1[3..5]", "bottom[0..3]")],
    ids=str,
)
def test_a_unet_with_skips(units: tuple[str, ...]) -> None:
    assert_trains_identically(UNet(), units, images())


@pytest.mark.parametrize(
    "units", [("0[0..4]", "0[5..9]"), ("0[2..4]", "1[1..3]"), ("0", "1"), ("[0..1]",), ("[0..0]",)], ids=str
)
def test_runs_of_a_sequential(units: tuple[str, ...]) -> None:
    assert_trains_identically(vgg(), units, images())


# Buffers that a forward changes.


def test_batch_norm_counts_once_and_averages_once_per_forward() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    applied = apply_units(model, recomputing("[0..2]"))
    plain = copy.deepcopy(model)
    applied.remove()
    assert plain[1].num_batches_tracked == 0
    for expected in (1, 2, 3):
        mean_square(plain, vectors()[0]).backward()
        assert plain[1].num_batches_tracked == expected


class EndsInBatchNorm(nn.Module):
    """Early stop cuts a recomputation short of the norm's update."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class ReplacesItsBuffer(nn.Module):
    """Assigns a new tensor where batch norm writes to the old one, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("unused", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.scale)
        self.scale = self.scale * 0.9
        return torch.tanh(y * self.scale)


class AddsAnEarlierResult(nn.Module):
    """Keeps its result with its graph, and reads it in some of the next forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        before = 0 if self.last is None or x[0, 0] > 0 else self.last.detach()
        self.last = torch.tanh(torch.tanh(self.layer(x)) + before)
        return self.last


class HasCodebook(nn.Module):
    """Moves a codebook through `.data`, which raises no version, after it has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.codes)
        self.codes.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return torch.tanh(y)


class HasCodebookElsewhere(HasCodebook):
    """Gives its buffer other memory through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.codes)
        self.codes.data = (self.codes + x.detach().mean(0)) / 2
        return torch.tanh(y)


class WritesToView(HasCodebook):
    """Writes to a part of its buffer, by an attribute that shares its memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.codes)
        self.codes.data[2:].copy_(x.detach().mean(0)[2:])
        return torch.tanh(y)


class Draws(nn.Module):
    """Multiplies by what a generator of its own draws, or by what an array of its own has."""

    def __init__(self, held: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.held, self.draw = nn.Linear(WIDTH, WIDTH), held, draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(x * (0.5 + self.draw(self.held)))))


def next_of_array(array: Any) -> float:
    array += 0.1
    return float(array.sum()) % 1


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: Draws(
        torch.Generator().manual_seed(1), lambda held: float(torch.rand((), generator=held))
    ),
    "python": lambda: Draws(random.Random(1), lambda held: held.random()),
    "numpy": lambda: Draws(np.random.default_rng(1), lambda held: held.random()),
    "numpy, old": lambda: Draws(np.random.RandomState(1), lambda held: held.rand()),
    "an array": lambda: Draws(np.zeros(4), next_of_array),
    "in a list": lambda: Draws([{"rng": random.Random(1)}], lambda held: held[0]["rng"].random()),
}


class HasTeacher(nn.Module):
    """A moving average that has the values of what it follows until the first update; `hold` sets it."""

    def __init__(self, hold: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        hold(self, self.layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x)) - torch.tanh(x @ self.teacher.detach().clone())
        self.teacher.data.lerp_(self.layer.weight.data, 0.5)
        return torch.tanh(y)


def teachers() -> dict[str, nn.Module]:
    return {
        "teacher in a buffer": HasTeacher(lambda module, weight: module.register_buffer("teacher", weight)),
        "teacher in an attribute": HasTeacher(lambda module, weight: setattr(module, "teacher", weight)),
        "frozen teacher": HasTeacher(
            lambda module, weight: setattr(module, "teacher", nn.Parameter(weight, requires_grad=False))
        ),
    }


class ChangesItsBufferLater(nn.Module):
    """Its first forward leaves the buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch._C._current_autograd_node():
            self.calls += 1
        if self.calls > 1:
            self.count += 1
        return torch.tanh(torch.tanh(x))


@pytest.mark.parametrize(
    "unit",
    [
        EndsInBatchNorm(),
        ReplacesItsBuffer(),
        AddsAnEarlierResult(),
        ChangesItsBufferLater(),
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(WIDTH)),
        nn.Sequential(nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh()),
    ],
    ids=lambda unit: type(unit[0] if isinstance(unit, nn.Sequential) else unit).__name__,
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_buffers_and_norms(unit: nn.Module) -> None:
    assert_trains_identically(Between(copy.deepcopy(unit)), ("unit",), vectors())


@pytest.mark.parametrize("unit", ["codebook", "codebook elsewhere", "view of a codebook", *teachers()])
@pytest.mark.parametrize(
    "units", [recomputing("unit"), nesting(("first", "unit"))], ids=["recomputed", "nested"]
)
def test_what_a_forward_writes_through_data_is_written_once(unit: str, units: Settings) -> None:
    made = {
        "codebook": HasCodebook(),
        "codebook elsewhere": HasCodebookElsewhere(),
        "view of a codebook": WritesToView(),
        **teachers(),
    }
    model = Between(made[unit])
    other = copy.deepcopy(model)
    apply_units(other, units)
    batches = vectors()
    assert_identical(train(model, batches), train(other, batches))
    for name, value in vars(model.unit).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(other.unit, name))


@pytest.mark.parametrize(
    "units", [recomputing("unit"), nesting(("first", "unit"))], ids=["recomputed", "nested"]
)
@pytest.mark.parametrize("kind", DRAWING)
def test_a_generator_or_an_array_of_a_unit_is_restored_for_a_recomputation(kind: str, units: Settings) -> None:
    model, other = (Between(DRAWING[kind]()) for _ in range(2))
    other.load_state_dict(model.state_dict())
    apply_units(other, units)
    batches = vectors()
    assert_identical(train(model, batches), train(other, batches))


@pytest.mark.parametrize("failing", ["aten.clone.default", "aten.native_batch_norm.default"])
def test_no_mode_stays_in_force_where_memory_runs_out_in_a_unit(failing: str) -> None:
    model = Between(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()))
    apply_units(model, recomputing("unit"))
    fault = OutOfMemoryAt(fails=lambda name, _args: name == failing)
    with pytest.raises(torch.OutOfMemoryError) as kept, fault:  # the error keeps the frames, and what they hold
        mean_square(model, vectors()[0])
    assert kept.value.__traceback__ is not None
    assert _len_torch_dispatch_stack() == 0


def test_a_unit_that_writes_to_its_frozen_base_through_data_is_refused() -> None:
    """Frozen parameters that are most of a unit are not copied, so they cannot be restored."""
    unit = HasTeacher(
        lambda module, weight: setattr(module, "teacher", nn.Parameter(weight, requires_grad=False))
    )
    unit.layer.requires_grad_(requires_grad=False)
    model = Between(unit)
    apply_units(model, recomputing("unit"))
    with pytest.raises(UsageError, match=r"writes to its parameter '.*teacher'"):
        mean_square(model, vectors()[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "units",
    [recomputing("0", "1", "2"), nesting(("0", "1", "2")), recomputing("1")],
    ids=["recomputed", "nested", "one"],
)
@pytest.mark.parametrize("batches", [1, 3])
def test_weights_under_weight_normalisation_take_what_is_predicted(units: Settings, batches: int) -> None:
    """Each forward makes them anew; those of the step before are not held beside them."""
    width = WIDTH * 8

    def normed() -> nn.Module:
        layers = (nn.utils.weight_norm(nn.Linear(width, width)) for _ in range(2))
        return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))

    job = Job(
        model=lambda: nn.Sequential(*(normed() for _ in range(4))),
        loss=mean_square,
        batch=lambda n: torch.randn(n, width),
        optimizer="sgd",
    )
    settings = replace(units, micro_batch_size=8, gradient_accumulation_steps=batches)
    case = JobCase(name="weight norm", kind="layers", job=lambda: job, samples=8 * batches)
    true_bytes = planned_peak_bytes(case, settings, [])
    for steps in (1, 2):
        trace = capture_step(job, settings, find_device("cpu"), steps=steps)
        for each in (trace, trace.with_last_step_again()):
            assert predict_memory(each).steady_peak_allocated_bytes == pytest.approx(true_bytes, rel=0.002)
    gc.collect()
    assert not any(type(each) is FakeTensor and each.grad_fn is not None for each in gc.get_objects())


def test_a_buffer_that_first_changes_in_training_mode_after_a_forward_in_eval_mode() -> None:
    """What changes is found per training mode: spectral norm iterates in training mode only."""
    model = Between(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    other = copy.deepcopy(model)
    apply_units(other, recomputing("unit"))
    for each in (model, other):
        mean_square(each.eval(), vectors()[0]).backward()
        each.zero_grad()
        each.train()
    batches = vectors()
    assert_identical(train(model, batches), train(other, batches))


def test_switching_between_training_and_eval_mode() -> None:
    model = Between(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Tanh()))
    other = copy.deepcopy(model)
    apply_units(other, recomputing("unit"))
    batches = vectors()
    for mode in (True, False, True, True, False):
        model.train(mode)
        other.train(mode)
        assert_identical(train(model, batches, steps=1), train(other, batches, steps=1))


def test_a_second_backward_through_the_same_graph_recomputes_from_the_same_buffers() -> None:
    model = Between(ReplacesItsBuffer())
    other = copy.deepcopy(model)
    apply_units(other, recomputing("unit"))
    (batch,) = vectors(count=1)
    for each in (model, other):
        value = mean_square(each, batch)
        value.backward(retain_graph=True)
        value.backward()
    assert torch.equal(model.first.weight.grad, other.first.weight.grad)


# In-place ops, sharing, arguments.


class InPlace(nn.Module):
    """Works in place on what it made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.linear1(x), inplace=True)
        y = F.dropout(self.linear2(y), 0.3, self.training, inplace=True)
        y += x
        return F.relu_(y)


class TwoResults(nn.Module):
    """A tuple in, a tuple out, with what is no tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, str], *, scale: float) -> tuple[Tensor, dict[str, object]]:
        x, word = pair
        y = torch.tanh(self.linear(x))
        return y, {"scaled": torch.tanh(y * scale), "word": word}


class Caller(nn.Module):
    """Calls units with a nest, a keyword, a mask and None."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.masked = TwoResults(), Masked()

    def forward(self, x: Tensor) -> Tensor:
        y, rest = self.pair((x, "word"), scale=0.5)
        assert rest["word"] == "word"
        y = self.masked(hidden=y + rest["scaled"], mask=x > 0, function="gelu", use_reentrant=None)
        return y.float()


class Masked(nn.Module):
    """Takes all by keyword, one named as an argument of `torch.utils.checkpoint.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, mask: Tensor, function: str, use_reentrant: object) -> Tensor:
        assert use_reentrant is None
        return F.dropout(getattr(F, function)(self.linear(hidden)).masked_fill(mask, 0), 0.2, self.training)


class Shared(nn.Module):
    """One block that runs three times in a forward, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.other(self.block(x))))


class Router(nn.Module):
    """Mixture of experts: each sample goes to its two best, with noise on the choice while training."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(experts))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        scores = scores + torch.randn_like(scores)
        weights, chosen = scores.softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x, dtype=weights.dtype)
        for index, expert in enumerate(self.experts):
            sample, slot = torch.where(chosen == index)
            self.load[index] += sample.numel()
            out = out.index_add(0, sample, (expert(x[sample]) * weights[sample, slot, None]).to(out.dtype))
        return out


def test_in_place_ops_inside_a_unit() -> None:
    assert_trains_identically(Between(InPlace()), ("unit",), vectors())


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_keywords_nests_and_arguments_that_are_no_tensors(precision: Precision) -> None:
    assert_trains_identically(Caller(), ("pair", "masked"), vectors(), precision=precision)


@pytest.mark.parametrize("units", [("block",), ("block", "other"), ("block[1..3]",)], ids=str)
def test_a_module_that_runs_several_times_in_a_forward(units: tuple[str, ...]) -> None:
    assert_trains_identically(Shared(), units, vectors())


def test_a_unit_used_in_two_forwards_of_one_step() -> None:
    def twice(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - model(batch.flip(0))).square().mean() + mean_square(model, batch)

    assert_trains_identically(Shared(), ("block", "other"), vectors(), loss=twice)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_weight_shared_by_two_units(precision: Precision) -> None:
    """Under autocast the first unit casts the weight, the second finds the cast in the cache."""
    units = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    units[1][0].weight = units[0][0].weight
    assert_trains_identically(nn.Sequential(*units), ("0", "1"), vectors(), precision=precision)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_mixture_of_experts_chooses_the_same_experts_again(precision: Precision) -> None:
    """The noise is drawn again from the same state, so the choice, and each expert's load, repeat."""
    assert_trains_identically(Between(Router()), ("unit",), vectors(samples=8), precision=precision)


def test_the_first_layer_whose_input_requires_no_gradient() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout()), nn.Linear(WIDTH, 1))
    assert_trains_identically(model, ("0",), vectors())


@pytest.mark.parametrize("frozen", ["unit.attention", "unit.norm1.weight", "first"])
def test_frozen_parameters_inside_and_before_a_unit(frozen: str) -> None:
    model = Between(Block(WIDTH))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(frozen)
    batches = [torch.randn(2, 5, WIDTH)]
    assert_trains_identically(model, ("unit",), batches)


def test_several_units_draw_the_same_masks_as_without_recomputing() -> None:
    """Every mask of every unit repeats, and the random stream goes on afterwards as if nothing had happened."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout()) for _ in range(4)))
    units = tuple(str(i) for i in range(4))
    assert_trains_identically(model, units, vectors(), steps=4)


def test_a_lstm_with_its_tuple_of_results() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _state = self.lstm(x)
            return self.head(hidden)

    assert_trains_identically(Tagger(), ("lstm",), [torch.randn(2, 5, WIDTH)])


# Where nothing is to be recomputed.


class Counting(nn.Module):
    """Counts its calls in its class: a count of its own is as a plain step leaves it."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        Counting.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return torch.tanh(torch.tanh(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_runs_as_it_is(mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Between(Counting())
    expected = model.eval()(vectors()[0])
    apply_units(model, recomputing("unit"))
    monkeypatch.setattr(
        "brimful.transforms.recompute.checkpoint", lambda *_a, **_k: pytest.fail("checkpointed")
    )
    with mode():
        torch.manual_seed(0)
        batch = vectors()[0]
        assert model(batch).requires_grad is False
    assert expected.shape == (4, WIDTH)


def test_a_forward_runs_again_in_backward_and_only_then() -> None:
    model = Between(Counting())
    apply_units(model, recomputing("unit"))
    value = mean_square(model, vectors()[0])
    assert model.unit.calls == 1
    value.backward()
    assert model.unit.calls == 2


def test_a_counter_in_python_counts_recomputations_too() -> None:
    """What holds: Python state that a forward changes is changed again; brimful undoes buffers only."""
    model = Between(Counting())
    apply_units(model, recomputing("unit"))
    train(model, vectors(count=1), steps=3)
    assert model.unit.calls == 6


class Scaled(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * (0.5 + self.draw()))


def gradient_and_next_draw(draw: Callable[[], float], *units: str) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Between(Scaled(draw))
    apply_units(model, recomputing(*units))
    mean_square(model, torch.ones(1, WIDTH)).backward()
    gradient = model.first.weight.grad
    assert gradient is not None
    return gradient, draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_numbers_from_python_s_and_numpy_s_generators_are_drawn_again_alike(draw: Callable[[], float]) -> None:
    """Plain checkpointing restores torch's random state only; layer drop by `random.random()` is common."""
    (plain, plain_next), (recomputed, next_draw) = (
        gradient_and_next_draw(draw, *units) for units in ((), ("unit",))
    )
    assert torch.equal(plain, recomputed)
    assert plain_next == next_draw


def test_numbers_from_a_generator_of_the_model_s_own_are_not_repeated() -> None:
    """What holds: nothing tells of it. Draw with `torch.rand(())` instead, or keep such a unit."""
    (plain, _), (recomputed, _) = (
        gradient_and_next_draw(iter((1.0, 3.0, 5.0, 7.0)).__next__, *units) for units in ((), ("unit",))
    )
    assert not torch.equal(plain, recomputed)


def test_a_unit_that_changes_its_input_in_place_fails_instead_of_giving_a_wrong_gradient() -> None:
    model = Between(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    apply_units(model, recomputing("unit"))
    value = mean_square(model, vectors()[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_unit_without_tensors_among_its_arguments_is_kept() -> None:
    """Without a tensor, checkpoint does not know whose random state to restore."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, rows: int) -> Tensor:
            return F.dropout(self.table[:rows].tanh(), 0.5, self.training)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.positions(len(x))

    model = Model()
    other = copy.deepcopy(model)
    apply_units(other, recomputing("positions"))
    batches = vectors()
    assert_identical(train(model, batches), train(other, batches))


def test_arguments_given_by_keyword_reach_checkpoint_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for the devices whose random state to restore among the positional arguments only."""
    given = []

    def spy(function: object, *args: object, **_options: object) -> object:
        given.append(args)
        return function(*args)

    monkeypatch.setattr("brimful.transforms.recompute.checkpoint", spy)
    unit = Masked()
    model = nn.ModuleDict({"unit": unit})
    apply_units(model, recomputing("unit"))
    x = torch.randn(2, WIDTH)
    unit(hidden=x, mask=x > 0, function="gelu", use_reentrant=None)
    assert given[0][0] is x


# Accumulation.


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_accumulated_gradients(precision: Precision) -> None:
    """Micro-batch by micro-batch the plain and the recomputed model accumulate the same bits."""
    model = Between(Block(WIDTH))
    batches = [torch.randn(2, 5, WIDTH) for _ in range(4)]
    assert_trains_identically(model, ("unit", "last"), batches, precision=precision)


def test_accumulated_gradients_are_those_of_the_whole_batch_up_to_summation_order() -> None:
    """A sum over 8 samples in two parts: float32 rounds each of its terms to 2**-24 of the largest."""
    model = Between(Block(WIDTH, dropout=0.0))
    other = copy.deepcopy(model)
    apply_units(other, recomputing("unit"))
    batch = torch.randn(8, 5, WIDTH)
    (whole,) = train(model, [batch], steps=1)
    (parts,) = train(other, list(batch.split(4)), steps=1)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(
            parts.gradients[name], gradient, rtol=0, atol=32 * 2**-24 * float(gradient.abs().max())
        )


# Chains of many kinds at once.


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_units_of_a_mixed_model(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = {
        "convolutions": double_convolution(3, 4),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "norm": nn.BatchNorm1d(WIDTH),
        "in_place": InPlace(),
        "router": Router(),
        "shared": Shared(),
    }
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    names = ("convolutions", "norm", "in_place", "router", "shared")
    chosen = [name for name in names if torch.rand((), generator=generator) < 0.5]
    units = tuple(chosen) or ("in_place",)
    assert_trains_identically(model, units, images(samples=6))


@pytest.mark.filterwarnings("ignore")
def test_a_first_forward_and_its_recomputation_run_compiled_code_alike() -> None:
    inner = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="aot_eager")
    model = Between(nn.Sequential(inner, nn.Tanh()))
    apply_units(model, recomputing("unit"))
    for batch in vectors():
        mean_square(model, batch).backward()
