"""What each technique costs and saves: one row per technique, the usual combinations, and the plan last.

Start reading at `compare_techniques`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from brimful.devices import Device
from brimful.errors import BatchError, CaptureError, InfeasibleError, UsageError
from brimful.planner.coupling import what_splitting_changes
from brimful.planner.explain.changes import LEAST_GAIN, Change, JobChanges, optimizer_changes, precision_changes
from brimful.planner.explain.notes import MEAN_OVER_SAMPLES_NOTE, about_device_and_job
from brimful.planner.headroom import exceedance_of
from brimful.planner.plan import NOT_SURE
from brimful.planner.problem.logits import chunked_loss_of
from brimful.planner.request import Request
from brimful.planner.search import search
from brimful.planner.solutions import offloaded_units, uniform_actions
from brimful.prediction.estimate import Estimate, Verdict, estimate_trace
from brimful.prediction.estimator import Capture
from brimful.prediction.growth import growth_notes, keeps_memory
from brimful.prediction.odd_sizes import odd_size_notes
from brimful.prediction.untrained import untrained_notes
from brimful.results import Comparison, Measurement, Probability
from brimful.settings import (
    Action,
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
    """The same mathematics in another order or by another kernel: the last digits may differ. Dropout may draw
    other numbers of the same distribution."""
    DIFFERENT = "different"
    """Other mathematics: another precision, optimizer or model, or micro-batches of a batch whose samples
    BatchNorm or the loss couples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTechnique:
    """One way to train the global batch: what is predicted, and measured if that was asked for."""

    technique: str
    results: SameResults | None
    """Compared with the baseline; None without a prediction. A note says where a split was not checked."""
    effect: str = ""
    """What it changes in the computation."""
    flag: str = ""
    """What asks `brimful estimate` for it beside the job and the device; of a plan, `brimful plan`."""
    settings: Settings | None
    """None where a plan or the technique's settings do not exist."""
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

    @property
    def measured_samples_per_second(self) -> float | None:
        """As predicted, with the measured step time; None if the row was not measured."""
        if self.predicted is None or self.measured is None:
            return None
        slowdown = self.measured.measured_step_seconds / self.predicted.predicted_step_seconds
        return self.predicted.predicted_samples_per_second / slowdown

    @property
    def measured_peak_bytes(self) -> int | None:
        """On a GPU of the device, on a CPU of tensors; None if the row was not measured."""
        if self.measured is None:
            return None
        return self.measured.measured_peak_device_bytes or self.measured.measured_peak_allocated_bytes


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
            settings=change.settings,
            capture=change.capture,
            variant=change.variant,
        )

    def __add__(self, other: _Technique) -> _Technique:
        return _Technique(
            name=f"{self.name.removeprefix(_ACCUMULATION)}, {other.name}",
            effect="; ".join(filter(None, (self.effect, other.effect))),
            settings={**self.settings, **other.settings},
            action=other.action or self.action,
            micro_batch_size=other.micro_batch_size or self.micro_batch_size,
            capture=other.capture or self.capture,
            variant={**self.variant, **other.variant},
        )


SplitComparison = Callable[[Settings, Trace], Comparison | None]
"""Compares the loss of a batch with that of its micro-batches, given settings and the baseline's trace; None if
they are the same in any case."""


def compare_techniques(
    capture: Capture,
    request: Request,
    job_changes: JobChanges,
    compare_split: SplitComparison,
    micro_batch_size: int | None = None,
) -> TechniqueComparison:
    """Compare the baseline, techniques one by one, their usual combinations, and the plans.

    A step that cannot be predicted has the reason in its row. `micro_batch_size` is that of gradient
    accumulation; None takes a quarter of the batch, or what divides it next below. A size that accumulates
    nothing raises UsageError.
    """
    if micro_batch_size is not None:
        _check_part(request, micro_batch_size)
    rows = _Rows(capture, request, compare_split)
    singles = [*_same_mathematics(rows, micro_batch_size), *_by_name(request, rows.baseline)]
    changed = [_Technique.of(each) for each in job_changes(rows.baseline) if each.variant]
    techniques = [*singles, *changed, *_combinations(singles, changed)]
    made = (rows.first, *map(rows.row, techniques), *rows.plans())
    return TechniqueComparison(
        job=request.job.name,
        device=request.device.name,
        global_batch_size=request.global_batch_size,
        capacity_bytes=rows.capacity_bytes,
        rows=made,
        notes=tuple(rows.notes(made)),
    )


def _check_part(request: Request, micro_batch_size: int) -> None:
    """Check that a micro-batch is a part of the batch, which may be split; UsageError if not."""
    whole, why_not = request.rank_batch_size, request.job.why_not_split
    if why_not is not None:
        raise UsageError(f"Micro-batches of {micro_batch_size} of {whole} samples cannot be formed: {why_not}")
    if micro_batch_size == whole:
        raise UsageError(
            f"micro_batch_size is {micro_batch_size}, the whole batch, which is every row but those with "
            "gradient accumulation. Give a smaller one, or none for a quarter of the batch."
        )
    request.baseline_settings().with_micro_batch_size(micro_batch_size)  # raises UsageError


class _Rows:
    """Makes rows for one request."""

    def __init__(self, capture: Capture, request: Request, compare_split: SplitComparison) -> None:
        self.request, self._capture, self._compare_split = request, capture, compare_split
        self._splits: dict[int, Comparison | None] = {}
        """The comparison of each micro-batch size."""
        self._odd_sizes: tuple[str, ...] = ()
        """Notes of the first row with odd sizes."""
        self.settings = request.baseline_settings()
        report("training without a plan")
        self.baseline = per_rank_trace(capture(self.settings))
        self.first = self._row("baseline", self.settings, self._estimate("baseline", self.baseline))

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
        capture, settings = technique.capture or self._capture, None
        why_not, predicted = "", None
        try:
            settings = self._settings(technique, capture)
            # A single step makes the state of the optimizer before it, where backward would make it.
            # Other temporaries than the job's make the state of another optimizer, too.
            steps = 2 if settings.optimizer_in_backward or settings.optimizer != self.settings.optimizer else 1
            predicted = self._estimate(technique.name, per_rank_trace(capture(settings, steps)))
        except (CaptureError, BatchError, UsageError) as error:
            why_not = str(error)
        return self._row(
            technique.name,
            settings,
            predicted,
            effect=technique.effect,
            is_other_job=technique.capture is not None,
            variant=technique.variant,
            why_not=why_not,
        )

    def plans(self) -> Iterator[ComparedTechnique]:
        """The plan for the request, and the one in the usual half precision where that is a permission."""
        yield self._plan(self.request, "plan")
        for change in precision_changes(self.request):
            if change.settings["precision"] is not Precision.TF32:
                asked = replace(self.request.asked, precision=str(change.settings["precision"]))
                request = replace(self.request, asked=asked)
                yield self._plan(request, f"plan with {change.name}", change.effect)

    def notes(self, rows: Sequence[ComparedTechnique]) -> Iterator[str]:
        """What applies to the comparison; a note that holds of many rows appears once."""
        yield from about_device_and_job(self.settings, self.baseline, self.request)
        whys = dict.fromkeys(each.why_not_compared for each in self._splits.values() if each is not None)
        reasons = list(filter(None, whys))
        for reason in reasons:
            yield f"Whether splitting the batch changes the results was not checked: {reason}."
        if reasons and not self.request.job.weighs_by_count:
            yield MEAN_OVER_SAMPLES_NOTE
        yield from untrained_notes(self.baseline)
        yield from self._odd_sizes
        if keeps_memory(self.baseline):
            growth = growth_notes(per_rank_trace(self._capture(self.settings, 2)))
            yield from (f"{NOT_SURE}{each}." for each in growth)
        yield from _uncertain(rows)

    def same_results(self, settings: Settings) -> SameResults:
        """How the results of settings compare with those of the baseline, as docs/howto/choose.md has it."""
        own = self.settings
        is_other = settings.precision is not own.precision or settings.optimizer != own.optimizer
        if is_other or any(self._what_splitting_changes(settings)):
            return SameResults.DIFFERENT
        is_rounded = settings.gradient_accumulation_steps > 1 or settings.chunked_loss is not None
        is_rounded |= settings.offload_optimizer or settings.memory_format is not None
        is_rounded |= settings.optimizer_implementation is not own.optimizer_implementation
        return SameResults.ROUNDING if is_rounded else SameResults.IDENTICAL

    def _what_splitting_changes(self, settings: Settings) -> Iterator[str]:
        """Other mathematics because the batch is split, as clauses."""
        if settings.gradient_accumulation_steps == 1:
            return
        baseline = self.baseline
        yield from what_splitting_changes(baseline.batch_norm_modules, baseline.stateful_modules, settings)
        found = self._split(settings)
        if found is not None and not found.holds:
            yield f"the loss of the batch is not made of those of its parts: {found.evidence or found.where}"

    def _split(self, settings: Settings) -> Comparison | None:
        size = settings.micro_batch_size
        if size not in self._splits:
            self._splits[size] = self._compare_split(settings, self.baseline)
        return self._splits[size]

    def _also_changes(self, settings: Settings) -> Iterator[str]:
        """Changes that leave the mathematics as they are: second forwards, other random numbers; as clauses."""
        is_split = settings.gradient_accumulation_steps > 1
        if is_split and self.baseline.couples_samples:
            yield "forwards run twice, as the loss is that of all samples together"
        if any(op.random for op in self.baseline.ops) and (is_split or settings.memory_format is not None):
            yield f"dropout {'draws' if is_split else 'may draw'} other numbers"

    def _settings(self, technique: _Technique, capture: Capture) -> Settings:
        settings = replace(self.settings, **technique.settings)
        if technique.micro_batch_size is not None:
            settings = settings.with_micro_batch_size(technique.micro_batch_size)
        if technique.action is None:
            return settings
        units = find_units(per_rank_trace(capture(settings)))
        if not units:
            raise UsageError("the model has no units, such as blocks, that can be recomputed or offloaded.")
        is_offload = technique.action is Action.OFFLOAD
        return replace(
            settings, units=offloaded_units(units) if is_offload else uniform_actions(units, technique.action)
        )

    def _plan(self, request: Request, name: str, effect: str = "") -> ComparedTechnique:
        settings, predicted, why_not = None, None, ""
        try:
            settings = search(self._capture, request).settings
            effect = "; ".join(filter(None, (settings.describe(), effect)))
            split = None if settings.gradient_accumulation_steps == 1 else self._split(settings)
            if split is None or split.holds:
                predicted = self._estimate(name, per_rank_trace(self._capture(settings)))
            else:
                why_not = (
                    f"the plan would split the batch: {'; '.join(self._what_splitting_changes(settings))}. "
                    "Job(count=…), Job(reduction=…) and Job(embed=…) say what the loss is."
                )
        except (InfeasibleError, CaptureError) as error:
            why_not = str(error)
        return self._row(
            name,
            settings,
            predicted,
            effect=effect,
            flag=_flag_of_plan(request),
            is_plan=True,
            why_not=why_not,
        )

    def _row(
        self,
        technique: str,
        settings: Settings | None,
        predicted: Estimate | None,
        *,
        effect: str = "",
        is_other_job: bool = False,
        flag: str | None = None,
        variant: Mapping[str, str] | None = None,
        **given: Any,
    ) -> ComparedTechnique:
        results, effects = None, [effect]
        if settings is not None and predicted is not None:
            results = SameResults.DIFFERENT if is_other_job else self.same_results(settings)
            effects += [*self._what_splitting_changes(settings), *self._also_changes(settings)]
        variant = variant or {}
        if flag is None:
            flag = "" if settings is None else _flag_of(settings, variant)
        return ComparedTechnique(
            technique=technique,
            results=results,
            effect="; ".join(filter(None, effects)),
            flag=flag,
            settings=settings,
            variant=variant,
            predicted=predicted,
            predicted_exceedance_probability=(
                1.0 if predicted is None else exceedance_of(predicted, self.request)
            ),
            max_exceedance=self.request.asked.max_exceedance,
            **given,
        )

    def _estimate(self, technique: str, trace: Trace) -> Estimate:
        found = estimate_trace(
            trace.with_last_step_again(),
            self.device,
            capacity_bytes=self.capacity_bytes,
            seeks_smallest_capacity=False,
        )
        if not self._odd_sizes:
            notes = odd_size_notes(trace, self.device, found.step_time)
            self._odd_sizes = tuple(f"{technique}: {note}" for note in notes)
        return found


def _uncertain(rows: Sequence[ComparedTechnique]) -> Iterator[str]:
    """What is uncertain about predictions, with the first row that it is about if not the baseline."""
    known: set[str] = set()
    for row in rows:
        items = [each for each in (row.predicted.uncertain if row.predicted else ()) if each not in known]
        known.update(items)
        where = "" if row is rows[0] else f" ({row.technique})"
        yield from (f"{NOT_SURE}{each}{where}." for each in items)


def _flag_of(settings: Settings, variant: Mapping[str, str]) -> str:
    """What asks `brimful estimate` for settings of a technique, and for a changed model."""
    actions = {each.action for each in settings.units}
    given = {
        "--micro-batch-size": settings.micro_batch_size,
        "--gradient-accumulation-steps": _unless(settings.gradient_accumulation_steps, 1),
        "--recompute": "all" if Action.RECOMPUTE in actions else None,
        "--precision": _unless(settings.precision, Precision.FP32),
        "--optimizer": settings.optimizer,
        "--optimizer-implementation": settings.optimizer_implementation,
        "--memory-format": settings.memory_format,
        "--allocator": "expandable_segments:True" if settings.expandable_segments else None,
        **{f"--{option}": value for option, value in variant.items()},
    }
    switches = {
        "--chunked-loss": settings.chunked_loss is not None,
        "--offload-activations": Action.OFFLOAD in actions,
        "--optimizer-in-backward": settings.optimizer_in_backward,
        "--offload-optimizer": settings.offload_optimizer,
    }
    return _joined(given, [switch for switch, is_on in switches.items() if is_on])


def _flag_of_plan(request: Request) -> str:
    """What asks `brimful plan` for the plan of a request."""
    asked = request.asked
    return _joined(
        {
            "--global-batch-size": request.global_batch_size,
            "--budget": asked.budget,
            "--precision": _unless(asked.precision, str(Precision.FP32)),
            "--optimizer": asked.optimizer,
        }
    )


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value


def _joined(given: Mapping[str, Any], switches: Sequence[str] = ()) -> str:
    """Options with their values, where they have one, as a shell reads them."""
    pairs = ((option, str(value)) for option, value in given.items() if value is not None)
    return shlex.join([*(word for pair in pairs for word in pair), *switches])


def _same_mathematics(rows: _Rows, micro_batch_size: int | None) -> Iterator[_Technique]:
    """Techniques that compute what the baseline does, but for rounding."""
    request, baseline = rows.request, rows.baseline
    is_gpu = request.device.kind == "cuda"
    size = _part(request) if micro_batch_size is None else micro_batch_size
    if size < request.rank_batch_size and request.job.why_not_split is None:
        steps = request.rank_batch_size // size
        yield _Technique(
            name=f"{_ACCUMULATION}{size} × {steps}",
            effect="gradients are summed over micro-batches",
            micro_batch_size=size,
        )
    units = find_units(baseline)
    if units:
        yield _Technique(
            name="checkpointing",
            effect="forwards are computed again in backward",
            action=Action.RECOMPUTE,
        )
    if is_gpu and len(units) > 1:
        yield _Technique(
            name="activation offload", effect="saved tensors wait on the host", action=Action.OFFLOAD
        )
    chunked_loss = chunked_loss_of(baseline)
    if chunked_loss is not None:
        yield _Technique(
            name="chunked loss",
            effect="logits are computed in parts",
            settings={"chunked_loss": chunked_loss},
        )
    if request.implementations.get(request.asked.optimizer) is not None:
        others = [OptimizerImplementation.FUSED, *([OptimizerImplementation.FOR_LOOP] if is_gpu else [])]
        for implementation in others:
            yield _Technique(
                name=f"{implementation} optimizer",
                effect="the update runs in other kernels",
                settings={"optimizer_implementation": implementation},
            )
    yield _Technique(
        name="update in backward",
        effect="parameters are updated as soon as their gradients are complete",
        settings={"optimizer_in_backward": True},
    )
    if is_gpu:
        yield _Technique(
            name="optimizer offload",
            effect="the update is computed on the host",
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
