"""The public names and where each is defined: `__init__.py` loads them on first use."""

from brimful.api import (
    apply as apply,
    calibrate as calibrate,
    capture_trace as capture_trace,
    check_plan as check_plan,
    estimate as estimate,
    estimator as estimator,
    export as export,
    fit as fit,
    gpus as gpus,
    measure as measure,
    plan as plan,
    prepare as prepare,
    verify as verify,
)
from brimful.devices import Device as Device, find_device as find_device
from brimful.errors import (
    BrimfulError as BrimfulError,
    EquivalenceError as EquivalenceError,
    InfeasibleError as InfeasibleError,
    OutOfMemoryError as OutOfMemoryError,
    PartialUpdateError as PartialUpdateError,
    ResumeError as ResumeError,
    TrainingError as TrainingError,
    UnknownNameError as UnknownNameError,
    UsageError as UsageError,
)
from brimful.execution.in_force import Prepared as Prepared
from brimful.execution.planned_step import PlannedStep as PlannedStep
from brimful.execution.step import StepOutcome as StepOutcome
from brimful.exports import Export as Export
from brimful.job import Data as Data, Job as Job, Samples as Samples
from brimful.models import find_architecture as find_architecture
from brimful.optimizers import named_optimizer as named_optimizer
from brimful.planner import Plan as Plan
from brimful.prediction import Estimate as Estimate, Estimator as Estimator
from brimful.results import Measurement as Measurement, TrainingResult as TrainingResult
from brimful.settings import (
    Action as Action,
    MemoryFormat as MemoryFormat,
    OptimizerImplementation as OptimizerImplementation,
    Precision as Precision,
    Settings as Settings,
    UnitAction as UnitAction,
)
from brimful.trace import Trace as Trace
from brimful.trainer import (
    Callback as Callback,
    Schedule as Schedule,
    Trainer as Trainer,
    load_weights as load_weights,
)

__version__: str
