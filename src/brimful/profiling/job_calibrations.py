"""Factors by which predictions of one kind of job on one device of this machine were off, kept for later plans.

A kind of job is its name and number of parameters, precision, optimizer and number of ranks. A factor holds for
the predictions that it was measured against, so it is kept under the rates of the device and the versions of
brimful and torch as well: after `brimful calibrate` or an update it no longer applies.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from brimful import __version__
from brimful.devices import Device
from brimful.job import Job
from brimful.optimizers import NamedOptimizer
from brimful.profiling.cache import keep, read_kept
from brimful.results import JobCalibration
from brimful.settings import Precision, Settings

FILE = "job_calibrations.json"
"""Name of the file in the user's cache directory."""
_SECTION = "jobs"

MOST_JOBS = 256
"""Kept entries; the oldest are deleted. Each takes about 300 bytes. A choice."""

_MOST_SHOWN = 100
"""Characters of a job's name in a key, which has a digest of the whole name. A choice."""

OWN_OPTIMIZER = "own"
"""Stands for an optimizer that the job's own function makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """A kind of job on one device of this machine, whose predictions share a factor."""

    device: Device
    """With its rates."""
    job: str
    parameter_count: int
    precision: Precision
    optimizer: str
    world_size: int

    @classmethod
    def of(cls, job: Job, device: Device, settings: Settings, *, parameter_count: int) -> JobKind:
        """The kind of a job under some settings, on a device of this machine with its rates."""
        return cls(
            device=device,
            job=job.name,
            parameter_count=parameter_count,
            precision=settings.precision,
            optimizer=_optimizer_name(job, settings.optimizer),
            world_size=settings.world_size,
        )

    @property
    def key(self) -> str:
        """The name under which its factors are kept."""
        # Free memory and the network do not change what a step takes on this device.
        rates = replace(self.device, capacity_bytes=0, network_bytes_per_second=0.0)
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.job, repr(rates), __version__, torch.__version__):
            digest.update(part.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        return (
            f"{self.job[:_MOST_SHOWN]}, {self.parameter_count} parameters, {self.precision}, {self.optimizer}"
            f"{ranks} on {self.device.name} {digest.hexdigest()}"
        )


def kept_job_calibration(kind: JobKind) -> JobCalibration | None:
    """What training measured of a kind of job; None if nothing is kept for these predictions.

    A file that cannot be read is a warning, and is not used.
    """
    return read_kept(FILE, _SECTION, JobCalibration).get(kind.key)


def has_job_calibrations() -> bool:
    """Whether anything is kept, of any job."""
    return bool(read_kept(FILE, _SECTION, JobCalibration))


def keep_job_calibration(kind: JobKind, calibration: JobCalibration) -> None:
    """Keep what training measured, in place of what was kept of the same kind of job.

    Where nothing can be written, that is a warning.
    """
    keep(FILE, _SECTION, kind.key, calibration, what="factors of predictions", most=MOST_JOBS)


def _optimizer_name(job: Job, chosen: str | None) -> str:
    """The name of the optimizer that replaces the job's own, or of its own; "own" for a function's."""
    own = job.optimizer
    name = own.name if isinstance(own, NamedOptimizer) else own
    return chosen or (name if isinstance(name, str) else OWN_OPTIMIZER)
