"""The state of every generator of random numbers that a step may draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Generators of Python, NumPy and torch, as they were at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    host: Tensor
    """Of torch on the host."""
    cuda: Tensor | None
    """Of the device in use; None on a CPU."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """The state of all generators.

        Args:
            device: Whose generator counts beside the host's.

        Returns:
            A copy.
        """
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=True),  # type: ignore[arg-type]
            host=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        """Set all generators back.

        Args:
            device: As in `now`.
        """
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def to_save(self) -> dict[str, Any]:
        """The state in plain numbers, lists and tensors, as a file may hold that runs no code when loaded."""
        version, numbers, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, list(numbers), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "host": self.host,
            "cuda": self.cuda,
        }

    @classmethod
    def from_save(cls, saved: dict[str, Any]) -> Self:
        """The state that `to_save` gave."""
        version, numbers, gauss = saved["python"]
        name, keys, *rest = saved["numpy"]
        return cls(
            python=(version, tuple(numbers), gauss),
            numpy=(name, np.array(keys, dtype=np.uint32), *rest),
            host=saved["host"],
            cuda=saved["cuda"],
        )
