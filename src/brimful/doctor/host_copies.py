"""What a watched run copies from the host to a GPU: from pageable memory, or made on the host just before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from brimful.batches import tensors_in
from brimful.capture.recording.ledger import StorageLedger
from brimful.capture.recording.op_info import OpInfo
from brimful.torch_utils.lines import calling_line

aten = torch.ops.aten

_COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}
"""Position of the source among the arguments of ops that copy between devices."""


class HostCopies:
    """Counts copies to a device in recorded steps; `made` follows tensors on the host."""

    def __init__(self, made: StorageLedger) -> None:
        self.pageable_bytes = Counter[str]()
        """Bytes copied from memory that is not pinned, by line of code."""
        self.made = Counter[str]()
        """Copies of tensors of known values that a forward has made on the host, by line of code."""
        self._made = made

    def note(self, func: Any, args: tuple[Any, ...], out: Any, device: str) -> None:
        """Note an op of a step, if it copies to the device."""
        place = _COPIES.get(func)
        if place is None or not _is_on_host(args[place]) or next(tensors_in(out)).device.type != device:
            return
        source, line = args[place], calling_line()
        if self._made.index_of(source) is not None:
            self.made[line] += 1
        elif not source.is_pinned():
            self.pageable_bytes[line] += source.nbytes

    def follow(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow what an op of a forward makes on the host, of nothing or of what is followed already.

        Random numbers are none: a GPU draws others. What is written to later may come from elsewhere.
        """
        given, results = [*tensors_in((args, kwargs))], [*tensors_in(out)]
        if info.is_view or not all(map(_is_on_host, [*given, *results])):
            return
        if info.writes and given:
            self._made.free_tensor(given[0])
        elif not info.is_random and all(self._made.index_of(each) is not None for each in given):
            for each in results:
                self._made.track(each, info.name)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
