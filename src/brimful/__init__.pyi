"""The public names and where each is defined: `__init__.py` loads them on first use."""

from brimful import (
    api as api,
    devices as devices,
    doctor as doctor,
    errors as errors,
    job as job,
    optimizers as optimizers,
    results as results,
    settings as settings,
    trace as trace,
    trainer as trainer,
)
from brimful.api import (
    apply as apply,
    calibrate as calibrate,
    compare as compare,
    estimate as estimate,
    fit as fit,
    gpus as gpus,
    measure as measure,
    plan as plan,
    prepare as prepare,
    verify as verify,
)
from brimful.doctor import explain_out_of_memory as explain_out_of_memory
from brimful.doctor.shown import watch as watch
from brimful.errors import (
    BrimfulError as BrimfulError,
    InfeasibleError as InfeasibleError,
    OutOfMemoryError as OutOfMemoryError,
)
from brimful.job import Data as Data, Job as Job
from brimful.models import find_architecture as find_architecture
from brimful.planner import Plan as Plan
from brimful.settings import Settings as Settings

__version__: str
