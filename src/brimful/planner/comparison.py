"""What each technique costs and saves: one row per technique, the usual combinations, and the plan last.

Start reading at `compare_techniques`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from brimful.devices import Device
from brimful.errors import BatchError, CaptureError, InfeasibleError, UsageError
from brimful.planner.explain.changes import LEAST_GAIN, Change, JobChanges, optimizer_changes, precision_changes
from brimful.planner.headroom import exceedance_of
from brimful.planner.problem.logits import LOSS_CHUNKS, logits_layer
from brimful.planner.request import Request
from brimful.planner.search import search
from brimful.planner.solutions import uniform_actions
from brimful.prediction.estimate import Estimate, Verdict, estimate_trace
from brimful.prediction.estimator import Capture
from brimful.results import Measurement, Probability
from brimful.settings import (
    Action,
    ChunkedLoss,
    MemoryFormat,
    OptimizerImplementation,
    Precision,
    Settings,
)
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace
from brimful.trace.units import find_units
from brimful.utils.display import PrintedResult
from brimful.utils.status import report

USUAL_PART = 4
"""A gradient is accumulated over this many micro-batches, where the batch divides. A choice: that of the guide
"Efficient Training on a Single GPU" (Transformers 4.25)."""


_ACCUMULATION = "accumulation "
"""How the name of gradient accumulation begins."""


class SameResults(StrEnum):
    """How loss and gradients of a step compare with those of the baseline."""

    IDENTICAL = "identical"
    """Bit for bit."""
    ROUNDING = "rounding"
    """The same mathematics in another order or by another kernel: the last digits may differ."""
    DIFFERENT = "different"
    """Other mathematics: another precision, optimizer, model, or BatchNorm over micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTechnique:
    """One way to train the global batch: what is predicted, and measured if that was asked for."""

    technique: str
    results: SameResults
    """Compared with the baseline."""
    effect: str = ""
    """What it changes in the computation."""
    flag: str = ""
    """What asks `brimful estimate` or `brimful plan` for it."""
    settings: Settings
    variant: Mapping[str, str] = field(default_factory=dict)
    """Options of the model: "dtype", "lora", "quantize", as for `find_architecture`."""
    is_plan: bool = False
    """Whether brimful chose the settings."""
    predicted: Estimate | None = None
    """None where the step cannot be predicted."""
    predicted_exceedance_probability: Probability = 1.0
    """Probability that the peak exceeds the budget, or without one what the device has."""
    max_exceedance: Probability = 0.0
    """What plans permit of it."""
    measured: Measurement | None = None
    why_not: str = ""
    """Why it cannot be predicted, or could not be measured."""

    @property
    def fits(self) -> bool:
        """Whether the step exceeds the budget as rarely as a plan must."""
        return self.verdict is Verdict.FITS

    @property
    def verdict(self) -> Verdict | None:
        """Tight is what fits by its likely size and exceeds the budget too often for a plan."""
        if self.predicted is None:
            return None
        if self.predicted.verdict is Verdict.DOES_NOT_FIT:
            return Verdict.DOES_NOT_FIT
        is_safe = self.predicted_exceedance_probability <= self.max_exceedance
        return Verdict.FITS if is_safe else Verdict.TIGHT

    @property
    def predicted_samples_per_second(self) -> float | None:
        """Samples of the global batch per second of step time; None without a prediction."""
        return None if self.predicted is None else self.predicted.predicted_samples_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueComparison(PrintedResult):
    """Ways to train one global batch of a job on a device, in the order of guides; prints as a table."""

    job: str
    device: str
    global_batch_size: int
    capacity_bytes: int
    """Memory of the device, or the budget."""
    rows: tuple[ComparedTechnique, ...]
    """The baseline first, the plans last."""
    notes: tuple[str, ...] = ()

    @property
    def fastest(self) -> ComparedTechnique | None:
        """The fastest row that fits and computes what the baseline does; a plan, if it is as fast as any."""
        return _fastest(each for each in self.rows if each.results is not SameResults.DIFFERENT)

    @property
    def fastest_of_all(self) -> ComparedTechnique | None:
        """The fastest row that fits, whatever it computes, if that gains more than predictions err by."""
        same, best = self.fastest, _fastest(self.rows)
        if same is None or best is None or same.predicted is None or best.predicted is None:
            return best
        is_faster = best.predicted.predicted_step_seconds < (
            (1 - LEAST_GAIN) * same.predicted.predicted_step_seconds
        )
        return best if is_faster else same

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names."""
        document: dict[str, Any] = import_module("brimful.report").comparison_document(self)
        return document

    def to_markdown(self) -> str:
        """The rows as a table in Markdown."""
        return str(import_module("brimful.report").comparison_markdown(self))

    def plot(self, path: Path | str) -> None:
        """Draw memory and speed of each row; matplotlib writes the file.

        Args:
            path: The file, whose name says the format: .svg, .png or .pdf.

        Raises:
            UsageError: matplotlib is not installed, or does not know the format.
            SaveError: The file cannot be written.
        """
        import_module("brimful.report").plot_comparison(self, Path(path))


def _fastest(rows: Iterable[ComparedTechnique]) -> ComparedTechnique | None:
    fitting = ((each.predicted, each) for each in rows if each.predicted is not None and each.fits)
    best = min(
        fitting, key=lambda pair: (pair[0].predicted_step_seconds, not pair[1].is_plan), default=(None, None)
    )
    return best[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Technique:
    """A technique beside the baseline, or several together."""

    name: str
    effect: str = ""
    flag: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    action: Action | None = None
    """An action for every unit."""
    micro_batch_size: int | None = None
    capture: Capture | None = None
    """Captures steps of a changed job."""
    variant: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, change: Change, name: str = "") -> _Technique:
        return cls(
            name=name or change.name,
            effect=change.effect,
            flag=change.flag,
            settings=change.settings,
            capture=change.capture,
            variant=change.variant,
        )

    def __add__(self, other: _Technique) -> _Technique:
        return _Technique(
            name=f"{self.name.removeprefix(_ACCUMULATION)}, {other.name}",
            effect="; ".join(filter(None, (self.effect, other.effect))),
            flag=" ".join(filter(None, (self.flag, other.flag))),
            settings={**self.settings, **other.settings},
            action=other.action or self.action,
            micro_batch_size=other.micro_batch_size or self.micro_batch_size,
            capture=other.capture or self.capture,
            variant={**self.variant, **other.variant},
        )


def compare_techniques(
    capture: Capture, request: Request, job_changes: JobChanges, micro_batch_size: int | None = None
) -> TechniqueComparison:
    """Compare the baseline, techniques one by one, their usual combinations, and the plans.

    A step that cannot be predicted has the reason in its row. `micro_batch_size` is that of gradient
    accumulation; None takes a quarter of the batch, or what divides it next below.
    """
    if micro_batch_size is not None:
        request.baseline_settings().with_micro_batch_size(micro_batch_size)  # raises UsageError
    rows = _Rows(capture, request)
    singles = [*_same_mathematics(rows, micro_batch_size), *_by_name(request, rows.baseline)]
    changed = [_Technique.of(each) for each in job_changes(rows.baseline)]
    techniques = [*singles, *changed, *_combinations(singles, changed)]
    return TechniqueComparison(
        job=request.job.name,
        device=request.device.name,
        global_batch_size=request.global_batch_size,
        capacity_bytes=rows.capacity_bytes,
        rows=(rows.first, *map(rows.row, techniques), *rows.plans()),
    )


class _Rows:
    """Makes rows for one request."""

    def __init__(self, capture: Capture, request: Request) -> None:
        self.request, self._capture = request, capture
        self.settings = request.baseline_settings()
        report("training without a plan")
        self.baseline = per_rank_trace(capture(self.settings))
        predicted = self._estimate(self.baseline)
        self.first = self._row("baseline", self.settings, predicted, results=SameResults.IDENTICAL)

    @property
    def device(self) -> Device:
        """The device of the request."""
        return self.request.device

    @property
    def capacity_bytes(self) -> int:
        """What a step must fit: the budget, or without one what the device has."""
        limit_bytes = self.request.limit_bytes
        return self.request.budget_bytes if limit_bytes is None else limit_bytes

    def row(self, technique: _Technique) -> ComparedTechnique:
        """The row of a technique."""
        report(technique.name)
        capture, settings = technique.capture or self._capture, self.settings
        why_not, predicted = "", None
        try:
            settings = self._settings(technique, capture)
            # A single step makes the state of the optimizer before it, where backward would make it.
            steps = 2 if settings.optimizer_in_backward else 1
            predicted = self._estimate(per_rank_trace(capture(settings, steps)))
        except (CaptureError, BatchError, UsageError) as error:
            why_not = str(error)
        is_other_job = technique.capture is not None
        return self._row(
            technique.name,
            settings,
            predicted,
            results=SameResults.DIFFERENT if is_other_job else self.same_results(settings),
            effect=technique.effect,
            flag=technique.flag,
            variant=technique.variant,
            why_not=why_not,
        )

    def plans(self) -> Iterator[ComparedTechnique]:
        """The plan for the request, and the one in the usual half precision where that is a permission."""
        yield self._plan(self.request, "plan", "")
        for change in precision_changes(self.request):
            if change.settings["precision"] is not Precision.TF32:
                asked = replace(self.request.asked, precision=str(change.settings["precision"]))
                request = replace(self.request, asked=asked)
                yield self._plan(request, f"plan with {change.name}", change.flag, change.effect)

    def same_results(self, settings: Settings) -> SameResults:
        """How the results of settings compare with those of the baseline, as docs/howto/choose.md has it."""
        own = self.settings
        is_split = settings.gradient_accumulation_steps > own.gradient_accumulation_steps
        is_other = settings.precision is not own.precision or settings.optimizer != own.optimizer
        if is_other or (is_split and bool(self.baseline.batch_coupled_modules)):
            return SameResults.DIFFERENT
        is_rounded = is_split or settings.chunked_loss is not None or settings.offload_optimizer
        is_rounded |= settings.memory_format is not None
        is_rounded |= settings.optimizer_implementation is OptimizerImplementation.FUSED
        return SameResults.ROUNDING if is_rounded else SameResults.IDENTICAL

    def _settings(self, technique: _Technique, capture: Capture) -> Settings:
        settings = replace(self.settings, **technique.settings)
        if technique.micro_batch_size is not None:
            settings = settings.with_micro_batch_size(technique.micro_batch_size)
        if technique.action is None:
            return settings
        units = find_units(per_rank_trace(capture(settings)))
        if not units:
            raise UsageError("the model has no units, such as blocks, that can be recomputed or offloaded.")
        last = uniform_actions(units[-1:], _of_last_unit(technique.action))
        return replace(settings, units=(*uniform_actions(units[:-1], technique.action), *last))

    def _plan(self, request: Request, name: str, flag: str, effect: str = "") -> ComparedTechnique:
        settings, predicted, why_not = request.baseline_settings(), None, ""
        try:
            settings = search(self._capture, request).settings
            predicted = self._estimate(per_rank_trace(self._capture(settings)))
        except (InfeasibleError, CaptureError) as error:
            why_not = str(error)
        return self._row(
            name,
            settings,
            predicted,
            results=self.same_results(settings),
            effect=effect,
            flag=flag,
            is_plan=True,
            why_not=why_not,
        )

    def _row(
        self, technique: str, settings: Settings, predicted: Estimate | None, **given: Any
    ) -> ComparedTechnique:
        probability = 1.0 if predicted is None else exceedance_of(predicted, self.request)
        return ComparedTechnique(
            technique=technique,
            settings=settings,
            predicted=predicted,
            predicted_exceedance_probability=probability,
            max_exceedance=self.request.asked.max_exceedance,
            **given,
        )

    def _estimate(self, trace: Trace) -> Estimate:
        return estimate_trace(
            trace.with_last_step_again(),
            self.device,
            capacity_bytes=self.capacity_bytes,
            seeks_smallest_capacity=False,
        )


def _of_last_unit(action: Action) -> Action:
    """What the last unit does: what it saves is needed again before a copy could come and go."""
    return Action.KEEP if action is Action.OFFLOAD else action


def _same_mathematics(rows: _Rows, micro_batch_size: int | None) -> Iterator[_Technique]:
    """Techniques that compute what the baseline does, but for rounding."""
    request, baseline = rows.request, rows.baseline
    is_gpu = request.device.kind == "cuda"
    size = _part(request) if micro_batch_size is None else micro_batch_size
    if size < request.rank_batch_size and request.job.why_not_split is None:
        coupled = "BatchNorm has statistics of micro-batches" if baseline.batch_coupled_modules else ""
        steps = request.rank_batch_size // size
        yield _Technique(
            name=f"{_ACCUMULATION}{size} × {steps}",
            effect=coupled or "gradients are summed over micro-batches",
            flag=f"--micro-batch-size {size}",
            micro_batch_size=size,
        )
    if find_units(baseline):
        yield _Technique(
            name="checkpointing",
            effect="forwards are computed again in backward",
            flag="--recompute all",
            action=Action.RECOMPUTE,
        )
        if is_gpu:
            yield _Technique(
                name="activation offload", effect="saved tensors wait on the host", action=Action.OFFLOAD
            )
    layer = logits_layer(baseline)
    if layer is not None and not baseline.couples_samples:
        yield _Technique(
            name="chunked loss",
            effect="logits are computed in parts",
            settings={"chunked_loss": ChunkedLoss(layer=layer, chunks=LOSS_CHUNKS)},
        )
    if request.implementations.get(request.asked.optimizer) is not None:
        others = [OptimizerImplementation.FUSED, *([OptimizerImplementation.FOR_LOOP] if is_gpu else [])]
        for implementation in others:
            yield _Technique(
                name=f"{implementation} optimizer",
                effect="the update runs in other kernels",
                flag=f"--optimizer-implementation {implementation}",
                settings={"optimizer_implementation": implementation},
            )
    yield _Technique(
        name="update in backward",
        effect="parameters are updated as soon as their gradients are complete",
        flag="--optimizer-in-backward",
        settings={"optimizer_in_backward": True},
    )
    if is_gpu:
        yield _Technique(
            name="optimizer offload",
            effect="the update is computed on the host",
            flag="--offload-optimizer",
            settings={"offload_optimizer": True},
        )
        yield _Technique(
            name="expandable segments",
            effect="the allocator grows its segments",
            settings={"expandable_segments": True},
        )
    if baseline.convolves_images:
        yield _Technique(
            name="channels_last",
            effect="convolutions run in other kernels",
            flag="--memory-format channels_last",
            settings={"memory_format": MemoryFormat.CHANNELS_LAST},
        )


def _by_name(request: Request, baseline: Trace) -> Iterator[_Technique]:
    """Other precisions, and other optimizers in place of Adam."""
    for change in precision_changes(request):
        yield _Technique.of(change, str(change.settings["precision"]))
    for change in optimizer_changes(request, baseline, takes_all=True):
        yield _Technique.of(change, str(change.settings["optimizer"]))


def _part(request: Request) -> int:
    """The micro-batch of gradient accumulation: a quarter of the batch, or the next smaller that divides it."""
    most = max(request.rank_batch_size // USUAL_PART, 1)
    return next(size for size in range(most, 0, -1) if request.rank_batch_size % size == 0)


def _combinations(singles: Sequence[_Technique], changed: Sequence[_Technique]) -> Iterator[_Technique]:
    """Combinations in the order in which guides add them: each with what came before."""

    def named(*starts: str) -> _Technique | None:
        return next((each for start in starts for each in singles if each.name.startswith(start)), None)

    together = named(_ACCUMULATION)
    for added in (named("checkpointing"), named("bf16", "fp16")):
        if together is not None and added is not None:
            together += added
            yield together
        together = together or added
    if together is None:
        return
    for optimizer in filter(None, (named("adamw8bit"), named("adafactor"))):
        yield together + optimizer
    for last in (each for each in changed[-1:] if "lora" in each.variant):
        yield together + last
