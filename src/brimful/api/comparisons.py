"""Compare techniques for a job: what each costs and saves, predicted and, if asked for, measured here."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any

from brimful.api.job_changes import JobChanges
from brimful.api.runs import measure as measure_job
from brimful.arguments import checks_arguments
from brimful.capture.cache import CachedCapture
from brimful.codec import PositiveInt
from brimful.devices import Device
from brimful.errors import BrimfulError, UsageError
from brimful.execution.longest_batch import with_longest_batch
from brimful.execution.random_state import undisturbed
from brimful.execution.setup import is_of_this_machine
from brimful.job import Job
from brimful.models.variants import with_variant
from brimful.options import VARIANT_OPTIONS, PlanOptions, PrecisionLike, parse_precision
from brimful.planner import ComparedTechnique, TechniqueComparison, compare_techniques
from brimful.profiling import compare_planned_split
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.requests import request_of, with_budget
from brimful.results import Measurement
from brimful.settings import Settings
from brimful.utils.status import busy, report

_GUARD = (
    "Each row runs in a process of its own, which first imports the script: call compare under "
    "if __name__ == '__main__'."
)


@undisturbed()
@busy("comparing")
@checks_arguments
def compare(
    job: Job,
    device: DeviceLike = "auto",
    *,
    global_batch_size: PositiveInt,
    budget: str | float | None = None,
    precision: PrecisionLike = "fp32",
    optimizer: str | None = None,
    micro_batch_size: PositiveInt | None = None,
    measure: bool = False,
) -> TechniqueComparison:
    """Compare what techniques for training in less memory or time cost and save.

    Args:
        job: The job to train.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, a description
            ("name=…,memory=8GiB,bandwidth=300GB,tflops=9"), or a `Device`.
        global_batch_size: Samples per optimizer step.
        budget: Size that a step must fit, such as "11GiB", or bytes. Default: device capacity.
        precision: Precision of the baseline.
        optimizer: Name of an optimizer that replaces the job's own in the baseline.
        micro_batch_size: Samples in each micro-batch of gradient accumulation, fewer than the batch has.
            Default: a quarter of the batch.
        measure: Also run each row that fits on this machine, each in a process of its own. The job is pickled
            for that. A job's own `loop` is not used, as in plans; a note says so.

    Returns:
        One row per technique and usual combination, in the order of guides: peak, speed, and whether the
        results are those of the baseline. The plans are the last rows.

    Raises:
        UsageError: An argument is invalid, the job cannot be pickled, or a script that measures calls this
            outside of `if __name__ == "__main__"`.
        CaptureError: The baseline cannot be run on fake tensors.
    """
    if measure:
        check_is_here(device)
        _check_is_no_import()
        make_job = _pickled(job)
    target = resolve_device(device)
    longest = with_longest_batch(job, global_batch_size)
    job = longest.job
    asked = PlanOptions.of(
        {"precision": parse_precision(precision), "optimizer": optimizer, "budget": budget},
    )
    request = request_of(
        job,
        target,
        asked,
        global_batch_size=global_batch_size,
        world_size=1,
        num_nodes=1,
        is_here=is_of_this_machine(device),
    )
    target.check_precision(parse_precision(precision))
    with CachedCapture(job, target) as capture:
        request = with_budget(request, capture)
        changes, compare_split = JobChanges(job, target, capture), partial(compare_planned_split, job)
        found = compare_techniques(capture, request, changes, compare_split, micro_batch_size)
    found = replace(found, notes=(*longest.notes, *found.notes))
    return measured_comparison(found, make_job, device) if measure else found


def check_is_here(device: DeviceLike) -> None:
    """Check that a device is of this machine, so that steps can be measured on it; UsageError if not."""
    if not is_of_this_machine(device):
        given = (
            f"a Device record, of {device.name}" if isinstance(device, Device) else f"the name {str(device)!r}"
        )
        raise UsageError(
            "measure=True runs steps on this machine, whose devices are named as in torch, and this is "
            f"{given}: it does not say which device to run on, if any. Compare for 'cpu', 'cuda' or 'cuda:1'."
        )


def _check_is_no_import() -> None:
    """Check that this is not the import of the script by a process that measures; UsageError if it is."""
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # what multiprocessing asks; Python 3.14
        raise UsageError(f"compare is called while a process that measures imports the script. {_GUARD}")


def measured_comparison(
    comparison: TechniqueComparison, make_job: Callable[[], Job], device: DeviceLike
) -> TechniqueComparison:
    """The comparison with each row that fits measured on this machine, each in a process of its own.

    `make_job` is called there, so it must be picklable. A row that fails has the reason.
    """
    rows = []
    for row in comparison.rows:
        report(f"measuring {row.technique}")
        rows.append(_measured(row, make_job, device) if row.fits else row)
    return replace(comparison, rows=tuple(rows))


def _measured(row: ComparedTechnique, make_job: Callable[[], Job], device: DeviceLike) -> ComparedTechnique:
    """A row with what a new process measured; one that runs out of memory may end its process."""
    context = multiprocessing.get_context("spawn")
    assert row.settings is not None
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            pool.submit(int).result()
        except BrokenProcessPool:
            raise UsageError(f"the process that measures {row.technique} did not start. {_GUARD}") from None
        try:
            measuring = pool.submit(_measure, make_job, dict(row.variant), row.settings, device)
            return replace(row, measured=measuring.result())
        except BrokenProcessPool:
            return replace(row, why_not="its process ended, as one that runs out of memory does")
        except Exception as error:  # whatever the job's own code raises there
            kind = "" if isinstance(error, BrimfulError) else f"{type(error).__name__}: "
            return replace(row, why_not=f"{kind}{error}")


def _measure(
    make_job: Callable[[], Job], variant: dict[str, str], settings: Settings, device: Any
) -> Measurement:
    job = with_variant(make_job(), **{option: variant.get(option) for option in VARIANT_OPTIONS})
    return measure_job(replace(job, loop=None), settings, device)


def _pickled(job: Job) -> Callable[[], Job]:
    """Makes the job in another process, without its loop; UsageError if it cannot be pickled."""
    try:
        return partial(pickle.loads, pickle.dumps(replace(job, loop=None)))
    except Exception as error:  # whatever the job's own classes raise
        raise UsageError(
            f"measure=True runs each row in a process of its own, and the job cannot be pickled: {error}. "
            "Define its functions at the top level of a module, or run `brimful compare FILE.py:NAME "
            "--measure`."
        ) from None
