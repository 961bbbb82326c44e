"""Offloading leaves training bit for bit as it was, and what it sends away is really gone meanwhile.

Only where tensors are held changes, the same kernels run on the same numbers, so every comparison is
`torch.equal`. On a CPU the copies are plain ones, made and dropped at the moments at which they are on a GPU.
"""

import copy
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.errors import UsageError
from brimful.memory import pinned_host as host
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.transforms import apply_units, offload
from brimful.transforms.host_link import to_device, to_device_done, to_host, to_host_done
from helpers.models import GPT, ResNet, UNet, vgg
from helpers.trained_alike import (
    WIDTH,
    Loss,
    assert_identical,
    images,
    mean_square,
    next_token,
    tokens,
    train,
    without_collection,
)

__all__ = ["without_collection"]
KEEP, RECOMPUTE, OFFLOAD = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors as small as those of these models are offloaded."""
    monkeypatch.setattr(host, "LEAST_OFFLOADED_BYTES", 256)
    torch.manual_seed(0)


def with_actions(**actions: Action) -> Settings:
    units = tuple(UnitAction(fqn=fqn.replace("__", "."), action=action) for fqn, action in actions.items())
    return Settings(micro_batch_size=1, units=units)


def offloading(*units: str, last: str) -> Settings:
    """Some units offloaded, the last one kept."""
    return with_actions(**dict.fromkeys(units, OFFLOAD), **{last: KEEP})


def vectors(samples: int = 16, count: int = 2) -> list[Tensor]:
    return [torch.randn(samples, WIDTH) for _ in range(count)]


class Transfers(TorchDispatchMode):
    """Counts the ops of the host link, and the bytes sent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys((to_host, to_host_done, to_device, to_device_done), 0)
        self.sent_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.counts:
            self.counts[func] += 1
        if func is to_host:
            self.sent_bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def assert_trains_identically(
    model: nn.Module,
    settings: Settings,
    micro_batches: list[Tensor],
    *,
    loss: Loss = mean_square,
    precision: Precision = Precision.FP32,
) -> None:
    """Training is bit for bit the same with units offloaded; as much is fetched as was sent."""
    other = copy.deepcopy(model)
    plain = train(model, micro_batches, loss=loss, precision=precision)
    apply_units(other, settings)
    with Transfers() as transfers:
        assert_identical(plain, train(other, micro_batches, loss=loss, precision=precision))
    assert transfers.counts[to_host] > 0
    assert 0 < transfers.counts[to_device] <= transfers.counts[to_host]


# Whole models.

BLOCKS = ("blocks__0", "blocks__1", "blocks__2")


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    "settings",
    [
        offloading(*BLOCKS, last="blocks__3"),
        offloading("blocks__1", last="blocks__3"),
        with_actions(blocks__0=OFFLOAD, blocks__1=RECOMPUTE, blocks__2=OFFLOAD, blocks__3=RECOMPUTE),
        with_actions(blocks__0=RECOMPUTE, blocks__1=OFFLOAD, blocks__2=KEEP, blocks__3=KEEP),
        offloading("blocks__0__attention", "blocks__1__attention", last="norm"),
        offloading("blocks__0__mlp[0..2]", "blocks__1__mlp[1..3]", last="norm"),
    ],
    ids=lambda settings: settings.describe() + " " + settings.units[0].fqn,
)
def test_a_transformer_with_dropout_and_a_tied_weight(settings: Settings, precision: Precision) -> None:
    assert_trains_identically(GPT(), settings, tokens(), loss=next_token, precision=precision)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    "settings",
    [
        offloading("layer1", "layer2__0", "layer2__1", last="layer3"),
        with_actions(layer1__0=OFFLOAD, layer1__1=RECOMPUTE, layer2=OFFLOAD, layer3=KEEP),
    ],
    ids=lambda settings: settings.describe(),
)
def test_a_resnet_with_batch_norm_and_in_place_ops(settings: Settings, precision: Precision) -> None:
    assert_trains_identically(ResNet(), settings, images(), precision=precision)


@pytest.mark.parametrize(
    "settings",
    [
        offloading("down1", "down2", "bottom", "merge2", last="merge1"),
        with_actions(down1=OFFLOAD, down2=RECOMPUTE, bottom=OFFLOAD, merge2=OFFLOAD, merge1=RECOMPUTE),
    ],
    ids=lambda settings: settings.describe(),
)
def test_a_unet_with_skips(settings: Settings) -> None:
    assert_trains_identically(UNet(), settings, images())


def test_runs_of_a_sequential_of_in_place_relus() -> None:
    settings = with_actions(**{"0[0..4]": OFFLOAD, "0[5..9]": OFFLOAD, "1": KEEP})
    assert_trains_identically(vgg(), settings, images())


class Unit(nn.Module):
    """Saves several tensors, some of them views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)
        return torch.sigmoid(a * b) * a


class Chain(nn.Module):
    """A linear layer, units, a linear layer."""

    def __init__(self, *units: nn.Module) -> None:
        super().__init__()
        self.first, self.units, self.last = nn.Linear(WIDTH, WIDTH), nn.Sequential(*units), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.units(self.first(x)))


class Shared(Chain):
    """Its units run twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.units(self.units(self.first(x))))


TWO = offloading("units__0", last="units__1")


def test_a_module_that_is_called_twice() -> None:
    assert_trains_identically(Shared(Unit(), Unit()), TWO, vectors())


def test_gradients_that_accumulate() -> None:
    assert_trains_identically(Chain(Unit(), Unit()), TWO, vectors(count=4))


class Checkpointed(nn.Module):
    """A model that recomputes a part of a unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Unit(), Unit()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))


def test_a_unit_that_checkpoints_by_itself() -> None:
    assert_trains_identically(Chain(Checkpointed(), Unit()), TWO, vectors())


class Reinterpreting(nn.Module):
    """Saves tensors of complex numbers, conjugates, and bytes of other types, in one storage."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex((x * 2).unflatten(-1, (-1, 2)))
        z = y * y.conj() * torch.view_as_complex(torch.sigmoid(x).unflatten(-1, (-1, 2))).conj()
        return torch.view_as_real(z).flatten(-2)


def test_views_of_other_types() -> None:
    assert_trains_identically(Chain(Reinterpreting(), Unit()), TWO, vectors())


class ByKeyword(nn.Module):
    """Takes by keyword and returns a dict; a second result is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit()

    def forward(self, *, x: Tensor, scale: float) -> dict[str, Tensor]:
        y = torch.tanh(x * scale)
        return {"y": self.unit(y), "aside": torch.exp(y)}


class KeywordChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(WIDTH, WIDTH), ByKeyword(), ByKeyword()

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x=self.first(x), scale=0.5)
        b = self.b(x=a["y"], scale=2.0)
        return b["y"] + b["aside"] * a["aside"]


def test_arguments_by_keyword_and_results_in_a_dict() -> None:
    assert_trains_identically(KeywordChain(), offloading("a", last="b"), vectors())


def test_a_second_backward_through_the_same_graph() -> None:
    model = Chain(Unit(), Unit())
    other = copy.deepcopy(model)
    apply_units(other, TWO)
    x = vectors()[0]
    for each in (model, other):
        loss = mean_square(each, x)
        loss.backward(retain_graph=True)
        loss.backward()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_gradient_of_a_gradient() -> None:
    model = Chain(Unit(), Unit())
    other = copy.deepcopy(model)
    apply_units(other, TWO)
    gradients = []
    for each in (model, other):
        x = torch.ones(16, WIDTH, requires_grad=True)
        (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*gradients)


def test_part_of_the_graph_first() -> None:
    """Backward that begins inside the chain finds copies that nobody fetched."""
    model = Chain(Unit(), Unit())
    other = copy.deepcopy(model)
    apply_units(other, TWO)
    x = vectors()[0]
    gradients = []
    for each in (model, other):
        middle = each.units[0](each.first(x))
        end = each.units[1](middle)
        gradients.append(torch.autograd.grad(middle.sum(), each.first.weight, retain_graph=True)[0])
        gradients.append(torch.autograd.grad(end.sum(), each.first.weight)[0])
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3])


def test_switching_between_training_and_eval_mode_and_no_gradients() -> None:
    unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Tanh(), nn.Tanh())
    model = Chain(unit, copy.deepcopy(unit))
    other = copy.deepcopy(model)
    apply_units(other, TWO)
    batches = vectors()
    for mode in (True, False, True, True, False):
        model.train(mode)
        other.train(mode)
        assert_identical(train(model, batches, steps=1), train(other, batches, steps=1))
        with torch.no_grad(), Transfers() as transfers:
            assert torch.equal(model.eval()(batches[0]), other.eval()(batches[0]))
        assert transfers.counts[to_host] == 0


# What is sent, and when.


class Saves(nn.Module):
    """Saves what its sigmoids return: the first its own, the second what the unit returns."""

    def __init__(self, made: list[weakref.ref[torch.UntypedStorage]]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return torch.sigmoid(y)


class Watches(nn.Module):
    """Tells how many storages are there in the middle of its forward and of its backward, and how many when
    both have ended."""

    def __init__(self, made: list[weakref.ref[torch.UntypedStorage]]) -> None:
        super().__init__()
        self.made, self.seen = made, []

    def forward(self, x: Tensor) -> Tensor:
        self.see("forward")
        y = 2 * x
        y.register_hook(lambda _gradient: self.see("backward"))
        return 3 * y

    def see(self, when: str) -> None:
        self.seen.append((when, sum(ref() is not None for ref in self.made)))


@pytest.mark.usefixtures("without_collection")
def test_what_is_saved_is_gone_between_the_next_units_forward_and_its_backward() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []
    unit, watch, later = Saves(made), Watches(made), Watches(made)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), unit, watch, later)
    apply_units(model, with_actions(**{"1": OFFLOAD, "2": KEEP, "3": KEEP}))
    loss = model(vectors()[0]).sum()
    assert watch.seen == [("forward", 1)]
    assert later.seen == [("forward", 0)]
    with Transfers() as transfers:
        loss.backward()
    assert later.seen == [("forward", 0), ("backward", 0)]
    assert transfers.counts == {to_host: 0, to_host_done: 0, to_device: 1, to_device_done: 1}


class SeesTransfers(nn.Module):
    """Tells how many copies back have begun, and were waited for, when its backward begins and ends."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__()
        self.transfers, self.seen = transfers, []

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda _gradient: self.see("ends"))
        y = 3 * x
        y.register_hook(lambda _gradient: self.see("begins"))
        return 2 * y

    def see(self, when: str) -> None:
        counts = self.transfers.counts
        self.seen.append((when, counts[to_device], counts[to_device_done]))


def test_copies_come_back_when_the_next_units_backward_begins_and_are_waited_for_when_their_own_does() -> None:
    transfers = Transfers()
    watch = SeesTransfers(transfers)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Saves([]), watch, nn.Linear(WIDTH, 1))
    apply_units(model, with_actions(**{"1": OFFLOAD, "2": KEEP, "3": KEEP}))
    with transfers:
        loss = model(vectors()[0]).sum()
        assert transfers.counts == {to_host: 1, to_host_done: 1, to_device: 0, to_device_done: 0}
        loss.backward()
    assert watch.seen == [("begins", 1, 0), ("ends", 1, 0)]
    assert transfers.counts[to_device_done] == 1


@pytest.mark.usefixtures("without_collection")
def test_a_backward_leaves_nothing_behind() -> None:
    """Neither on the device nor on the host, although the loss and with it the graph is held."""
    items: list[weakref.ref[object]] = []
    plain = offload._Item.__init__

    def noted(item, *args) -> None:
        plain(item, *args)
        items.append(weakref.ref(item))

    model = Chain(Unit(), Unit())
    apply_units(model, TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload._Item, "__init__", noted)
        loss = mean_square(model, vectors()[0])
        assert items
        assert all(item() is not None for item in items)
        loss.backward()
    assert all(item() is None for item in items)


@pytest.mark.usefixtures("without_collection")
def test_a_graph_that_is_dropped_takes_its_copies_along() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Saves(made), nn.Linear(WIDTH, 1))
    apply_units(model, with_actions(**{"1": OFFLOAD, "2": KEEP}))
    model[1](model[0](vectors()[0]))  # ends before the next unit
    assert made[0]() is None
    mean_square(model, vectors()[0]).backward()


def test_views_of_one_storage_are_copied_once() -> None:
    model = Chain(Unit(), Unit())
    apply_units(model, TWO)
    x = vectors()[0]
    with Transfers() as transfers:
        mean_square(model, x)
    # What linear returned, of which a and b are halves; a * b is not saved, the sigmoid's result is.
    assert transfers.counts[to_host] == 2
    assert transfers.sent_bytes == (2 + 1) * x.numel() * 4


@pytest.mark.parametrize(("limit", "sent"), [(None, [2, 1]), (3, [2, 1]), (2, [2]), (1, [1]), (0.5, [])])
def test_the_largest_storages_leave_as_far_as_the_limit_permits(limit: float | None, sent: list[int]) -> None:
    """Of two storages, of twice and once the size of the batch."""
    x = vectors()[0]
    most_bytes = None if limit is None else int(limit * x.numel() * 4)
    units = (
        UnitAction(fqn="units.0", action=OFFLOAD, most_offloaded_bytes=most_bytes),
        UnitAction(fqn="units.1", action=KEEP),
    )
    model = Chain(Unit(), Unit())
    plain = copy.deepcopy(model)
    apply_units(model, Settings(micro_batch_size=1, units=units))
    with Transfers() as transfers:
        mean_square(model, x).backward()
    assert transfers.counts[to_host] == transfers.counts[to_device] == len(sent)
    assert transfers.sent_bytes == sum(sent) * x.numel() * 4
    mean_square(plain, x).backward()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_parameters_inputs_results_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlySuch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.register_buffer("buffer", torch.ones(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid((x @ self.weight) @ self.buffer)

    model = Chain(OnlySuch(), Unit())
    apply_units(model, TWO)
    with Transfers() as transfers:
        mean_square(model, vectors(samples=WIDTH)[0]).backward()
    assert transfers.counts[to_host] == 0
    model = Chain(Unit(), Unit())
    apply_units(model, TWO)
    monkeypatch.setattr(host, "LEAST_OFFLOADED_BYTES", 10**6)
    with Transfers() as transfers:
        mean_square(model, vectors()[0]).backward()
    assert transfers.counts[to_host] == 0


@pytest.mark.usefixtures("without_collection")
def test_what_others_hold_stays() -> None:
    """Sent, as nobody can know, but neither dropped nor fetched."""
    held = []

    class HandsOnSecretly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(x)
            held.append(y)
            return torch.tanh(y * 2)

    model = Chain(HandsOnSecretly(), Unit())
    apply_units(model, TWO)
    with Transfers() as transfers:
        mean_square(model, vectors()[0]).backward()
    assert transfers.counts[to_host] == 1
    assert transfers.counts[to_device] == 0


# What is written to after it was saved.


class WritesOver(nn.Module):
    """Writes over the sigmoid's result, which its backward needs, in one of three places."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.kept = when, None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        z = y * 2
        if self.when == "at once":
            y.add_(1)
        self.kept = y
        return torch.tanh(z)


class WritesOverBefore(nn.Module):
    def __init__(self, unit: WritesOver) -> None:
        super().__init__()
        self.unit = [unit]

    def forward(self, x: Tensor) -> Tensor:
        if self.unit[0].when == "in the next unit":
            self.unit[0].kept.add_(1)
        return torch.tanh(x)


@pytest.mark.parametrize("when", ["at once", "in the next unit", "after forward"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_writing_to_what_was_saved_is_an_error_as_in_plain_training(when: str, is_offloaded: bool) -> None:
    unit = WritesOver(when)
    model = Chain(unit, WritesOverBefore(unit))
    if is_offloaded:
        apply_units(model, TWO)
    loss = mean_square(model, vectors()[0])
    if when == "after forward":
        with torch.no_grad():
            unit.kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writing_to_what_a_unit_returned_is_an_error_as_in_plain_training() -> None:
    for settings in (None, TWO):
        model = Chain(nn.Sigmoid(), nn.ReLU(inplace=True))
        if settings is not None:
            apply_units(model, settings)
        loss = mean_square(model, vectors()[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# What cannot be.


def test_the_last_unit_cannot_be_offloaded() -> None:
    with pytest.raises(UsageError, match=r"'units\.1' is offloaded and the last one"):
        apply_units(Chain(Unit(), Unit()), with_actions(units__0=KEEP, units__1=OFFLOAD))


@pytest.mark.parametrize("outer", ["units", "", "units[0..1]", "units.0"])
def test_an_offloaded_unit_is_neither_inside_another_nor_around_one(outer: str) -> None:
    model = Chain(nn.Sequential(Unit(), Unit()), Unit())
    for actions in ((RECOMPUTE, OFFLOAD), (OFFLOAD, RECOMPUTE)):
        settings = with_actions(**{outer: actions[0], "units__0__1": actions[1], "last": KEEP})
        with pytest.raises(UsageError, match="inside of"):
            apply_units(model, settings)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_copy_of_an_applied_model_offloads_by_itself() -> None:
    model = Chain(Unit(), Unit())
    apply_units(model, TWO)
    loss = mean_square(model, vectors()[0])
    other = copy.deepcopy(model)
    loss.backward()
    with Transfers() as transfers:
        mean_square(other, vectors()[0]).backward()
    assert transfers.counts[to_host] == transfers.counts[to_device] == 2
