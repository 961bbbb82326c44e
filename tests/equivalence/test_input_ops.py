"""Units with the ops that make their input train bit for bit as before, and hold no concatenation.

Every comparison is `torch.equal`, as in `test_recompute.py`.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.settings import Action, Precision, Settings, UnitAction, has_input_ops
from brimful.transforms import apply_units
from brimful.transforms.input_ops import Made
from helpers.trained_alike import assert_identical, recomputing, train

CHANNELS = 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """What was made again."""
    found: list[Made] = []
    again = Made.again

    def counted(made: Made) -> Tensor:
        found.append(made)
        return again(made)

    monkeypatch.setattr(Made, "again", counted)
    return found


def double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class SmallUNet(nn.Module):
    """One level: `up` makes features of the skip's size, `join` joins both."""

    def __init__(self, up: Callable[[Tensor], Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = double(3, CHANNELS)
        self.down = nn.Sequential(nn.MaxPool2d(2), double(CHANNELS, CHANNELS))
        self.up = up
        self.join = join
        self.merge = double(2 * CHANNELS, CHANNELS)
        self.head = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.stem(images)
        return self.head(self.merge(self.join(skip, self.up(self.down(skip)))))


def concatenated(skip: Tensor, features: Tensor) -> Tensor:
    return torch.cat([skip, features], dim=1)


def bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)


UPS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "bilinear": lambda: bilinear,
    "nearest, padded": lambda: lambda x: F.pad(F.interpolate(x, scale_factor=1.875), (0, 1, 1, 0)),
    "pooled": lambda: lambda x: F.adaptive_avg_pool2d(x, (16, 16)),
    "module": lambda: nn.Upsample(scale_factor=2),
    "upward convolution": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2),
}


def images(count: int = 2) -> list[Tensor]:
    return [torch.randn(4, 3, 16, 16) for _ in range(count)]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("up", UPS.values(), ids=UPS)
@pytest.mark.parametrize("unit", ["+merge", "+merge[0..0]", "+merge[0..2]"])
def test_training_is_the_same(
    unit: str, up: Callable[[], Callable[[Tensor], Tensor]], precision: Precision, made_again: list[Made]
) -> None:
    model = SmallUNet(up(), concatenated)
    other = copy.deepcopy(model)
    apply_units(other, recomputing("stem", "down", unit))
    batches = images()
    plain = train(model, batches, precision=precision)
    assert not made_again
    assert_identical(plain, train(other, batches, precision=precision))
    # In three steps of two micro-batches each: the concatenation, and what it was made from if that was made.
    assert len(made_again) >= 6


def test_saved_ops_are_counted_without_those_that_make_the_input() -> None:
    """The convolutions are saved, although a convolution of the input ran again before them."""
    model = SmallUNet(UPS["upward convolution"](), concatenated)
    other = copy.deepcopy(model)
    saved = UnitAction(fqn="+merge", action=Action.SAVE, saved=("convolution#0", "convolution#1"))
    apply_units(other, Settings(micro_batch_size=1, units=(saved,)))
    batches = images()
    assert_identical(train(model, batches), train(other, batches))


def test_the_concatenation_is_freed_after_the_forward() -> None:
    """A unit by itself holds its input; with the ops that make it, only what others hold too."""
    alive = []
    for unit in ("merge", "+merge"):
        model = SmallUNet(bilinear, concatenated)
        apply_units(model, recomputing(unit))
        alive.append(_held_bytes(model))
    skip_bytes = 4 * CHANNELS * 16 * 16 * 4  # a float32 for each pixel and channel of four images
    # The skip is held by the layer that made it; the features are made from a quarter of their size.
    assert alive[0] - alive[1] == 2 * skip_bytes - skip_bytes // 4


def _held_bytes(model: nn.Module) -> int:
    """Bytes of all storages that Python's tensors refer to while the output of a forward exists."""
    batch = torch.randn(4, 3, 16, 16)
    gc.collect()
    output = model(batch)
    gc.collect()
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor) and type(each) in (Tensor, nn.Parameter)
    }
    del output
    return sum(storages.values())


def test_a_result_that_was_written_to_is_held(made_again: list[Made]) -> None:
    """It is no longer what the concatenation returned."""

    def scaled(skip: Tensor, features: Tensor) -> Tensor:
        return concatenated(skip, features).mul_(2)

    model = SmallUNet(bilinear, scaled)
    other = copy.deepcopy(model)
    apply_units(other, recomputing("+merge"))
    batches = images()
    assert_identical(train(model, batches), train(other, batches))
    assert not made_again


def test_a_skip_that_is_written_to_later_is_an_error_as_in_plain_pytorch() -> None:
    def forward(images: Tensor) -> Tensor:
        skip = model.stem(images).sigmoid()
        out = model.merge(concatenated(skip, skip))
        skip.mul_(2)
        return model.head(out)

    model = SmallUNet(bilinear, concatenated)
    apply_units(model, recomputing("+merge"))
    wrapped = model.forward
    wrapped.forward = forward  # type: ignore[union-attr, method-assign]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(images(1)[0]).sum().backward()


def test_removing_the_plan_leaves_the_model_as_it_was() -> None:
    model = SmallUNet(bilinear, concatenated)
    applied = apply_units(model, recomputing("+merge"))
    assert "forward" in model.__dict__
    applied.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_without_gradients_nothing_is_followed() -> None:
    model = SmallUNet(bilinear, concatenated).eval()
    batch = images(1)[0]
    with torch.no_grad():
        plain = model(batch)
        apply_units(model, recomputing("+merge"))
        assert torch.equal(plain, model(batch))


def test_a_unit_that_is_kept_has_no_input_ops() -> None:
    model = SmallUNet(bilinear, concatenated)
    action = UnitAction(fqn="+merge", action=Action.KEEP)
    assert has_input_ops(action.fqn)
    apply_units(model, Settings(micro_batch_size=1, units=(action,)))
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("up", ["bilinear", "upward convolution"])
@pytest.mark.parametrize("units", [("stem", "down", "+merge"), ("stem", "down", "+merge[0..0]", "merge[1..3]")])
def test_a_capture_predicts_the_peak_of_a_real_step(units: tuple[str, ...], up: str) -> None:
    job = Job(
        model=lambda: SmallUNet(UPS[up](), concatenated),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=lambda n: {"x": torch.randn(n, 3, 64, 64)},
        optimizer="sgd",
    )
    settings = replace(recomputing(*units), micro_batch_size=8)
    predicted = predict_memory(capture_step(job, settings, find_device("cpu"))).steady_peak_allocated_bytes
    measured = measure_step(job, settings, steps=1).measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.001)
