"""Packed sequences are padded again in Python: torch's code writes lengths to memory that fakes do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from brimful.capture.corrections.rule import Rule

# B samples, T times; a packed tensor has the rows of one time together, (rows, ...)


class PaddedSequences(Rule):
    """Run the ops of `pad_packed_sequence` one by one."""

    name = "padded_sequences"
    source = "torch aten/src/ATen/native/PackedSequence.cpp, _pad_packed_sequence (checked: 2.13)"
    device_kinds = ("cpu",)

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """A replacement of `torch._VF._pad_packed_sequence`, which `nn.utils.rnn.pad_packed_sequence` calls."""
        return {torch._VF._pad_packed_sequence: _pad}


def _pad(
    packed: Tensor, rows_at: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Rows as a fake tensor (T, B, ...), or (B, T, ...) with `batch_first`, and the real lengths (B,).

    `packed` is fake. `rows_at` has the rows at each time, falling; it is real, as recurrent layers read it too.
    `padding` fills what no row does. `total_length` is how many times to fill; 0 or less takes those there are.
    """
    rows = rows_at.tolist()
    times = max(total_length, len(rows))
    padded = torch.full((times, rows[0], *packed.shape[1:]), padding, dtype=packed.dtype)
    done = since = 0
    for time, (count, following) in enumerate(zip(rows, [*rows[1:], 0], strict=True), start=1):
        if following != count:
            taken = count * (time - since)
            block = packed[done : done + taken].view(time - since, count, *packed.shape[1:])
            padded[since:time, :count].copy_(block)
            done, since = done + taken, time
    with unset_fake_temporarily():
        lengths = (rows_at[:, None] > torch.arange(rows[0])).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths
