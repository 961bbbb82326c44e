"""Records in files: what is read back equals what was written; test_files_fuzz.py has damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import Meta

import brimful
import brimful.report.documents  # declares the form of what is only written
from brimful.codec import UnboundedFloat, UnboundedNonNegativeFloat, from_json_document, to_json_document
from brimful.devices import Dispatch, RateCurve
from brimful.memory import AllocatorSettings, AllocatorWhatIf, FailedAllocation, HeldStorage, ModuleShare
from brimful.options import PlanOptions
from brimful.planner import Alternative, GpuFit, JobSource, Plan, PlanCheck
from brimful.planner.plan import BudgetPoint
from brimful.prediction import Estimate, GenerationEstimate
from brimful.prediction.estimate import PhasePeak
from brimful.prediction.generation import GenerationPeak
from brimful.profiling.calibrate import Calibration
from brimful.profiling.cuda_context import KeptContext
from brimful.recipes.pretrained import RecipeRun
from brimful.results import (
    Comparison,
    DataLoading,
    EpochRecord,
    EquivalenceReport,
    OpTemporary,
    Recovery,
    StepRecord,
    TrainingResult,
    ValidationRecord,
    WholeRun,
)
from brimful.results.sample_size import SampleSize
from brimful.results.self_correction import JobCalibration, SelfCorrection
from brimful.results.suggestion import Suggestion
from brimful.settings import (
    Action,
    ChunkedLoss,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    UnitAction,
)
from brimful.trace import Correction
from brimful.trainer.resume import Fallback
from brimful.trainer.storage.checkpoint import RunFile

COUNTS = st.integers(1, 2**62)
SIZES = st.integers(0, 2**62)
SECONDS = st.floats(0, exclude_min=True, allow_infinity=False)
WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def unit_actions(draw: st.DrawFn) -> tuple[UnitAction, ...]:
    units: list[UnitAction] = []
    for number in range(draw(st.integers(0, 4))):
        is_linked = bool(units) and units[-1].action in (Action.RECOMPUTE, Action.NEST)
        action = draw(st.sampled_from([each for each in Action if is_linked or each is not Action.NEST]))
        ops = st.lists(st.sampled_from(["mm#0", "addmm#2", "attention#1"]), min_size=1, max_size=2)
        units.append(
            UnitAction(
                fqn=draw(st.sampled_from([f"blocks.{number}", f"[{number}..9]"])),
                action=action,
                saved=tuple(draw(ops)) if action is Action.SAVE else (),
                most_offloaded_bytes=draw(st.none() | COUNTS) if action is Action.OFFLOAD else None,
            )
        )
    return tuple(units)


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    precision, parallelism = draw(st.sampled_from(Precision)), draw(st.sampled_from(Parallelism))
    nodes = draw(st.integers(1, 3))
    ranks = nodes * draw(st.integers(1, 3))
    steps = draw(COUNTS)
    is_fsdp = parallelism is Parallelism.FSDP2
    on_host = draw(st.booleans()) and not (parallelism.is_zero and ranks > 1)
    units = draw(unit_actions())
    may_compile = ranks == 1 and not any(unit.action is Action.OFFLOAD for unit in units)
    may_step = steps == 1 and ranks == 1 and precision is not Precision.FP16 and not on_host
    return Settings(
        micro_batch_size=draw(COUNTS),
        gradient_accumulation_steps=steps,
        precision=precision,
        optimizer=draw(st.none() | WORDS),
        optimizer_implementation=draw(st.none() | st.sampled_from(OptimizerImplementation)),
        units=units,
        compile=Compile.UNITS if may_compile and draw(st.booleans()) else Compile.NONE,
        chunked_loss=draw(st.none() | st.builds(ChunkedLoss, layer=WORDS, chunks=st.integers(2, 9))),
        expandable_segments=draw(st.booleans()),
        optimizer_in_backward=may_step and draw(st.booleans()),
        prefetch_inputs=draw(st.booleans()),
        own_checkpointing=draw(st.booleans()),
        memory_format=draw(st.none() | st.sampled_from(MemoryFormat)),
        offload_optimizer=on_host,
        world_size=ranks,
        parallelism=parallelism,
        num_nodes=nodes,
        reshard_after_forward=not is_fsdp or draw(st.booleans()),
        param_dtype="bfloat16" if is_fsdp and precision is Precision.BF16 and draw(st.booleans()) else None,
        offload_parameters=is_fsdp and not on_host and draw(st.booleans()),
    )


@st.composite
def curves(draw: st.DrawFn) -> RateCurve:
    numbers = st.floats(0, 1e30, exclude_min=True)
    amounts = sorted(draw(st.sets(numbers, min_size=1, max_size=3)))
    seconds = sorted(draw(st.lists(numbers, min_size=len(amounts), max_size=len(amounts))))
    return RateCurve(kind=draw(WORDS), points=tuple(zip(amounts, seconds, strict=True)))


@st.composite
def contexts(draw: st.DrawFn) -> KeptContext:
    low, middle, high = sorted(draw(st.tuples(COUNTS, COUNTS, COUNTS)))
    seconds = draw(SECONDS)
    names = {name: draw(WORDS) for name in ("gpu_name", "device_name", "driver_version", "torch_version")}
    return KeptContext(
        **names, measured_at_seconds=seconds, context_bytes=middle, low_bytes=low, high_bytes=high
    )


SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    Settings: all_settings(),
    RateCurve: curves(),
    KeptContext: contexts(),
    AllocatorSettings: st.just(AllocatorSettings()),
    Path: WORDS.map(Path),
    Any: JSON,
    UnboundedFloat: st.floats(),
    UnboundedNonNegativeFloat: st.floats(0),
    float: st.floats(1e-9, 1e30),
    int: COUNTS,
    str: WORDS,
}
"""Types whose values obey rules that annotations do not state, and numbers, of which some may be infinite."""
LARGEST = {"model_flops": 10**40}
"""By field: a range that the record checks itself."""


@cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """What an annotation permits, at its limits too."""
    if hint in SPECIAL:
        return SPECIAL[hint]
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        limits = next(each for each in arguments if isinstance(each, Meta))
        return bounded(arguments[0], limits)
    if kind in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if kind is Literal:
        return st.sampled_from(arguments)
    if kind is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if kind is tuple:
        return st.tuples(*map(values_of, arguments))
    if kind in (dict, Mapping):
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    return records(kind) if is_dataclass(kind) else st.from_type(kind)


def bounded(kind: Any, limits: Meta) -> st.SearchStrategy[Any]:
    """Values of a type within the limits of its annotation."""
    if kind is int:
        return st.integers(limits.ge, limits.le)
    if kind is float:
        least = limits.gt if limits.ge is None else limits.ge
        return st.floats(least, limits.le, exclude_min=limits.gt is not None, allow_infinity=False)
    if kind is str and limits.pattern is not None:
        return st.from_regex(limits.pattern.replace(r"\d", "[0-9]"), fullmatch=True)
    if kind is str:
        return st.text(min_size=limits.min_length or 0, max_size=9)
    return st.lists(values_of(get_args(kind)[0]), min_size=limits.min_length or 0, max_size=2).map(tuple)


def records(record: type) -> st.SearchStrategy[Any]:
    """Records of a type, each field of what its annotation permits."""
    hints = get_type_hints(record, include_extras=True)
    given = {
        each.name: st.none() | st.integers(0, LARGEST[each.name])
        if each.name in LARGEST
        else values_of(hints[each.name])
        for each in fields(record)
    }
    return st.builds(record, **given)


WRITTEN_AND_READ = (
    *(Plan, Alternative, BudgetPoint, JobSource, PlanOptions, SampleSize, Settings, UnitAction, ChunkedLoss),
    *(TrainingResult, StepRecord, EpochRecord, ValidationRecord, Recovery, DataLoading, OpTemporary),
    *(SelfCorrection, JobCalibration, Suggestion),
    *(EquivalenceReport, Comparison, RunFile, Fallback, RecipeRun),
    *(Calibration, Dispatch, RateCurve, KeptContext),
)
WRITTEN_ALONE = (
    *(Estimate, PhasePeak, HeldStorage, ModuleShare, FailedAllocation, AllocatorWhatIf, Correction),
    *(GpuFit, PlanCheck, WholeRun, GenerationEstimate, GenerationPeak),
)
"""Printed for users and programs; brimful reads none of them."""


def test_every_record_that_goes_through_the_codec_is_listed() -> None:
    roots = set()
    for path in Path(brimful.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        roots |= set(re.findall(r"(?:from_json_document|decode_json)\([^()]+?, (\w+), where", text))
    named = {"cls": (Plan, TrainingResult, EquivalenceReport), "record": (Calibration, KeptContext)}
    listed = {record.__name__ for record in WRITTEN_AND_READ}
    not_written_by_it = {"_Reading", "_ScalerState", "Manifest"}
    assert roots - named.keys() <= listed | not_written_by_it
    assert {each for record in WRITTEN_AND_READ for each in inside(record)} <= set(WRITTEN_AND_READ)
    assert not set(WRITTEN_AND_READ) & set(WRITTEN_ALONE)


def inside(hint: Any) -> Iterator[Any]:
    """The records that a type names, itself included."""
    if is_dataclass(hint):
        yield hint
        for each in get_type_hints(hint, include_extras=True).values():
            yield from inside(each)
    for each in get_args(hint):
        yield from inside(each)


def through_a_file(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


QUICK = settings(
    max_examples=20, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("record", [each for each in WRITTEN_AND_READ if each not in (UnitAction, ChunkedLoss)])
def test_a_record_is_read_back_as_it_was_written(record: type[Any]) -> None:
    @QUICK
    @given(values_of(record))
    def check(written: Any) -> None:
        read = from_json_document(through_a_file(to_json_document(written)), record, where="f.json")
        assert type(read) is record
        assert repr(asdict(read)) == repr(asdict(written))  # NaN is not equal to NaN

    check()


@QUICK
@given(values_of(Plan))
def test_a_plan_is_read_back_as_it_was_written(plan: Plan) -> None:
    assert Plan.from_json(through_a_file(plan.to_json())) == plan


@pytest.mark.parametrize("record", WRITTEN_ALONE)
def test_a_record_that_is_only_written_is_valid_json(record: type[Any]) -> None:
    @QUICK
    @given(values_of(record))
    def check(written: Any) -> None:
        assert through_a_file(to_json_document(written))

    check()
