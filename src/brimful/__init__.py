"""Fill your GPU to the brim, never over it.

Names load their stage, and torch, on first use, so that `import brimful` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Action",
    "BrimfulError",
    "Callback",
    "Data",
    "Device",
    "Estimate",
    "Estimator",
    "InfeasibleError",
    "Job",
    "Measurement",
    "OptimizerImplementation",
    "Plan",
    "Precision",
    "Samples",
    "Schedule",
    "Settings",
    "Trace",
    "Trainer",
    "TrainingResult",
    "UnitAction",
    "__version__",
    "apply",
    "calibrate",
    "capture_trace",
    "check_plan",
    "estimate",
    "estimator",
    "find_architecture",
    "find_device",
    "fit",
    "gpus",
    "load_weights",
    "measure",
    "named_optimizer",
    "plan",
    "verify",
]

_HOMES = {
    "Action": "settings",
    "BrimfulError": "errors",
    "Callback": "trainer",
    "Data": "job",
    "Device": "devices",
    "Estimate": "prediction",
    "Estimator": "prediction",
    "InfeasibleError": "errors",
    "Job": "job",
    "Measurement": "results",
    "OptimizerImplementation": "settings",
    "Plan": "planner",
    "Precision": "settings",
    "Samples": "job",
    "Schedule": "trainer",
    "Settings": "settings",
    "Trace": "trace",
    "Trainer": "trainer",
    "TrainingResult": "results",
    "UnitAction": "settings",
    "apply": "api",
    "calibrate": "api",
    "capture_trace": "api",
    "verify": "api",
    "check_plan": "api",
    "estimate": "api",
    "estimator": "api",
    "find_architecture": "models",
    "find_device": "devices",
    "fit": "api",
    "gpus": "api",
    "load_weights": "trainer",
    "measure": "api",
    "named_optimizer": "optimizers",
    "plan": "api",
}

if TYPE_CHECKING:
    from brimful.api import (
        apply,
        calibrate,
        capture_trace,
        check_plan,
        estimate,
        estimator,
        fit,
        gpus,
        measure,
        plan,
        verify,
    )
    from brimful.devices import Device, find_device
    from brimful.errors import BrimfulError, InfeasibleError
    from brimful.job import Data, Job, Samples
    from brimful.models import find_architecture
    from brimful.optimizers import named_optimizer
    from brimful.planner import Plan
    from brimful.prediction import Estimate, Estimator
    from brimful.results import Measurement, TrainingResult
    from brimful.settings import Action, OptimizerImplementation, Precision, Settings, UnitAction
    from brimful.trace import Trace
    from brimful.trainer import Callback, Schedule, Trainer, load_weights


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    value = getattr(import_module(f"brimful.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
