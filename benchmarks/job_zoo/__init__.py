"""Whole small jobs as people write them, to be predicted, planned, applied and measured."""

import torchvision_on_cpu  # noqa: F401  # before transformers, which looks for torchvision

# isort: split
from job_zoo import (  # noqa: F401  # each adds its jobs to JOBS
    adapters,
    classification,
    comparing,
    compiled,
    control,
    detection,
    generative,
    graphs,
    language,
    science,
    training,
)
from job_zoo.case import JOBS, JobCase

__all__ = ["JOBS", "JobCase"]
