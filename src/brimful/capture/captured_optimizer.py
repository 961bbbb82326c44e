"""The optimizer of a captured step, whose state is made before the first step: so each step is a steady one.

State of parameters that no loss reaches is dropped in the first step: optimizers skip parameters without a
gradient, so a real step never makes it.

Private torch API used here: `torch.utils._python_dispatch._disable_current_modes` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brimful.batches import named_tensors, own_part
from brimful.capture.marks import mark_gradients, mark_state
from brimful.capture.paged_state import forget_state, page_state
from brimful.capture.recording.recorder import Recorder
from brimful.execution.host_optimizer import state_bytes
from brimful.job import Job
from brimful.optimizers import make_optimizer
from brimful.settings import Settings
from brimful.trace import Phase

Update = Callable[[Callable[[], object]], None]


class CapturedOptimizer:
    """The optimizer of a captured step, its state, and whether that is in the host's memory.

    `recorder` is in force. `shards_on_host` says that parameters and gradients are in the host's memory, while
    the device is another.
    """

    def __init__(
        self, job: Job, settings: Settings, model: nn.Module, recorder: Recorder, *, shards_on_host: bool
    ) -> None:
        self._settings, self._model, self._recorder = settings, model, recorder
        self.shards_on_host = shards_on_host
        self._is_on_host = settings.offload_optimizer or self.shards_on_host
        with recorder.position.on_host() if self._is_on_host else nullcontext():  # some make state at once
            self.optimizer = _make_optimizer(job, model, settings)
        if not self._is_on_host:
            page_state(self.optimizer, recorder)
        self._made_early: list[nn.Parameter] = []
        """Parameters whose state was made before a gradient reached them."""

    def mark_state(self) -> None:
        """Mark the state that is kept between steps, or count its bytes where it is in the host's memory."""
        if self._recorder.host_is_device or not self._is_on_host:
            mark_state(self.optimizer, self._model, self._recorder)
            return
        self._recorder.facts.host_state_bytes = state_bytes(self.optimizer)
        if self.shards_on_host:  # parameters, and gradients of those that are trained
            parameters = list(self._model.parameters())
            self._recorder.facts.host_state_bytes += sum(own_part(p).nbytes for p in parameters)
            self._recorder.facts.host_state_bytes += sum(
                own_part(p).nbytes for p in parameters if p.requires_grad
            )

    def create_state(self, call_update: Update) -> None:
        """Let the optimizer make its state, by one step with gradients that are never written.

        `call_update` calls the optimizer's step, on the host if that is where its state is.
        """
        with self._recorder.position.on_host() if self.shards_on_host else nullcontext():
            if not self._settings.optimizer_in_backward:
                self._create_state_of_all(call_update)
                return
            whole = self.optimizer.param_groups
            for group in whole:  # there is never more than one gradient
                for parameter in group["params"]:
                    self.optimizer.param_groups = [group | {"params": [parameter]}]
                    self._create_state_of_all(call_update)
            self.optimizer.param_groups = whole

    def _create_state_of_all(self, call_update: Update) -> None:
        """Let the optimizer make the state of all parameters in its groups.

        With several ranks the gradients are marked as such: in training they are in DDP's buckets at that time.
        """
        optimizer, recorder = self.optimizer, self._recorder
        recorder.position.enter(Phase.SETUP, 0)
        there_before = set(optimizer.state)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        if self._settings.world_size > 1 and not self.shards_on_host:
            mark_gradients(self._model, recorder)
        call_update(optimizer.step)
        optimizer.zero_grad(set_to_none=True)
        self.mark_state()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._made_early += [parameter for parameter in parameters if parameter not in there_before]

    def drop_state_of_unused(self, is_used: Callable[[nn.Parameter], bool]) -> None:
        """Drop the state of parameters that no loss reaches; only the first step has any."""
        for parameter in self._made_early:
            if not is_used(parameter):
                state = [value for _, value in named_tensors(self.optimizer.state.pop(parameter, {}))]
                self._recorder.ledger.discard(state)
                forget_state(state, self._recorder)
        self._made_early.clear()


def _make_optimizer(job: Job, model: nn.Module, settings: Settings) -> Optimizer:
    """Make the optimizer; one that reads tables which it makes (bitsandbytes) makes them as real tensors."""
    try:
        return make_optimizer(job, model, settings)
    except DataDependentOutputException:
        with _disable_current_modes():
            return make_optimizer(job, model, settings)
