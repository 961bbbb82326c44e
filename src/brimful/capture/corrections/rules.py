"""All rules, and which of them apply."""

from __future__ import annotations

from collections.abc import Collection

from brimful.capture.corrections.attention import FusedAttention
from brimful.capture.corrections.attention_backward import AttentionBackward
from brimful.capture.corrections.autocast import CudaAutocastLists
from brimful.capture.corrections.base import Rule
from brimful.capture.corrections.contiguous import ContiguousCopies
from brimful.capture.corrections.convolution import BlockedConvolution
from brimful.capture.corrections.cublas import CublasWorkspace
from brimful.capture.corrections.cuda_calls import CudaCalls
from brimful.capture.corrections.cudnn_convolution import CudnnConvolution
from brimful.capture.corrections.cudnn_rnn import CudnnRnn
from brimful.capture.corrections.device_calls import DeviceCalls
from brimful.capture.corrections.dropout import MaskedDropout
from brimful.capture.corrections.embedding import EmbeddingBackward
from brimful.capture.corrections.fake_forms import FakeForms
from brimful.capture.corrections.foreach import ForeachOptimizers
from brimful.capture.corrections.foreach_norm import ForeachNorm
from brimful.capture.corrections.gloo import GlooTemporaries
from brimful.capture.corrections.hidden_copies import HiddenCopies
from brimful.capture.corrections.host_arrays import HostArrays
from brimful.capture.corrections.indexing import IndexBackward, SortMemory
from brimful.capture.corrections.kernel_temporaries import KernelTemporaries
from brimful.capture.corrections.losses import ReducedLosses
from brimful.capture.corrections.normalization import NormMemory
from brimful.capture.corrections.out_of_place import InPlaceBackward
from brimful.capture.corrections.packed_sequences import PackedSequences
from brimful.capture.corrections.padded import PaddedSequences
from brimful.capture.corrections.random_state import RandomState
from brimful.capture.corrections.recurrent import LstmMemory
from brimful.capture.corrections.reductions import ReductionStaging
from brimful.capture.corrections.unknown_ops import UnknownOps
from brimful.devices import Device
from brimful.errors import UnknownNameError
from brimful.settings import Settings

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
    CudnnRnn,
    PackedSequences,
    EmbeddingBackward,
    IndexBackward,
    SortMemory,
    NormMemory,
    HiddenCopies,
    ForeachNorm,
    UnknownOps,
    FakeForms,
    InPlaceBackward,
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
    """The rules that apply to a capture.

    Args:
        target: The device whose decisions are followed.
        settings: How the job is trained.
        without: Names of rules to leave out.

    Returns:
        New ones, in the order of `RULES`.

    Raises:
        UnknownNameError: No rule has a name in `without`.
    """
    names = [make.name for make in RULES]
    for name in without:
        if name not in names:
            raise UnknownNameError("correction", name, names)
    rules = [make(target=target, settings=settings) for make in RULES if make.name not in without]
    return [rule for rule in rules if rule.applies()]
