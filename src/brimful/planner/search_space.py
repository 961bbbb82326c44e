"""A request → the candidates that it permits, captured; what cannot be captured is noted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from brimful.errors import CaptureError, UsageError
from brimful.memory import most_held_bytes, pinned_host_bytes
from brimful.planner.candidate_search import CandidateSearch
from brimful.planner.family import CandidateFamily
from brimful.planner.problem.logits import LOSS_CHUNKS, logits_layer
from brimful.planner.request import Request
from brimful.prediction.estimator import Capture
from brimful.quantities import format_bytes
from brimful.settings import ChunkedLoss, Parallelism, Settings
from brimful.trace import Category, Trace


class SearchSpace:
    """The ways to train that a request permits; what cannot be searched, and why, is added to `notes`."""

    def __init__(self, capture: Capture, request: Request, baseline: Trace, notes: list[str]) -> None:
        self._capture = capture
        self._request = request
        self._baseline = baseline
        self._notes = notes
        is_whole = request.keeps_batch_whole(baseline)
        self._sizes = (request.rank_batch_size,) if is_whole else request.micro_batch_sizes()

    def of_bases(self, bases: Iterable[Settings]) -> list[CandidateSearch]:
        """The candidates of every micro-batch size under some settings of the whole step."""
        found: list[CandidateSearch] = []
        for base in bases:
            try:
                found += self._of_base(base)
            except (CaptureError, UsageError) as error:
                if base.parallelism is Parallelism.FSDP2 and len(self._request.parallelisms) > 1:
                    self._notes.append(f"FSDP2 is not considered: {error}")
                    continue
                found += self._despite(error, base)
        return found

    def _despite(self, error: CaptureError | UsageError, base: Settings) -> list[CandidateSearch]:
        """Candidates after those of `base` failed: with the optimizer's own implementation, or none."""
        others = self._request.memory_formats[:-1]
        is_choice = bool(others) and base.memory_format not in others and base in self._request.bases()
        if base.optimizer_implementation is None and not is_choice:
            raise error
        if base.optimizer_implementation is not None:
            try:
                found = self._of_base(replace(base, optimizer_implementation=None))
            except (CaptureError, UsageError):
                if not is_choice:
                    raise
            else:
                self._notes.append(f"The {base.optimizer_implementation} optimizer is not considered: {error}")
                return found
        self._notes.append(f"The memory format {base.memory_format} is not considered: {error}")
        return []

    def with_chunked_loss(self) -> list[CandidateSearch]:
        """Candidates that compute the loss in chunks; none where it is small, or chunks cannot be captured."""
        layer = logits_layer(self._baseline)
        if layer is None:
            return []
        chunked = ChunkedLoss(layer=layer, chunks=LOSS_CHUNKS)
        whole = [base for base in self._request.bases() if base.parallelism is Parallelism.DDP]
        try:
            return self.of_bases([replace(base, chunked_loss=chunked) for base in whole])
        except (CaptureError, UsageError) as error:
            self._notes.append(f"The loss is not computed in chunks: {error}")
            return []

    def with_offloaded_optimizer(self, candidates: Sequence[CandidateSearch]) -> list[CandidateSearch]:
        """The candidates with the optimizer on the host, but for those that fail or have no room there."""
        bases: dict[Settings, Trace] = {}
        for each in candidates:
            whole = each.settings.with_micro_batch_size(self._request.rank_batch_size)
            base = replace(whole, expandable_segments=False, offload_optimizer=True)
            bases.setdefault(base, each.candidate.kept)
        found: list[CandidateSearch] = []
        for base, on_device in bases.items():
            tried: list[CandidateSearch] = []
            reason = self._why_no_room_on_host(
                most_held_bytes(on_device, Category.OPTIMIZER_STATE), "at least "
            )
            if reason is None:
                try:
                    tried = self.of_bases([base])
                    reason = self._why_not_on_host(tried[0].candidate.kept)
                except (CaptureError, UsageError) as error:
                    reason = str(error)
            if reason is None:
                found += tried
            else:
                self._notes.append(f"{base.optimizer or 'The optimizer'} stays on the device: {reason}")
        can_expand = any(each.settings.expandable_segments for each in candidates)
        return found + [each.with_expandable_segments() for each in found if can_expand]

    def _of_base(self, base: Settings) -> list[CandidateSearch]:
        family = CandidateFamily(self._capture, self._request, base, self._sizes, self._notes)
        return [CandidateSearch(each, self._capture, self._notes) for each in family.candidates()]

    def _why_not_on_host(self, kept: Trace) -> str | None:
        """Why no plan may choose the host for an optimizer; None if it may."""
        if reason := self._why_no_room_on_host(kept.host_state_bytes + pinned_host_bytes(kept)):
            return reason
        if any(op.on_host and op.flops for op in kept.ops):
            return "its update multiplies matrices, and how fast the host does that is not known."
        return None

    def _why_no_room_on_host(self, taken_bytes: int, how_many: str = "") -> str | None:
        permitted_bytes = self._request.offload_host_bytes
        if taken_bytes <= permitted_bytes:
            return None
        return (
            f"it needs {how_many}{format_bytes(taken_bytes)} of host memory, and host_memory (--host-memory) "
            f"permits {format_bytes(permitted_bytes)}."
        )
