"""How one optimizer step runs: planning chooses `Settings`, capture predicts them, execution applies them.

Start reading at `settings.Settings`. `choices` has the values of its fields, `units` the actions for parts of a
model.
"""

from brimful.settings.choices import (
    Action,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    check_fsdp2_alone,
    fp16_is_divided,
)
from brimful.settings.settings import Settings
from brimful.settings.units import (
    ChunkedLoss,
    Span,
    UnitAction,
    has_input_ops,
    module_part,
    op_kind,
    with_input_ops,
)

__all__ = [
    "Action",
    "ChunkedLoss",
    "Compile",
    "MemoryFormat",
    "OptimizerImplementation",
    "Parallelism",
    "Precision",
    "Settings",
    "Span",
    "UnitAction",
    "check_fsdp2_alone",
    "fp16_is_divided",
    "has_input_ops",
    "module_part",
    "op_kind",
    "with_input_ops",
]
