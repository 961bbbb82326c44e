"""A request → the candidates that are worth a search; what cannot be searched, and why, is noted.

Start reading at `SearchSpace.candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from brimful.cost import least_distinguished_seconds, least_host_update_seconds
from brimful.errors import BatchError, CaptureError, UsageError
from brimful.memory import most_held_bytes, pinned_host_bytes
from brimful.planner.candidate import Candidate
from brimful.planner.family import CandidateFamily
from brimful.planner.fastest import by_least_time, fastest_within, least_seconds_within
from brimful.planner.floor import bytes_of_update
from brimful.planner.problem.logits import chunked_loss_of
from brimful.planner.request import Request
from brimful.prediction.estimate import NO_LIMIT_BYTES
from brimful.prediction.estimator import ROUGH_SIZES, Capture
from brimful.settings import Compile, Parallelism, Settings
from brimful.trace import Category, Trace
from brimful.utils.quantities import format_bytes

TIME_UNCERTAINTY = 0.001
"""Fraction by which times of captures and of what is predicted from them may differ."""


class SearchSpace:
    """The ways to train that a request permits; what cannot be searched, and why, is added to `notes`."""

    def __init__(self, capture: Capture, request: Request, baseline: Trace, notes: list[str]) -> None:
        self._capture = capture
        self._request = request
        self._baseline = baseline
        self._notes = notes
        is_whole = request.keeps_batch_whole(baseline)
        self._sizes = (request.rank_batch_size,) if is_whole else request.micro_batch_sizes()

    def candidates(self) -> list[Candidate]:
        """All candidates worth a search; those that take less memory only where it limits the others."""
        request = self._request
        found = self._of_bases(request.bases())
        can_chunk = request.asked.chunked_loss and not self._baseline.couples_samples
        if can_chunk and self._is_limited_by_memory(found):
            found += self._with_chunked_loss()
        can_expand = request.asked.expandable_segments and request.device.kind == "cuda"
        if can_expand and self._is_limited_by_memory(found):
            found += [each.with_expandable_segments() for each in found]
        return found + (self.with_optimizer_on_host(found) if self._may_gain_on_host(found) else [])

    def with_optimizer_on_host(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with the optimizer on the host; none if that is not permitted, or was done already."""
        is_done = any(each.settings.offload_optimizer for each in candidates)
        if is_done or not self._request.may_offload_optimizer:
            return []
        return self._with_offloaded_optimizer(candidates)

    def compiled(self, like: Settings) -> list[Candidate]:
        """Candidates that compile what is permitted, like a choice that does not: its micro-batch and the next.

        What Inductor makes of a step is not affine in the micro-batch, as reductions are split by their size.
        So each size is captured by itself: that of the choice, and the next larger one, as compiled code saves
        less for backward.
        """
        size = like.micro_batch_size
        larger = [each for each in self._sizes if each > size][-1:]
        found: list[Candidate] = []
        for compiles in self._request.compiles:
            if compiles is Compile.NONE:
                continue
            try:
                base = replace(like, units=(), expandable_segments=False, compile=compiles)
                for each in (size, *larger):
                    family = CandidateFamily(self._capture, self._request, base, (each,), self._notes)
                    found += [Candidate(one, self._capture, self._notes) for one in family.of_all_sizes()]
            except (CaptureError, UsageError) as error:
                if Compile.NONE not in self._request.compiles:
                    raise
                self._notes.append(f"Compiling is not considered: {error}")
        return found + [each.with_expandable_segments() for each in found if like.expandable_segments]

    def _is_limited_by_memory(self, candidates: Sequence[Candidate]) -> bool:
        """Whether taking less memory could make the best plan faster, or there is no plan.

        What is expected decides, and its capture only if that would be fast enough. On a CPU it always could:
        memory that a step has not touched yet takes time to touch.
        """
        if self._request.device.kind == "cpu":
            return True
        budget_bytes = self._request.reserved_budget_bytes
        fast_enough = least_seconds_within(candidates, NO_LIMIT_BYTES) * (1 + TIME_UNCERTAINTY)
        expected = next(by_least_time(candidates, budget_bytes), None)
        if expected is None or expected.seconds > fast_enough:
            return True
        found = fastest_within(candidates, budget_bytes)
        return not found or found[0].predicted_step_seconds > fast_enough

    def _may_gain_on_host(self, candidates: Sequence[Candidate]) -> bool:
        """Whether nothing fits, or the host's update takes less time than what it could gain.

        It gains at most what the bytes that leave the device would, added to the budget. Where the simplest of
        equal plans is chosen, it must gain enough to be distinguished.
        """
        request, budget_bytes = self._request, self._request.reserved_budget_bytes
        if not request.may_offload_optimizer:
            return False
        expected = next(by_least_time(candidates, budget_bytes), None)
        if expected is None:
            return True
        by_optimizer = {each.settings.optimizer: each.solutions.kept for each in candidates}
        leaving_bytes = max(map(bytes_of_update, by_optimizer.values()))
        least_seconds = least_seconds_within(candidates, budget_bytes + leaving_bytes)
        if least_seconds == math.inf:
            return True
        state_bytes = most_held_bytes(self._baseline, Category.OPTIMIZER_STATE)
        needed_seconds = least_host_update_seconds(
            self._baseline, request.device, 0 if request.asked.allow_optimizers else state_bytes
        )
        if request.prefers_simplest:
            needed_seconds += least_distinguished_seconds(expected.seconds)
        return expected.seconds - least_seconds > needed_seconds

    def _with_chunked_loss(self) -> list[Candidate]:
        """Candidates that compute the loss in chunks; none where it is small, or chunks cannot be captured."""
        chunked = chunked_loss_of(self._baseline)
        if chunked is None:
            return []
        whole = [base for base in self._request.bases() if base.parallelism is Parallelism.DDP]
        try:
            return self._of_bases([replace(base, chunked_loss=chunked) for base in whole])
        except (CaptureError, UsageError) as error:
            self._notes.append(f"The loss is not computed in chunks: {error}")
            return []

    def _with_offloaded_optimizer(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with the optimizer on the host, but for those that fail or have no room there."""
        bases: dict[Settings, Trace] = {}
        for each in candidates:
            whole = each.settings.with_micro_batch_size(self._request.rank_batch_size)
            base = replace(whole, expandable_segments=False, offload_optimizer=True)
            bases.setdefault(base, each.solutions.kept)
        found: list[Candidate] = []
        for base, on_device in bases.items():
            try:
                state_bytes = most_held_bytes(on_device, Category.OPTIMIZER_STATE)
                self._check_room_on_host(state_bytes, "at least ")
                if step := self._one_step(base):  # before the captures of a whole family
                    self._check_update_on_host(step)
                on_host = self._of_bases([base])
                self._check_update_on_host(on_host[0].solutions.kept)
            except (CaptureError, UsageError) as error:
                self._notes.append(f"{base.optimizer or 'The optimizer'} stays on the device: {error}")
            else:
                found += on_host
        can_expand = any(each.settings.expandable_segments for each in candidates)
        return found + [each.with_expandable_segments() for each in found if can_expand]

    def _one_step(self, base: Settings) -> Trace | None:
        """A step under some settings, which `CandidateFamily` captures too; None if that fails."""
        rough = replace(base, micro_batch_size=ROUGH_SIZES[0], gradient_accumulation_steps=2)
        with suppress(BatchError, CaptureError, UsageError):
            return self._capture(rough if len(self._sizes) > 1 else base.with_micro_batch_size(self._sizes[0]))
        return None

    def _check_update_on_host(self, kept: Trace) -> None:
        """Raise UsageError if no plan may choose the host for the optimizer of a capture."""
        self._check_room_on_host(kept.host_state_bytes + pinned_host_bytes(kept))
        if any(op.on_host and op.flops for op in kept.ops):
            raise UsageError("its update multiplies matrices, and how fast the host does that is not known.")

    def _check_room_on_host(self, taken_bytes: int, how_many: str = "") -> None:
        permitted_bytes = self._request.offload_host_bytes
        if taken_bytes > permitted_bytes:
            raise UsageError(
                f"it needs {how_many}{format_bytes(taken_bytes)} of host memory, and host_memory "
                f"(--host-memory) permits {format_bytes(permitted_bytes)}."
            )

    def _of_bases(self, bases: Iterable[Settings]) -> list[Candidate]:
        """The candidates of every micro-batch size under some settings of the whole step."""
        found: list[Candidate] = []
        for base in bases:
            try:
                found += self._of_base(base)
            except (CaptureError, UsageError) as error:
                found += self._despite(error, base)
        return found

    def _despite(self, error: CaptureError | UsageError, base: Settings) -> list[Candidate]:
        """Candidates after those of `base` failed: with the optimizer's own implementation, or none.

        Where nothing else is permitted in place of `base`, the error is raised.
        """
        if base.parallelism is Parallelism.FSDP2 and len(self._request.parallelisms) > 1:
            self._notes.append(f"FSDP2 is not considered: {error}")
            return []
        failure = error
        if base.optimizer_implementation is not None:
            try:
                found = self._of_base(replace(base, optimizer_implementation=None))
            except (CaptureError, UsageError) as of_own:
                failure = of_own
            else:
                self._notes.append(f"The {base.optimizer_implementation} optimizer is not considered: {error}")
                return found
        others = self._request.memory_formats[:-1]
        if not others or base.memory_format in others or base not in self._request.bases():
            raise failure
        self._notes.append(f"The memory format {base.memory_format} is not considered: {error}")
        return []

    def _of_base(self, base: Settings) -> list[Candidate]:
        family = CandidateFamily(self._capture, self._request, base, self._sizes, self._notes)
        return [Candidate(each, self._capture, self._notes) for each in family.of_all_sizes()]
