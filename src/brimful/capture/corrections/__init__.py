"""What a device does otherwise than fake tensors on a CPU: one rule a file."""

from brimful.capture.corrections.attention import FusedAttention
from brimful.capture.corrections.attention_backward import AttentionBackward
from brimful.capture.corrections.autocast import CudaAutocastLists
from brimful.capture.corrections.base import CorrectedFunctions, Rule
from brimful.capture.corrections.convolution import BlockedConvolution
from brimful.capture.corrections.cublas import CublasWorkspace
from brimful.capture.corrections.cudnn_convolution import CudnnConvolution
from brimful.capture.corrections.device_calls import DeviceCalls
from brimful.capture.corrections.dropout import MaskedDropout
from brimful.capture.corrections.foreach import ForeachOptimizers
from brimful.capture.corrections.out_of_place import InPlaceBackward
from brimful.capture.corrections.random_state import RandomState
from brimful.capture.corrections.recurrent import LstmMemory
from brimful.capture.corrections.reductions import ReductionStaging

RULES: tuple[type[Rule], ...] = (
    DeviceCalls,
    MaskedDropout,
    FusedAttention,
    AttentionBackward,
    CudaAutocastLists,
    ForeachOptimizers,
    CublasWorkspace,
    ReductionStaging,
    CudnnConvolution,
    InPlaceBackward,
    BlockedConvolution,
    LstmMemory,
    RandomState,
)
"""All rules, in the order in which reports list them."""

__all__ = [
    "RULES",
    "AttentionBackward",
    "BlockedConvolution",
    "CorrectedFunctions",
    "CublasWorkspace",
    "CudaAutocastLists",
    "DeviceCalls",
    "ForeachOptimizers",
    "FusedAttention",
    "InPlaceBackward",
    "LstmMemory",
    "MaskedDropout",
    "RandomState",
    "ReductionStaging",
    "Rule",
]
