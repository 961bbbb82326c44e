"""Recovery from running out of memory in a step: the step is undone and run again.

The first retry keeps the settings: garbage or another process may have taken the memory. Further retries use
settings that take less. The batch is still on the host, so the run trains on all of it, once. With several
ranks none can retry alone: the launch ends, and the next one starts with the smaller settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch

from brimful.errors import OutOfMemoryError, PartialUpdateError
from brimful.execution.explained import Expected
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, make_room
from brimful.execution.retries import Retries, Shrink
from brimful.optimizers import has_implementation
from brimful.results import Recovery
from brimful.settings import OptimizerImplementation, Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.state import TrainState
from brimful.trainer.step.not_finite import NotFiniteStep
from brimful.transforms import apply_units

THRASHING_STEPS = 3
"""Shrink the settings after this many steps in a row in which the CUDA allocator released its cache to find
memory: each such search waits for the device. A choice: one may be due to a longer batch; three in a row will
recur."""

StoreFallback = Callable[[Settings, Recovery], str]
"""Stores the settings for the next launch; returns a sentence for the error message."""

Result = TypeVar("Result")


class OomRecovery(Retries[Settings]):
    """Retries steps in which memory ran out, with smaller settings from the second retry on.

    The unit actions on the model are those of the settings in force. `shrink` finds smaller settings,
    `on_ran_out` is called each time that memory ran out, `on_recovery` once it is known what is tried next;
    `store_fallback` stores smaller settings for the next launch. `expected` is what the plan predicted.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        shrink: Shrink[Settings],
        on_recovery: Callable[[Recovery], None],
        store_fallback: StoreFallback,
        on_ran_out: Callable[[RanOut], None],
        expected: Expected | None = None,
    ) -> None:
        self._state, self._shrink, self._store_fallback = state, shrink, store_fallback
        self._on_ran_out = on_ran_out
        self.applied = apply_units(state.model, state.settings)
        """The unit actions on the model."""
        self._allocator_retries = _allocator_retries(state.device)
        self._thrashed_in_a_row = 0
        super().__init__(
            state.settings,
            state.device,
            Settings.describe,
            way_out="Train with a smaller global batch or model, an optimizer with less state, or another "
            "precision.",
            expected=expected,
            ends=(NotFiniteStep,),
            on_recovery=on_recovery,
        )

    @property
    def how(self) -> Settings:
        """The settings in force.

        Between two steps, others of the same global batch, precision, optimizer and memory format may be put in
        force: parameters, optimizer, schedule, scaler, random numbers and data stay as they are.
        """
        return self._state.settings

    @how.setter
    def how(self, settings: Settings) -> None:
        before = self._state.settings
        if settings == before:
            return
        self.applied.remove()
        try:
            self.applied = apply_units(self._state.model, settings)
        except BaseException:
            self.applied = apply_units(self._state.model, before)
            raise
        self._state.settings = settings

    def with_retries(self, during: str, attempt: Callable[[], Result]) -> Result:
        """Run an attempt; when memory runs out, repeat it from the same random state.

        `attempt` runs a step, and undoes it if it fails; `during` names it in the record of the recovery.
        Raises OutOfMemoryError if no settings take less, or there are several ranks; PartialUpdateError if the
        step cannot be repeated.
        """
        device, recoveries = self._state.device, len(self.recoveries)
        random = random_state_now(device)

        def attempt_from_start() -> Result:
            if len(self.recoveries) > recoveries:
                restore_random_state(random, device)  # planning makes batches, which draws random numbers
            return attempt()

        self._begin(during)
        return self.run(attempt_from_start, self._smaller, self._check_repeatable)

    def shrink_if_thrashing(self) -> None:
        """Shrink the settings if the allocator had to search for memory in each of the last steps."""
        device = self._state.device
        before, self._allocator_retries = self._allocator_retries, _allocator_retries(device)
        if self._state.ranks.is_distributed:
            return  # all ranks would have to shrink together
        self._thrashed_in_a_row = self._thrashed_in_a_row + 1 if self._allocator_retries > before else 0
        if self._thrashed_in_a_row < THRASHING_STEPS:
            return
        self._thrashed_in_a_row = 0
        random, settings = random_state_now(device), self.how
        make_room(device)
        self._begin("allocator")
        with suppress(OutOfMemoryError):
            self.how = self._smaller(settings)
            what = f"the allocator gave back its cache to find memory in each of {THRASHING_STEPS} steps"
            self.record(what, settings)
        restore_random_state(random, device)

    def _begin(self, during: str, *, lost_seconds: float = 0.0) -> None:
        self.step, self.during = self._state.step + 1, during
        self._began = time.perf_counter() - lost_seconds

    def _smaller(self, settings: Settings) -> Settings:
        """Settings that take less; while they are searched for, the model has its own forward."""
        self.applied.remove()
        try:
            return self._shrink(settings)
        finally:
            self.applied = apply_units(self._state.model, settings)

    def record_reading(self, message: str, seconds: float) -> None:
        """Record that memory ran out while a batch was read, that it was read again, and the seconds lost."""
        self._begin("reading", lost_seconds=seconds)
        self.record(message, self.how)

    def after_interrupted_update(self, message: str) -> str:
        """Let the next launch update without temporaries as large as all parameters, if that may help.

        `message` is that of the error that interrupted the update. Returns how the user can continue.
        """
        if self._state.executor.on_host is not None:  # it takes no memory of the device
            return "Resume from the last save, on a host with more memory."
        before = self._state.settings
        for_loop = OptimizerImplementation.FOR_LOOP
        of_torch = before.optimizer_implementation is None and self._state.device.type == "cuda"
        if before.optimizer_implementation is not OptimizerImplementation.FOREACH and not (
            of_torch and has_implementation(self._state.optimizer, for_loop)
        ):
            return "Resume from the last save, on more ranks or with an optimizer that has less state."
        self._begin("update")
        return self._stored_for_next_launch(message, replace(before, optimizer_implementation=for_loop))

    def _check_repeatable(self, ran_out: RanOut) -> None:
        """Raise an error if the step cannot be repeated."""
        self._on_ran_out(ran_out)
        if changed := self._state.executor.move.changed:
            raise PartialUpdateError(
                f"memory ran out in a step whose loss had changed its batch in place "
                f"({', '.join(sorted(changed))}): {ran_out.message}. The step cannot be repeated. Resume from "
                "the last save, or let the loss work on a copy."
            )
        ranks = self._state.ranks
        if ranks.is_distributed:
            stored = self._stored_for_next_launch(ran_out.message, self._shrink(self.how))
            raise StepOutOfMemoryError(
                f"memory ran out on rank {ranks.rank} of {ranks.count} in step {self.step}: "
                f"{ran_out.message}.\n  The other ranks wait for its gradients and cannot undo the step, so "
                f"this launch ends.\n  {stored}"
            )

    def _stored_for_next_launch(self, message: str, after: Settings) -> str:
        self.during = f"{self.during} on rank {self._state.ranks.rank}"
        return self._store_fallback(after, self.recovery(message, self.how, after))


def _allocator_retries(device: torch.device) -> int:
    """How often the CUDA allocator has released its cache because the device was full."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
