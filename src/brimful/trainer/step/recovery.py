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
from brimful.execution.out_of_memory import RanOut, make_room, with_retries
from brimful.optimizers import has_implementation
from brimful.results import Recovery
from brimful.settings import OptimizerImplementation, Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.state import TrainState
from brimful.trainer.step.not_finite import NotFiniteStep
from brimful.transforms import apply_units
from brimful.transforms.apply import Applied

THRASHING_STEPS = 3
"""Shrink the settings after this many steps in a row in which the CUDA allocator released its cache to find
memory: each such search waits for the device. A choice: one may be due to a longer batch; three in a row will
recur."""

Shrink = Callable[[Settings], Settings]
"""Finds settings that take less memory for the same global batch; raises OutOfMemoryError if there are none."""

StoreFallback = Callable[[Settings, Recovery], str]
"""Stores the settings for the next launch; returns a sentence for the error message."""

Result = TypeVar("Result")


class OomRecovery:
    """Retries steps in which memory ran out, with smaller settings from the second retry on.

    `state` gets the smaller settings, which `shrink` finds; `applied`, the unit actions on the model, changes
    with them. `on_recovery` is called each time that memory ran out; `store_fallback` stores smaller settings
    for the next launch.
    """

    def __init__(
        self,
        state: TrainState,
        applied: Applied,
        *,
        shrink: Shrink,
        on_recovery: Callable[[Recovery], None],
        store_fallback: StoreFallback,
    ) -> None:
        self._state = state
        self.applied = applied
        """The unit actions on the model."""
        self._shrink = shrink
        self._on_recovery = on_recovery
        self._store_fallback = store_fallback
        self._retries = _allocator_retries(state.device)
        self._thrashed_in_a_row = 0

    def with_retries(self, during: str, attempt: Callable[[], Result]) -> Result:
        """Run an attempt; when memory runs out, repeat it from the same random state.

        `attempt` runs a step, and undoes it if it fails; `during` names it in the record of the recovery.
        Raises OutOfMemoryError if no settings take less, or there are several ranks; PartialUpdateError if the
        step cannot be repeated.
        """
        device, before = self._state.device, self._state.settings
        random = random_state_now(device)
        start = time.perf_counter()

        def timed() -> Result:
            nonlocal start
            start = time.perf_counter()
            return attempt()

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            self._check_batch_unchanged(ran_out)
            if self._state.ranks.is_distributed:
                raise self._ended_on_one_rank(during, ran_out.message, start)
            self._recover(during, ran_out, start, shrinks=is_retry)
            restore_random_state(random, device)  # planning makes batches, which draws random numbers

        try:
            return with_retries(timed, recover, device, but=(NotFiniteStep,))
        except BaseException:
            if self._state.settings != before:
                self._change_settings(lambda _settings: before)
            raise

    def shrink_if_thrashing(self) -> None:
        """Shrink the settings if the allocator had to search for memory in each of the last steps."""
        device = self._state.device
        before, self._retries = self._retries, _allocator_retries(device)
        if self._state.ranks.is_distributed:
            return  # all ranks would have to shrink together
        self._thrashed_in_a_row = self._thrashed_in_a_row + 1 if self._retries > before else 0
        if self._thrashed_in_a_row < THRASHING_STEPS:
            return
        self._thrashed_in_a_row = 0
        random = random_state_now(device)
        make_room(device)
        what = f"the allocator gave back its cache to find memory in each of {THRASHING_STEPS} steps"
        with suppress(OutOfMemoryError):
            self._recover("allocator", RanOut(what), time.perf_counter(), shrinks=True)
        restore_random_state(random, device)

    def _change_settings(self, choose: Callable[[Settings], Settings]) -> None:
        """Put other settings in force between two steps: their unit actions in place of those before.

        Parameters, optimizer, schedule, scaler, random numbers and data stay as they are. `choose` gets the
        settings in force and returns those to continue with, of the same global batch, precision, optimizer and
        memory format. While it runs, the model has its own forward, as when planning.
        """
        state, before = self._state, self._state.settings
        self.applied.remove()
        try:
            after = choose(before)
            self.applied = apply_units(state.model, after)
        except BaseException:
            self.applied = apply_units(state.model, before)
            raise
        state.settings = after

    def record_reading(self, message: str, seconds: float) -> None:
        """Record that memory ran out while a batch was read, that it was read again, and the seconds lost."""
        settings = self._state.settings
        self._on_recovery(self._record("reading", message, settings, settings, seconds))

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
        return self._stored_for_next_launch(
            "update", message, replace(before, optimizer_implementation=for_loop)
        )

    def _recover(self, during: str, ran_out: RanOut, since: float, *, shrinks: bool) -> None:
        state, message = self._state, ran_out.message
        before = state.settings
        if ran_out.refused:
            message = f"{message}; with {before.describe()} the step raised {ran_out.refused}"
        if shrinks:
            try:
                self._change_settings(self._shrink)
            except OutOfMemoryError as error:
                if not ran_out.refused:
                    raise
                raise OutOfMemoryError(f"{message}.\n  {error}") from error
        self._on_recovery(self._record(during, message, before, state.settings, time.perf_counter() - since))

    def _record(self, during: str, message: str, before: Settings, after: Settings, seconds: float) -> Recovery:
        return Recovery(
            step=self._state.step + 1,
            during=during,
            message=message,
            before=before.describe(),
            after=after.describe(),
            seconds=seconds,
        )

    def _check_batch_unchanged(self, ran_out: RanOut) -> None:
        if changed := self._state.executor.move.changed:
            raise PartialUpdateError(
                f"memory ran out in a step whose loss had changed its batch in place "
                f"({', '.join(sorted(changed))}): {ran_out.message}. The step cannot be repeated. Resume from "
                "the last save, or let the loss work on a copy."
            )

    def _ended_on_one_rank(self, during: str, message: str, since: float) -> OutOfMemoryError:
        """Store smaller settings for the next launch; return the error that ends this one."""
        ranks = self._state.ranks
        after = self._shrink(self._state.settings)
        stored = self._stored_for_next_launch(during, message, after, time.perf_counter() - since)
        return OutOfMemoryError(
            f"memory ran out on rank {ranks.rank} of {ranks.count} in step {self._state.step + 1}: "
            f"{message}.\n  The other ranks wait for its gradients and cannot undo the step, so this "
            f"launch ends.\n  {stored}"
        )

    def _stored_for_next_launch(self, during: str, message: str, after: Settings, seconds: float = 0.0) -> str:
        where = f"{during} on rank {self._state.ranks.rank}"
        return self._store_fallback(after, self._record(where, message, self._state.settings, after, seconds))


def _allocator_retries(device: torch.device) -> int:
    """How often the CUDA allocator has released its cache because the device was full."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
