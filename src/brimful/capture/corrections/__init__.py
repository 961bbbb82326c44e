"""What CUDA does otherwise than the CPU on which the step is captured: one rule a file."""

from brimful.capture.corrections.attention import FusedAttention
from brimful.capture.corrections.autocast import CudaAutocastLists
from brimful.capture.corrections.base import CorrectedFunctions, Rule, Target
from brimful.capture.corrections.cublas import CublasWorkspace
from brimful.capture.corrections.dropout import MaskedDropout
from brimful.capture.corrections.foreach import ForeachOptimizers
from brimful.capture.corrections.out_of_place import InPlaceBackward

RULES: tuple[type[Rule], ...] = (
    MaskedDropout,
    FusedAttention,
    CudaAutocastLists,
    ForeachOptimizers,
    CublasWorkspace,
    InPlaceBackward,
)
"""All rules, in the order in which reports list them."""

__all__ = [
    "RULES",
    "CorrectedFunctions",
    "CublasWorkspace",
    "CudaAutocastLists",
    "ForeachOptimizers",
    "FusedAttention",
    "InPlaceBackward",
    "MaskedDropout",
    "Rule",
    "Target",
]
