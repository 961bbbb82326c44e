"""Hold what a unit saves for backward in the host's memory while the device does not need it.

Autograd's hooks for saved tensors give what a forward saves. When the unit's forward ends, copies to the host
begin; when the forward of the next unit ends, the device memory is freed. When the backward of the next unit
begins, copies back begin; when the unit's own begins, they must have arrived. So copies overlap with the work
of one unit each way, and memory is predicted exactly: it is held while the unit or the next one runs, and not
in between.

These stay on the device:

* inputs and outputs of the unit: others hold them too, and recomputing the unit would need them as well;
* parameters, buffers, and tensors that anything else still holds when they would be freed, such as autocast's
  casts of weights;
* storages below `LEAST_OFFLOADED_BYTES`, and tensors that are not plain views of their storage;
* if the plan limits the offloaded bytes, all but the largest storages within that limit.

A storage is copied once, for any number of tensors that view it. Changing a tensor in-place after autograd
saved it is an error in backward, as in the baseline: with hooks, autograd does not check this (checked: torch
2.13).

Private torch APIs used here: `UntypedStorage._cdata`, `torch._C._storage_Use_Count`, and
`torch._compile._disable_dynamo`, as in `recompute.py` (checked: torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brimful.batches import tensors_in
from brimful.memory import chosen_to_leave
from brimful.memory import pinned_host as host
from brimful.settings import Action, UnitAction
from brimful.torch_utils.wrapper_tensors import inner_tensors
from brimful.transforms.host_link import give_back, to_device, to_device_done, to_host, to_host_done


class OffloadSchedule:
    """Schedules copies to and from the host by the order in which the units of one model run."""

    def __init__(self) -> None:
        self._leaving: weakref.ref[_Parcel] | None = None
        """The previous unit's copies to the host."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OffloadSchedule, ()  # a copied model starts with a new one

    def forward_ends(self, results: list[Tensor], parcel: _Parcel | None) -> None:
        """Free what the previous unit offloaded, offload this unit's saved tensors, and schedule their return.

        `results` are the tensors that the unit returns; `parcel` has the saved tensors to offload, None if
        there are none.
        """
        before = None if self._leaving is None else self._leaving()
        if before is not None:
            before.release()
        if parcel is not None:
            parcel.leave()
        own = None if parcel is None else weakref.ref(parcel)
        _when_backward_begins(results, own, self._leaving if before is not None else None)
        self._leaving = own


class ScheduledUnit:
    """Runs a unit's forward and maintains the model's offload schedule."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        schedule: OffloadSchedule,
        unit: UnitAction,
    ) -> None:
        self._function = function
        self._modules = modules
        self._schedule = schedule
        self._unit = unit

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; with gradients enabled, offload saved tensors by the schedule."""
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        return self._scheduled(*args, **kwargs)

    @_disable_dynamo
    def _scheduled(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._unit.action is Action.OFFLOAD:
            limit = self._unit.most_offloaded_bytes
            result, parcel = _run(self._function, self._modules, args, kwargs, most_bytes=limit)
        else:
            result, parcel = self._function(*args, **kwargs), None
        self._schedule.forward_ends(list(tensors_in(result)), parcel)
        return result


def _when_backward_begins(
    results: Iterable[Tensor], own: weakref.ref[_Parcel] | None, before: weakref.ref[_Parcel] | None
) -> None:
    """When a unit's backward begins, wait for its copies back, and begin those of the unit before.

    `results` are the unit's outputs: the first backward of their autograd nodes begins the unit's. `own` is the
    unit's parcel, `before` that of the unit before. They are weak references because a node lives as long as
    the graph, so it must hold no copies itself.
    """
    if own is None and before is None:
        return

    def begin(_gradients: object) -> None:
        if own is not None and (parcel := own()) is not None:
            parcel.fetch()
            parcel.arrive()
        if before is not None and (parcel := before()) is not None:
            parcel.fetch()

    for node in {result.grad_fn for result in results}:
        if node is not None:
            node.register_prehook(begin)


def _run(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: Any,
    kwargs: Any,
    *,
    most_bytes: int | None,
) -> tuple[Any, _Parcel | None]:
    """Run a unit's forward; returns its result, and the saved tensors to offload (None if there are none)."""
    given = list(tensors_in((args, kwargs)))
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        handle = _Saved(tensor)
        saved.append(weakref.ref(handle))
        return handle

    with saved_tensors_hooks(pack, _Saved.tensor):
        result = function(*args, **kwargs)
    held = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
    own = chain.from_iterable(map(inner_tensors, held))
    stays = {_address(tensor) for tensor in chain(given, own, tensors_in(result)) if _has_storage(tensor)}
    handles = [handle for each in saved if (handle := each()) is not None]
    device = given[0].device if given else None
    return result, _Parcel.of([h for h in handles if h.can_leave(device, stays)], most_bytes)


class _Saved:
    """A tensor that autograd saved: held itself, or as a view of a storage that is offloaded."""

    __slots__ = ("__weakref__", "_geometry", "_item", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached it has the same memory and version; the tensor itself may own the graph that owns this.
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._item: _Item | None = None
        self._geometry: tuple[Any, ...] = ()

    def tensor(self) -> Tensor:
        """The tensor as it was saved, on the device; fetched now if nothing fetched it before.

        Raises `RuntimeError` if it has been written to since.
        """
        if self._tensor is not None:
            self.check_version()
            return self._tensor
        assert self._item is not None
        dtype, *view = self._geometry
        flat = self._item.on_device()
        return (flat if flat.dtype is dtype else flat.view(dtype)).as_strided(*view)

    def can_leave(self, device: torch.device | None, stays: set[int]) -> bool:
        """Whether the tensor is a plain view of a large storage on the unit's device that is not in `stays`."""
        tensor = self._tensor
        assert tensor is not None
        if tensor.device != device or not _has_storage(tensor) or tensor._version != self._version:
            return False
        size_bytes = self.storage_bytes()
        is_plain = not (tensor.is_conj() or tensor.is_neg()) and size_bytes % 16 == 0
        return is_plain and size_bytes >= host.LEAST_OFFLOADED_BYTES and _address(tensor) not in stays

    def storage_in(self) -> int:
        """Address of the tensor's storage."""
        assert self._tensor is not None
        return _address(self._tensor)

    def storage_bytes(self) -> int:
        assert self._tensor is not None
        return int(self._tensor.untyped_storage().nbytes())

    def flat(self) -> Tensor:
        """The tensor's whole storage, 1-dimensional."""
        assert self._tensor is not None
        count = self._tensor.untyped_storage().nbytes() // self._tensor.element_size()
        return self._tensor.as_strided((count,), (1,), 0).detach()  # a view would hold what it views

    def join(self, item: _Item) -> None:
        """Set the storage with which the tensor is offloaded."""
        self._item = item

    def check_version(self) -> None:
        """Raise `RuntimeError` if the tensor has been written to since it was saved."""
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a {tuple(self._tensor.shape)} tensor saved at version {self._version} is at "
                f"version {self._tensor._version} now. It was saved in a unit that is offloaded; plain "
                "training fails too."
            )

    def is_unchanged(self) -> bool:
        """Whether nothing has written to the tensor since it was saved."""
        return self._tensor is not None and self._tensor._version == self._version

    def let_go(self) -> None:
        """Drop the tensor and keep only the geometry of its view; the copy on the host replaces it."""
        tensor = self._tensor
        assert tensor is not None
        self._geometry = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        self._tensor = None


class _Item:
    """One storage to offload; it lives as long as a saved tensor that views it."""

    def __init__(self, parcel: _Parcel, views: Sequence[_Saved]) -> None:
        self._parcel = parcel
        self._views = [weakref.ref(view) for view in views]
        self._source: Tensor | None = views[0].flat()
        self._device = self._source.device
        self._hosted: Tensor | None = None
        self._fetched: Tensor | None = None
        self._is_coming = False

    def leave(self) -> None:
        """Begin the copy to the host."""
        assert self._source is not None
        self._hosted = to_host(self._source)

    @property
    def source(self) -> Tensor | None:
        """The storage on the device, until it is released after the forward."""
        return self._source

    def release(self) -> None:
        """Free the device's memory, unless others hold it or have written to it; the copy is done."""
        assert self._source is not None
        views = [view for each in self._views if (view := each()) is not None]
        owners = _owner_count(self._source) - len(views) - 1
        if owners > 0 or not all(view.is_unchanged() for view in views):
            self._give_back()
        else:
            for view in views:
                view.let_go()
        self._source = None

    def fetch(self) -> None:
        """Begin the copy back to the device, if it is not there."""
        if self._source is None and self._hosted is not None and self._fetched is None:
            self._fetched = to_device(self._hosted, self._device)
            self._is_coming = True

    @property
    def coming(self) -> Tensor | None:
        """The copy back, if it has not been waited for."""
        return self._fetched if self._is_coming else None

    def has_come(self) -> None:
        """Record that the copy back has been waited for."""
        self._is_coming = False

    def on_device(self) -> Tensor:
        """The storage on the device; fetched now if it was not expected to be needed."""
        self.fetch()
        self._parcel.arrive()
        assert self._fetched is not None
        return self._fetched

    def _give_back(self) -> None:
        if self._hosted is not None:
            give_back(self._hosted)
        self._hosted = None

    def __del__(self) -> None:
        if self._fetched is not None and self._is_coming:
            to_device_done([self._fetched])  # dropped on its way: nothing may write there before it is there
        self._give_back()


class _Parcel:
    """The tensors that one call of a unit copies to the host; it lives as long as any of them."""

    def __init__(self) -> None:
        self._items: list[weakref.ref[_Item]] = []

    @classmethod
    def of(cls, saved: Iterable[_Saved], most_bytes: int | None) -> _Parcel | None:
        """Group saved tensors by storage, and choose storages within `most_bytes`; None if there are none."""
        by_storage: dict[int, list[_Saved]] = {}
        for each in saved:
            by_storage.setdefault(each.storage_in(), []).append(each)
        groups = list(by_storage.values())
        chosen = chosen_to_leave([views[0].storage_bytes() for views in groups], most_bytes)
        parcel = cls()
        for views in (groups[index] for index in chosen):
            item = _Item(parcel, views)
            parcel._items.append(weakref.ref(item))
            for view in views:
                view.join(item)
        return parcel if chosen else None

    def leave(self) -> None:
        """Begin all copies to the host."""
        for item in self._alive():
            item.leave()

    def release(self) -> None:
        """Wait for the copies to the host, and free the device's memory."""
        items = [item for item in self._alive() if item.source is not None]
        if items:
            to_host_done([item.source for item in items])
        for item in items:
            item.release()

    def fetch(self) -> None:
        """Begin all copies back, in reverse order of saving, as backward needs them."""
        for item in reversed(list(self._alive())):
            item.fetch()

    def arrive(self) -> None:
        """Wait for the copies back."""
        items = [item for item in self._alive() if item.coming is not None]
        if items:
            to_device_done([item.coming for item in items])
        for item in items:
            item.has_come()

    def _alive(self) -> Iterator[_Item]:
        return (item for each in self._items if (item := each()) is not None)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _owner_count(tensor: Tensor) -> int:
    """How many tensors, autograd's too, hold a tensor's storage; the reference made here is not counted."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
