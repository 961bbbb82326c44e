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
    "EquivalenceError",
    "Estimate",
    "Estimator",
    "Export",
    "InfeasibleError",
    "Job",
    "Measurement",
    "MemoryFormat",
    "OptimizerImplementation",
    "OutOfMemoryError",
    "PartialUpdateError",
    "Plan",
    "PlannedStep",
    "Precision",
    "Prepared",
    "ResumeError",
    "Samples",
    "Schedule",
    "Settings",
    "StepOutcome",
    "Trace",
    "Trainer",
    "TrainingError",
    "TrainingResult",
    "UnitAction",
    "UnknownNameError",
    "UsageError",
    "__version__",
    "apply",
    "calibrate",
    "capture_trace",
    "check_plan",
    "estimate",
    "estimator",
    "export",
    "find_architecture",
    "find_device",
    "fit",
    "gpus",
    "load_weights",
    "measure",
    "named_optimizer",
    "plan",
    "prepare",
    "verify",
]

_HOMES = {
    "Action": "settings",
    "BrimfulError": "errors",
    "Callback": "trainer",
    "Data": "job",
    "Device": "devices",
    "EquivalenceError": "errors",
    "Estimate": "prediction",
    "Estimator": "prediction",
    "Export": "exports",
    "InfeasibleError": "errors",
    "Job": "job",
    "Measurement": "results",
    "MemoryFormat": "settings",
    "OptimizerImplementation": "settings",
    "OutOfMemoryError": "errors",
    "PartialUpdateError": "errors",
    "Plan": "planner",
    "PlannedStep": "execution.planned_step",
    "Prepared": "execution.in_force",
    "Precision": "settings",
    "ResumeError": "errors",
    "Samples": "job",
    "Schedule": "trainer",
    "Settings": "settings",
    "StepOutcome": "execution.step",
    "Trace": "trace",
    "Trainer": "trainer",
    "TrainingError": "errors",
    "TrainingResult": "results",
    "UnitAction": "settings",
    "UnknownNameError": "errors",
    "UsageError": "errors",
    "apply": "api",
    "calibrate": "api",
    "capture_trace": "api",
    "check_plan": "api",
    "estimate": "api",
    "estimator": "api",
    "export": "api",
    "find_architecture": "models",
    "find_device": "devices",
    "fit": "api",
    "gpus": "api",
    "load_weights": "trainer",
    "measure": "api",
    "named_optimizer": "optimizers",
    "plan": "api",
    "prepare": "api",
    "verify": "api",
}

if TYPE_CHECKING:
    from brimful.api import (
        apply,
        calibrate,
        capture_trace,
        check_plan,
        estimate,
        estimator,
        export,
        fit,
        gpus,
        measure,
        plan,
        prepare,
        verify,
    )
    from brimful.devices import Device, find_device
    from brimful.errors import (
        BrimfulError,
        EquivalenceError,
        InfeasibleError,
        OutOfMemoryError,
        PartialUpdateError,
        ResumeError,
        TrainingError,
        UnknownNameError,
        UsageError,
    )
    from brimful.execution.in_force import Prepared
    from brimful.execution.planned_step import PlannedStep
    from brimful.execution.step import StepOutcome
    from brimful.exports import Export
    from brimful.job import Data, Job, Samples
    from brimful.models import find_architecture
    from brimful.optimizers import named_optimizer
    from brimful.planner import Plan
    from brimful.prediction import Estimate, Estimator
    from brimful.results import Measurement, TrainingResult
    from brimful.settings import (
        Action,
        MemoryFormat,
        OptimizerImplementation,
        Precision,
        Settings,
        UnitAction,
    )
    from brimful.trace import Trace
    from brimful.trainer import Callback, Schedule, Trainer, load_weights


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    value = getattr(import_module(f"brimful.{_HOMES[name]}"), name)
    if isinstance(value, type) and "__dataclass_fields__" in vars(value):
        from brimful.field_docs import list_fields_in_help

        list_fields_in_help(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
