"""bitsandbytes' AdamW8bit for predictions where it is not installed: its state and its kernels, without values.

Source: bitsandbytes/optim/optimizer.py, Optimizer2State; optim/adamw.py, AdamW8bit; _ops.py (0.50.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_LEAST_NUMBERS = 4096
"""Parameters of fewer numbers keep their state in float32; bitsandbytes' `min_8bit_size`."""
_BLOCK = 256
"""Numbers that share a scale."""
_CODES = 256
"""Entries of a table of values."""

_library = torch.library.Library("bitsandbytes_stand_in", "FRAGMENT")
_UPDATES = {
    "optimizer_update_32bit": "Tensor(a2!) state1, Tensor(a3!) state2",
    "optimizer_update_8bit_blockwise": (
        "Tensor(a2!) state1, Tensor(a3!) state2, Tensor(a4!) qmap1, Tensor(a5!) qmap2, Tensor(a6!) absmax1, "
        "Tensor(a7!) absmax2"
    ),
}
for _name, _state in _UPDATES.items():
    _library.define(f"{_name}(Tensor(a0!) g, Tensor(a1!) p, {_state}) -> ()")
    torch.library.register_fake(f"bitsandbytes_stand_in::{_name}", lambda *_tensors: None, lib=_library)
_ops: Any = torch.ops.bitsandbytes_stand_in


class AdamW8bit(Optimizer):
    """An optimizer with the state of bitsandbytes' AdamW8bit, and its kernels on fake tensors."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2})
        self._tables: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with a gradient once."""
        loss = None if closure is None else closure()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                self.state[parameter] = self._new_state(parameter)
            state = [value for name, value in self.state[parameter].items() if name != "step"]
            update = _ops.optimizer_update_32bit if len(state) == 2 else _ops.optimizer_update_8bit_blockwise
            update(parameter.grad.contiguous(), parameter, *state)
        return loss

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        if parameter.numel() < _LEAST_NUMBERS:
            moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
            return {"step": 0, **moments}
        if self._tables is None:
            new_table = partial(parameter.new_zeros, _CODES, dtype=torch.float32)
            self._tables = new_table(), new_table()
        blocks = -(-parameter.numel() // _BLOCK)
        moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        scales = {name: parameter.new_zeros(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")}
        return {"step": 0, **moments, **dict(zip(("qmap1", "qmap2"), self._tables, strict=True)), **scales}


def is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes', or predicts one."""
    kinds = type(optimizer).__mro__
    return AdamW8bit in kinds or any(kind.__module__.startswith("bitsandbytes.") for kind in kinds)
