"""From what a command names to the job that is meant."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from brimful.cli.options import ModelOptions
from brimful.errors import UsageError

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planning import JobSource


def find_job(model: str, options: ModelOptions) -> Job:
    """The job that is meant, with the model's own options."""
    source = find_source(model, options)
    assert source is not None
    return job_of(source)


def job_of(source: JobSource) -> Job:
    """The job of a source."""
    from brimful.architectures import resolve_job

    return resolve_job(source.name, **dict(source.options))


def find_source(model: str | None, options: ModelOptions) -> JobSource | None:
    """What is named to be trained; None if nothing is."""
    from brimful.planning import JobSource

    given: dict[str, Any] = {}
    if options.seq_len is not None:
        given["sequence_length"] = options.seq_len
    if options.image_size is not None:
        given["image_size"] = options.image_size
    for option in options.options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {option!r} is not of the form name=value.")
        given[name] = _value(value)
    if model is None:
        if given:
            raise UsageError(f"{', '.join(given)} is an option of a model, and no model is named.")
        return None
    return JobSource(name=model, options=tuple(given.items()))


def _value(text: str) -> int | float | bool | str:
    """A number or truth value if `text` is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text
