"""Offloading as on CUDA, on a stand-in for its streams that puts every copy off until it is waited for.

Copies are made at the last moment that the waits permit, what is released is written over at once, and fresh
memory has garbage in it. So who releases memory before its copy was waited for, or reads a copy back before
that was, computes something else than the baseline.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from brimful.memory import pinned_bytes
from brimful.memory import pinned_host as host
from brimful.settings import Action, Settings, UnitAction
from brimful.transforms import apply_units, host_link, offload
from helpers.late_streams import garbage, stand_in_for_streams
from helpers.models import GPT, ResNet
from helpers.trained_alike import Loss, assert_identical, mean_square, train


def _overwriting(release: Callable[[offload._Item], None]) -> Callable[[offload._Item], None]:
    """Others get the memory as soon as it is released, although the copy of this stand-in still holds it."""

    def release_and_reuse(item: offload._Item) -> None:
        source = item.source
        release(item)
        if source is not None and item._hosted is not None:
            garbage(source.data)

    return release_and_reuse


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts the stand-in in force; what is pinned anew is listed by bytes."""
    pinned: list[int] = []

    def new_pinned(size_bytes: int) -> Tensor:
        pinned.append(size_bytes)
        return garbage(torch.empty(size_bytes, dtype=torch.uint8))

    empty_like = torch.empty_like
    stand_in_for_streams(monkeypatch)
    monkeypatch.setattr(torch, "empty_like", lambda like, **kwargs: garbage(empty_like(like, **kwargs)))
    monkeypatch.setattr(host_link, "_new_pinned", new_pinned)
    monkeypatch.setattr(host_link, "_idle", type(host_link._idle)(list))
    for name in ("to_host", "to_host_done", "to_device", "to_device_done"):
        monkeypatch.setattr(offload, name, getattr(host_link, f"_{name}_cuda"))
    monkeypatch.setattr(offload._Item, "release", _overwriting(offload._Item.release))
    monkeypatch.setattr(host, "LEAST_OFFLOADED_BYTES", 256)
    torch.manual_seed(0)
    return pinned


def actions(**named: str) -> Settings:
    units = tuple(UnitAction(fqn=k.replace("__", "."), action=Action(v)) for k, v in named.items())
    return Settings(micro_batch_size=1, units=units)


GPT_UNITS = actions(blocks__0="offload", blocks__1="recompute", blocks__2="offload", blocks__3="keep")
RESNET_UNITS = actions(layer1="offload", layer2__0="offload", layer2__1="offload", layer3="recompute")


def tokens_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("model", "settings", "batches", "loss"),
    [
        (GPT, GPT_UNITS, lambda: [torch.randint(40, (2, 12)) for _ in range(2)], tokens_loss),
        (ResNet, RESNET_UNITS, lambda: [torch.randn(4, 3, 16, 16) for _ in range(2)], mean_square),
    ],
)
def test_training_is_the_same_however_late_copies_are(
    model: Callable[[], nn.Module], settings: Settings, batches: Callable[[], list[Tensor]], loss: Loss
) -> None:
    plain = model()
    other, micro_batches = copy.deepcopy(plain), batches()
    apply_units(other, settings)
    assert_identical(train(plain, micro_batches, loss=loss), train(other, micro_batches, loss=loss))


def test_pinned_memory_is_used_again_by_further_micro_batches_and_steps(streams: list[int]) -> None:
    model, batches = GPT(), [torch.randint(40, (2, 12)) for _ in range(2)]
    apply_units(model, GPT_UNITS)
    train(model, batches[:1], loss=tokens_loss, steps=1)
    first = list(streams)
    assert first
    assert all(size_bytes == pinned_bytes(size_bytes) for size_bytes in first)
    train(model, batches, loss=tokens_loss, steps=3)
    assert streams == first


@pytest.mark.parametrize("left_out", ["to_host_done", "to_device_done"])
def test_without_a_wait_the_stand_in_shows_it(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    plain, batches = GPT(), [torch.randint(40, (2, 12)) for _ in range(2)]
    other = copy.deepcopy(plain)
    apply_units(other, GPT_UNITS)
    monkeypatch.setattr(offload, left_out, lambda _tensors: None)
    with pytest.raises(AssertionError):
        assert_identical(train(plain, batches, loss=tokens_loss), train(other, batches, loss=tokens_loss))
