"""Records in files: what is read back equals what was written, and damage is never more than an error."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.errors import FileFormatError
from brimful.planner import Alternative, JobSource, Plan, PlanStatus
from brimful.planner.plan import BudgetPoint
from brimful.results import (
    StepRecord,
    ValidationRecord,
    step_from_json,
    step_to_json,
    validation_from_json,
    validation_to_json,
)
from brimful.settings import (
    Action,
    ChunkedLoss,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    UnitAction,
    settings_from_json,
    settings_to_json,
)

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
    may_step = steps == 1 and ranks == 1 and precision is not Precision.FP16 and not on_host
    return Settings(
        micro_batch_size=draw(COUNTS),
        gradient_accumulation_steps=steps,
        precision=precision,
        optimizer=draw(st.none() | WORDS),
        optimizer_implementation=draw(st.none() | st.sampled_from(OptimizerImplementation)),
        units=draw(unit_actions()),
        chunked_loss=draw(st.none() | st.builds(ChunkedLoss, layer=WORDS, chunks=st.integers(2, 9))),
        expandable_segments=draw(st.booleans()),
        optimizer_in_backward=may_step and draw(st.booleans()),
        prefetch_inputs=draw(st.booleans()),
        offload_optimizer=on_host,
        world_size=ranks,
        parallelism=parallelism,
        num_nodes=nodes,
        reshard_after_forward=not is_fsdp or draw(st.booleans()),
        param_dtype="bfloat16" if is_fsdp and precision is Precision.BF16 and draw(st.booleans()) else None,
        offload_parameters=is_fsdp and not on_host and draw(st.booleans()),
    )


ALTERNATIVES = st.builds(
    Alternative,
    label=WORDS,
    settings=all_settings(),
    predicted_peak_reserved_bytes=SIZES,
    predicted_step_seconds=SECONDS,
    fits=st.booleans(),
)
PLANS = st.builds(
    Plan,
    status=st.just(PlanStatus.FEASIBLE),
    job=WORDS,
    device=WORDS,
    device_kind=st.sampled_from(["cuda", "cpu"]),
    budget_bytes=COUNTS,
    settings=all_settings(),
    predicted_peak_allocated_bytes=COUNTS,
    predicted_peak_reserved_bytes=COUNTS,
    predicted_peak_device_bytes=COUNTS,
    predicted_step_seconds=SECONDS,
    plain=ALTERNATIVES,
    alternatives=st.lists(ALTERNATIVES, max_size=1).map(tuple),
    peak_at=WORDS,
    budget_curve=st.lists(
        st.builds(BudgetPoint, budget_bytes=SIZES, predicted_step_seconds=SECONDS), max_size=2
    ).map(tuple),
    predicted_pinned_host_bytes=SIZES,
    predicted_host_state_bytes=SIZES,
    model_flops=st.none() | st.integers(0, 10**40),
    peak_flops_per_second=st.none() | SECONDS,
    notes=st.lists(WORDS, max_size=2).map(tuple),
    source=st.none()
    | st.builds(
        JobSource,
        name=st.text(min_size=1, max_size=9),
        options=st.dictionaries(
            WORDS, st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
        ),
    ),
)
LOSSES = st.floats()
STEPS = st.builds(
    StepRecord,
    step=COUNTS,
    epoch=COUNTS,
    loss=LOSSES,
    gradient_norm=LOSSES,
    seconds=SECONDS,
    samples=SIZES,
    updated=st.booleans(),
    data_seconds=SECONDS,
    memory_measured=st.booleans(),
    terms=LOSSES,
    mfu=st.none() | LOSSES,
    learning_rate=st.none() | LOSSES,
)
VALIDATIONS = st.builds(
    ValidationRecord,
    step=SIZES,
    epoch=SIZES,
    loss=LOSSES,
    metrics=st.dictionaries(WORDS, LOSSES, max_size=2),
    samples=SIZES,
    seconds=SECONDS,
)


def through_a_file(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@settings(max_examples=50, deadline=None)
@given(all_settings())
def test_settings_are_read_back_as_they_were_written(how: Settings) -> None:
    assert settings_from_json(through_a_file(settings_to_json(how))) == how


@settings(max_examples=25, deadline=None)
@given(PLANS)
def test_a_plan_is_read_back_as_it_was_written(plan: Plan) -> None:
    assert Plan.from_json(through_a_file(plan.to_json())) == plan


@given(STEPS)
def test_a_step_is_read_back_as_it_was_written(step: StepRecord) -> None:
    read = step_from_json(through_a_file(step_to_json(step)))
    for field in fields(step):
        before, after = getattr(step, field.name), getattr(read, field.name)
        assert before == after or (math.isnan(before) and math.isnan(after))


@given(VALIDATIONS)
def test_a_validation_is_read_back_as_it_was_written(validation: ValidationRecord) -> None:
    read = validation_from_json(through_a_file(validation_to_json(validation)))
    assert repr(read) == repr(validation)  # NaN is not equal to NaN


HOW = Settings(
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    units=(
        UnitAction(fqn="0", action=Action.SAVE, saved=("mm#0",)),
        UnitAction(fqn="[1..2]", action=Action.OFFLOAD, most_offloaded_bytes=7),
    ),
    chunked_loss=ChunkedLoss(layer="head", chunks=2),
)
PLAIN = Alternative(
    label="plain", settings=HOW, predicted_peak_reserved_bytes=2, predicted_step_seconds=1.0, fits=False
)
PLAN = Plan(
    status=PlanStatus.FEASIBLE,
    job="a",
    device="RTX 3090",
    device_kind="cuda",
    budget_bytes=2**30,
    settings=HOW,
    predicted_peak_allocated_bytes=1,
    predicted_peak_reserved_bytes=2,
    predicted_peak_device_bytes=3,
    predicted_step_seconds=0.5,
    plain=PLAIN,
    alternatives=(PLAIN,),
    budget_curve=(BudgetPoint(budget_bytes=1, predicted_step_seconds=1.5),),
    model_flops=10**12,
    peak_flops_per_second=1e12,
    notes=("a note",),
    source=JobSource(name="resnet50", options={"image_size": 64}),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_plan_with_any_value_replaced_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    document = through_a_file(PLAN.to_json())
    inside: Any = document
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inside[key], dict | list) or not inside[key] or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(JSON)
    refused = ""
    try:
        read = Plan.from_json(document)
        assert Plan.from_json(through_a_file(read.to_json())) == read
        assert str(read)
    except FileFormatError as error:
        refused = str(error)
    assert refused == "" or (refused.startswith("the plan") and "\n" not in refused)
