"""`--largest SIZE` of `brimful estimate` and `brimful plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from brimful.cli.output import refuse
from brimful.cli.sources import job_of, missing_batch

if TYPE_CHECKING:
    from brimful.planner import JobSource, LargestEstimate, LargestPlan

_BARE = "batch"


def with_size_after_largest(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, where `--largest` without a size asks for the largest batch.

    Typer has no options whose value is optional.
    """
    completed: list[str] = []
    for argument, following in pairwise([*arguments, "--"]):
        completed.append(argument)
        if argument == "--largest" and following.startswith("-"):
            completed.append(_BARE)
    return completed


def largest_estimate(
    source: JobSource, what: str, device: str, micro_batch_size: int | None, asked: dict[str, Any]
) -> LargestEstimate:
    """The largest size of a model with which a step fits."""
    from brimful import api
    from brimful.models import dimension

    if what == "batch":
        refuse({"--micro-batch-size": micro_batch_size}, "--largest batch finds the micro-batch")
        return api.largest_micro_batch(job_of(source), device, **asked)
    size = dimension(source.name, what, source.options)
    return api.largest(
        lambda value: job_of(_sized(source, size.option, value)),
        device,
        option=size.option,
        step=size.step,
        start=size.start,
        most=size.most,
        micro_batch_size=micro_batch_size,
        **asked,
    )


def largest_plan(
    source: JobSource, what: str, device: str, global_batch_size: int | None, asked: dict[str, Any]
) -> LargestPlan:
    """The largest size of a model with which a plan exists; the plan names the model of that size."""
    from brimful import api
    from brimful.models import dimension

    if what == "batch":
        refuse(
            {"--global-batch-size": global_batch_size}, "--largest batch finds the batch, in one micro-batch"
        )
        found = api.largest_plan(lambda _: job_of(source), device, option="micro_batch_size", **asked)
        return replace(found, plan=replace(found.plan, source=source))
    if global_batch_size is None:
        raise missing_batch(source, "plan", "--largest", what)
    size = dimension(source.name, what, source.options)
    found = api.largest_plan(
        lambda value: job_of(_sized(source, size.option, value)),
        device,
        global_batch_size=global_batch_size,
        option=size.option,
        step=size.step,
        start=size.start,
        most=size.most,
        **asked,
    )
    return replace(found, plan=replace(found.plan, source=_sized(source, size.option, found.size.value)))


def _sized(source: JobSource, option: str, value: int) -> JobSource:
    return replace(source, options={**source.options, option: value})
