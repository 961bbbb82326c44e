"""The arguments of a command → its job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.cli.options import ModelOptions
from brimful.codec import parse_json
from brimful.errors import FileFormatError, UsageError
from brimful.options import VARIANT_OPTIONS

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planner import JobSource, Plan


def find_job(model: str, options: ModelOptions) -> Job:
    """The job that `model` names, with the model's own options."""
    source = find_source(model, options)
    assert source is not None
    return job_of(source)


def job_of(source: JobSource) -> Job:
    """The job of a source."""
    from brimful.models import resolve_job

    return resolve_job(source.name, **source.options)


def missing_batch(source: JobSource, command: str, *asked: str) -> UsageError:
    """The error of a command that lacks --global-batch-size. For a model that is not known, its error."""
    job_of(source)
    example = shlex.join(["brimful", command, source.name, *asked, "--global-batch-size", "32"])
    return UsageError(f"say --global-batch-size, the samples in an optimizer step. For example: {example}")


def may_be_plan_of(plan: Plan, job: Job) -> bool:
    """Whether a plan has a job's name, or that of jobs without one, which only the command line names."""
    from brimful.job import DEFAULT_NAME
    from brimful.models import architecture_names

    return plan.job == job.name or (plan.job == DEFAULT_NAME and job.name not in architecture_names())


def built_in_source(file: Path, plan: Plan, asked: Sequence[str]) -> JobSource:
    """The built-in architecture that the plan in a file was made for.

    A plan is data: any other model that it names is neither imported nor run, unless the command line names it
    too.

    Raises `UsageError` if the plan names no built-in architecture. The message has the command that checks the
    plan, with `asked`, the further arguments of this command.
    """
    from brimful.models import architecture_names

    source = plan.source
    if source is not None and source.name in architecture_names():
        return source
    rest = shlex.join(["--check", str(file), *asked])
    if source is None:
        raise UsageError(f"{file} does not name its model. Name it: brimful plan MODEL {rest}")
    options = [f"--set={name}={_text(value)}" for name, value in source.options.items()]
    model = shlex.join([source.name, *options])
    if source.name.startswith("-") or len(model) > _LONGEST_MODEL or not model.isprintable():
        model = "MODEL"
    raise UsageError(
        f"{file} names a model that is not built in, {_shortened(source.name)!r}, and a plan's file does not "
        f"decide which code runs. If you trust that code: brimful plan {model} {rest}"
    )


_LONGEST_MODEL = 1000
"""Characters of a command that is shown. A choice."""
_LONGEST_NAME = 100
"""Characters of a model's name that is shown. A choice."""


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _text(value: bool | int | float | str) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def find_source(model: str | None, options: ModelOptions) -> JobSource | None:
    """The source of the job that the command names; None if it names none."""
    from brimful.planner import JobSource

    given: dict[str, Any] = {}
    if options.seq_len is not None:
        given["sequence_length"] = options.seq_len
    if options.image_size is not None:
        given["image_size"] = options.image_size
    for variant in VARIANT_OPTIONS:
        if getattr(options, variant) is not None:
            given[variant] = getattr(options, variant)
    for option in options.options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {option!r} is not of the form name=value.")
        given[name] = _value(value)
    if model is None:
        if given:
            raise UsageError(f"{', '.join(given)} is an option of a model, and no model is named.")
        return None
    return JobSource(name=model, options=given)


def _value(text: str) -> int | float | bool | str:
    """A number or truth value if `text` is one."""
    try:
        value = parse_json(text, where=text)
    except FileFormatError:
        return text
    return value if isinstance(value, int | float | bool) else text
