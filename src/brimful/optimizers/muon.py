"""Muon on hidden matrices and AdamW on all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Muon(Optimizer):
    """Muon on hidden matrices and AdamW on all other parameters, as one optimizer.

    Its groups and its state are those of torch's two; a group's "algorithm" says whose it is. `others` may be
    empty.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        self._inner: dict[str, Optimizer] = {"muon": muon}
        if others:
            self._inner["adamw"] = torch.optim.AdamW(others)
        groups = [
            group | {"algorithm": name} for name, inner in self._inner.items() for group in inner.param_groups
        ]
        super().__init__(groups, {"lr": muon.defaults["lr"], "weight_decay": muon.defaults["weight_decay"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers; returns the loss of `closure`, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, inner in self._inner.items():  # loading a state replaces groups and state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.state = self.state
            inner.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_inner": self._inner}
