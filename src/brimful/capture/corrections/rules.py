"""The list of all rules, and the choice of those that apply."""

from __future__ import annotations

from collections.abc import Collection

from brimful.capture.corrections.common.fake_forms import FakeForms
from brimful.capture.corrections.common.host_arrays import HostArrays
from brimful.capture.corrections.common.in_place_backward import InPlaceBackward
from brimful.capture.corrections.common.in_place_bias import InPlaceBias
from brimful.capture.corrections.common.quantised_weights import QuantisedWeights
from brimful.capture.corrections.common.unknown_ops import UnknownOps
from brimful.capture.corrections.cpu.blocked_convolution import BlockedConvolution
from brimful.capture.corrections.cpu.contiguous_copies import ContiguousCopies
from brimful.capture.corrections.cpu.gloo_temporaries import GlooTemporaries
from brimful.capture.corrections.cpu.kernel_temporaries import KernelTemporaries
from brimful.capture.corrections.cpu.lstm_memory import LstmMemory
from brimful.capture.corrections.cpu.padded_sequences import PaddedSequences
from brimful.capture.corrections.cpu.random_state import RandomState
from brimful.capture.corrections.cpu.reduced_losses import ReducedLosses
from brimful.capture.corrections.cuda.attention_backward import AttentionBackward
from brimful.capture.corrections.cuda.attention_kernel import AttentionKernel
from brimful.capture.corrections.cuda.autocast_lists import AutocastLists
from brimful.capture.corrections.cuda.cublas_workspace import CublasWorkspace
from brimful.capture.corrections.cuda.cuda_calls import CudaCalls
from brimful.capture.corrections.cuda.cudnn_convolution import CudnnConvolution
from brimful.capture.corrections.cuda.cudnn_rnn import CudnnRnn
from brimful.capture.corrections.cuda.device_calls import DeviceCalls
from brimful.capture.corrections.cuda.dropout_mask import DropoutMask
from brimful.capture.corrections.cuda.embedding_backward import EmbeddingBackward
from brimful.capture.corrections.cuda.foreach_norm import ForeachNorm
from brimful.capture.corrections.cuda.foreach_optimizer import ForeachOptimizer
from brimful.capture.corrections.cuda.fused_lm_head import FusedLmHead
from brimful.capture.corrections.cuda.fused_rms_norm import FusedRmsNorm
from brimful.capture.corrections.cuda.group_norm_copy import GroupNormCopy
from brimful.capture.corrections.cuda.hidden_copies import HiddenCopies
from brimful.capture.corrections.cuda.index_backward import IndexBackward
from brimful.capture.corrections.cuda.norm_parts import NormParts
from brimful.capture.corrections.cuda.packed_sequences import PackedSequences
from brimful.capture.corrections.cuda.reduction_staging import ReductionStaging
from brimful.capture.corrections.cuda.softmax_parts import SoftmaxParts
from brimful.capture.corrections.cuda.sort import Sort
from brimful.capture.corrections.rule import Rule
from brimful.devices import Device
from brimful.errors import UnknownNameError
from brimful.settings import Settings

RULES: tuple[type[Rule], ...] = (
    DeviceCalls,
    DropoutMask,
    AttentionKernel,
    AttentionBackward,
    AutocastLists,
    ForeachOptimizer,
    CublasWorkspace,
    ReductionStaging,
    CudnnConvolution,
    CudnnRnn,
    PackedSequences,
    EmbeddingBackward,
    IndexBackward,
    Sort,
    FusedRmsNorm,
    FusedLmHead,
    NormParts,
    GroupNormCopy,
    SoftmaxParts,
    HiddenCopies,
    ForeachNorm,
    UnknownOps,
    QuantisedWeights,
    FakeForms,
    InPlaceBackward,
    InPlaceBias,
    BlockedConvolution,
    LstmMemory,
    ContiguousCopies,
    KernelTemporaries,
    ReducedLosses,
    PaddedSequences,
    RandomState,
    GlooTemporaries,
    HostArrays,
    CudaCalls,
)
"""All rules, in the order in which reports list them."""


def rules_for(target: Device, settings: Settings, without: Collection[str] = ()) -> list[Rule]:
    """New rules that apply to a capture, in the order of `RULES`, but for those named in `without`.

    Raises `UnknownNameError` if no rule has a name in `without`.
    """
    names = [make.name for make in RULES]
    for name in without:
        if name not in names:
            raise UnknownNameError("correction", name, names)
    rules = [make(target=target, settings=settings) for make in RULES if make.name not in without]
    return [rule for rule in rules if rule.applies()]
