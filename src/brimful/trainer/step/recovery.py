"""What a step does when memory runs out: it is undone and run again.

Once with the same settings, as the memory may have been lost to garbage or to another process; then with
settings that take less. The batch is still on the host, so all of it is trained on, once. Of several ranks none
can retry alone: the launch ends, and the next one starts with the smaller settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from brimful.errors import OutOfMemoryError, PartialUpdateError
from brimful.execution.out_of_memory import RanOut, make_room, with_retries
from brimful.execution.update import AtomicUpdate, ResumableUpdate
from brimful.optimizers import has_implementation
from brimful.results import Recovery
from brimful.settings import OptimizerImplementation, Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.state import TrainState
from brimful.transforms import apply_units
from brimful.transforms.apply import Applied

THRASHING_STEPS = 3
"""Steps in a row in which the CUDA allocator released its cache to find memory, after which less is taken:
each such search waits for the device. A choice: one may be due to a longer batch, three in a row are a
habit."""

Shrink = Callable[[Settings], Settings]
"""Finds settings that take less memory for the same global batch; raises OutOfMemoryError if there are none."""

ScheduleFallback = Callable[[Settings, Recovery], str]
"""Stores the settings for the next launch; returns what an error says about it."""

Result = TypeVar("Result")


class OomRecovery:
    """Retries steps in which memory ran out, with smaller settings from the second time on.

    Args:
        state: Its settings are replaced by smaller ones.
        applied: The unit actions on the model, which change with the settings.
        shrink: Finds smaller settings.
        on_recovery: Called each time that memory ran out.
        schedule_fallback: See `ScheduleFallback`.
    """

    def __init__(
        self,
        state: TrainState,
        applied: Applied,
        *,
        shrink: Shrink,
        on_recovery: Callable[[Recovery], None],
        schedule_fallback: ScheduleFallback,
    ) -> None:
        self._state = state
        self.applied = applied
        """The unit actions in force."""
        self._shrink = shrink
        self._on_recovery = on_recovery
        self._schedule_fallback = schedule_fallback
        self._retries = _allocator_retries(state.device)
        self._thrashed_in_a_row = 0

    def with_retries(self, during: str, attempt: Callable[[], Result]) -> Result:
        """The result of an attempt, repeated from the same random numbers each time that memory runs out.

        Args:
            during: Names the attempt in the recovery's record.
            attempt: Runs a step, or leaves everything as before.

        Returns:
            What the last attempt returned.

        Raises:
            OutOfMemoryError: Nothing that takes less is left to try, or there are several ranks.
            PartialUpdateError: The step cannot be repeated.
        """
        device = self._state.device
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
            self._recover(during, ran_out.message, start, shrinks=is_retry)
            restore_random_state(random, device)  # planning draws batches

        return with_retries(timed, recover, device)

    def shrink_if_thrashing(self) -> None:
        """Shrink where the allocator had to search for memory in each of the last steps."""
        device = self._state.device
        before, self._retries = self._retries, _allocator_retries(device)
        if self._state.ranks.is_distributed:
            return  # all of them would have to shrink alike
        self._thrashed_in_a_row = self._thrashed_in_a_row + 1 if self._retries > before else 0
        if self._thrashed_in_a_row < THRASHING_STEPS:
            return
        self._thrashed_in_a_row = 0
        random = random_state_now(device)
        make_room(device)
        what = f"the allocator gave back its cache to find memory in each of {THRASHING_STEPS} steps"
        with suppress(OutOfMemoryError):
            self._recover("allocator", what, time.perf_counter(), shrinks=True)
        restore_random_state(random, device)

    def schedule_smaller_update(self, message: str) -> str:
        """Store, for the next launch, an update without temporaries as large as all parameters.

        Args:
            message: What the error said.

        Returns:
            How the run can continue.
        """
        before = self._state.settings
        for_loop = OptimizerImplementation.FOR_LOOP
        of_torch = before.optimizer_implementation is None and self._state.device.type == "cuda"
        if before.optimizer_implementation is not OptimizerImplementation.FOREACH and not (
            of_torch and has_implementation(self._state.optimizer, for_loop)
        ):
            return "Resume from the last save, on more ranks or with an optimizer that has less state."
        return self._scheduled("update", message, replace(before, optimizer_implementation=for_loop))

    def _recover(self, during: str, message: str, since: float, *, shrinks: bool) -> None:
        state = self._state
        before = state.settings
        if shrinks:
            self.applied.remove()
            try:
                state.settings = self._shrink(before)
            finally:
                self.applied = apply_units(state.model, state.settings)
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
        """Store smaller settings for the next launch, and the error that ends this one."""
        ranks = self._state.ranks
        after = self._shrink(self._state.settings)
        scheduled = self._scheduled(during, message, after, time.perf_counter() - since)
        return OutOfMemoryError(
            f"memory ran out on rank {ranks.rank} of {ranks.count} in step {self._state.step + 1}: "
            f"{message}.\n  The other ranks wait for its gradients and cannot undo the step, so this "
            f"launch ends.\n  {scheduled}"
        )

    def _scheduled(self, during: str, message: str, after: Settings, seconds: float = 0.0) -> str:
        where = f"{during} on rank {self._state.ranks.rank}"
        return self._schedule_fallback(
            after, self._record(where, message, self._state.settings, after, seconds)
        )


def update_of(state: TrainState, recovery: OomRecovery) -> ResumableUpdate | AtomicUpdate:
    """How the update of a run behaves when memory runs out in it."""
    on_host = state.executor.on_host
    if on_host is not None:  # it takes no memory of the device
        way_out = "Resume from the last save, on a host with more memory."
        return AtomicUpdate("parameters on the host", lambda _message: way_out, lambda: on_host.has_begun)
    if state.parallel.is_sharded:
        return AtomicUpdate("divided parameters", recovery.schedule_smaller_update)
    return ResumableUpdate(state.optimizer, partial(make_room, state.device))


def _allocator_retries(device: torch.device) -> int:
    """How often the CUDA allocator has released its cache because a device had no more memory to give."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
