"""Recomputation keeps the random generator's state, 5 KB a region, in memory that no op allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.torch_utils.replaced import replaced


class RandomState(Rule):
    """Count what `torch.get_rng_state` returns, which no op makes.

    The state is kept on the host, so it is nothing to a CUDA device.
    """

    name = "random_state"
    source = "torch/utils/checkpoint.py, preserve_rng_state; torch/random.py, get_rng_state (checked: 2.13)"
    device_kinds = ("cpu",)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Record states that are asked for while the context is open, as long as they live."""
        get_rng_state = torch.get_rng_state

        def recorded() -> Tensor:
            state = get_rng_state()
            self.recorder.ledger.track(state, "random state")
            self.count(state.numel())
            return state

        with replaced(torch, "get_rng_state", recorded):
            yield
