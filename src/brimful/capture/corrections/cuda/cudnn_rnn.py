"""Recurrent layers run in one cuDNN kernel on CUDA, which keeps a buffer of its own for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.utils.quantities import MIB

# B micro-batch, T sequence, I input size, H hidden size, L layers, D directions, e bytes of an element

aten = torch.ops.aten

_RELU, _TANH, _LSTM, _GRU = range(4)
"""What torch passes as `mode`: cuDNN's numbers. Source: cudnnRNNMode_t."""
_KEPT_OF_A_CELL = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 6}
"""States (H) that the reserve keeps of each cell: the four gates and the cell state of an LSTM; see
`reserve_bytes`."""
_STATES_AT_WORK = 44
"""States (B, H) of each layer and direction in the workspace, whatever T is; see `workspace_bytes`."""
_OUTPUTS_AT_WORK, _MOST_OUTPUTS_AT_WORK = 6, 8
"""Outputs (T, B, D·H) in the workspace; see `workspace_bytes`. Fitted to the four sizes measured there: NVIDIA
publishes none."""
_DROPOUT_STATE_BYTES = 2 * MIB
"""cuDNN's random state, made once: "slightly over 2MB" in RNN.cpp, get_dropout_state."""


class CudnnRnn(Rule):
    """Run `nn.LSTM`, `nn.GRU` and `nn.RNN` as `_cudnn_rnn`, as CUDA does where cuDNN is enabled.

    Of the op torch itself knows the outputs, what backward saves, and that a sequence with samples first is
    copied. Its two buffers are cuDNN's choice: `reserve_bytes`, kept for backward, and `workspace_bytes`, taken
    in forward and twice in backward. Under autocast all of it is in float16, also where bfloat16 is asked for,
    with a copy of all weights. The gradients of all weights are one block, as on CUDA; the weights, which are
    one block there, are left apart.
    """

    name = "cudnn_rnn"
    source = (
        "torch aten/src/ATen/native/cudnn/RNN.cpp (00fc08aa), aten/src/ATen/cudnn/AutocastRNN.cpp; sizes of "
        "buffers: public logs of cuDNN 6 and 7, pytorch issue 2895, deepspeech.pytorch issue 172"
    )

    _has_dropout_state = False

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of the functions that recurrent modules call."""
        modes: tuple[tuple[Callable[..., Any], int], ...] = (
            (torch.lstm, _LSTM),
            (torch.gru, _GRU),
            (torch.rnn_tanh, _TANH),
            (torch.rnn_relu, _RELU),
        )
        return {function: partial(self._run, function, mode) for function, mode in modes}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Register the shapes that `_cudnn_rnn_backward` returns, which torch does not know."""
        library = torch.library.Library("aten", "IMPL")
        library.impl("_cudnn_rnn_backward", _backward_shapes, "Meta")
        try:
            yield
        finally:
            library._destroy()

    def _run(self, function: Callable[..., Any], mode: int, *args: Any) -> tuple[Tensor, ...]:
        """Run a layer by cuDNN, with the arguments of `torch.lstm` and its like.

        These have a padded batch, or the data and sizes of a packed one.
        """
        inputs = args[0]
        if not torch.backends.cudnn.enabled or inputs.numel() == 0:
            return function(*args)
        is_packed = isinstance(args[3], (list, tuple))
        hidden, weights, has_biases, layers, dropout, train, bidirectional, *rest = args[
            2 if is_packed else 1 :
        ]
        hx, cx = hidden if mode == _LSTM else (hidden, None)
        inputs, hx, cx, weights = _cast(inputs, hx, cx, weights)
        hidden_size = hx.size(2) if cx is None else cx.size(2)
        projected_size = 0 if hidden_size == hx.size(2) else hx.size(2)
        # Of a packed batch's sizes the op reads on fakes only how many there are, and the first.
        batch_sizes = [hx.size(1)] + [0] * (args[1].numel() - 1) if is_packed else []
        batch_first = not is_packed and rest[0]
        if train and dropout:
            self._make_dropout_state()
        y, hy, cy, _reserve, _weights = aten._cudnn_rnn(
            inputs.transpose(0, 1) if batch_first else inputs,
            weights,
            (4 if has_biases else 2) + bool(projected_size),
            weights[0].detach(),  # stands for the block that all weights are views of
            hx,
            cx,
            mode,
            hidden_size,
            projected_size,
            layers,
            False,
            dropout,
            train,
            bidirectional,
            batch_sizes,
            None,
        )
        y = y.transpose(0, 1) if batch_first else y
        return (y, hy) if cx is None else (y, hy, cy)

    def _make_dropout_state(self) -> None:
        if not self._has_dropout_state:
            self._has_dropout_state = True
            self.recorder.ledger.allocate(_DROPOUT_STATE_BYTES, "cuDNN dropout state")

    def watches_op(self, func: Any) -> bool:
        """Whether an op is cuDNN's recurrent layer or its backward."""
        return func in (aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Give the reserve its size; add workspaces and copies."""
        if func is aten._cudnn_rnn.default:
            self._after_forward(args, outputs)
        elif func is aten._cudnn_rnn_backward.default:
            self._after_backward(args)

    def _after_forward(self, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        inputs, train = args[0], args[12]
        sizes = RnnSizes.of(inputs, args[1], args[4], args[6:10], args[11], args[13])
        if train:
            likely, most = reserve_bytes(sizes)
            storage = outputs[3].untyped_storage()
            storage.resize_(likely)
            self._add_uncertain_part(storage, most - likely)
            self.count(likely)
        self._add_workspace(sizes)
        self._add_copy(inputs)

    def _after_backward(self, args: tuple[Any, ...]) -> None:
        inputs, weights, grad_output, output_mask = args[0], args[1], args[7], args[21]
        sizes = RnnSizes.of(inputs, weights, args[4], args[10:14], args[15], args[17])
        self._add_workspace(sizes)
        self._add_copy(inputs)
        # The copy of the gradient is gone before the weights' gradient, an output, is made.
        copied = grad_output is not None and not grad_output.is_contiguous()
        copied_bytes = grad_output.nbytes if copied else 0
        later_bytes = sum(tensor.nbytes for tensor in weights) if output_mask[3] else 0
        self.add(max(copied_bytes - later_bytes, 0), f"inside {aten._cudnn_rnn_backward.default}")

    def _add_workspace(self, sizes: RnnSizes) -> None:
        likely, most = workspace_bytes(sizes)
        self.add(likely, "cuDNN RNN workspace", most_bytes=most)

    def _add_copy(self, inputs: Tensor) -> None:
        copied_bytes = 0 if inputs.is_contiguous() else inputs.nbytes
        self.add(copied_bytes, "copy of a recurrent layer's input")

    def _add_uncertain_part(self, storage: torch.UntypedStorage, extra_bytes: int) -> None:
        """Add a block of no likely size that lives as long as a storage does."""
        block = self.recorder.ledger.allocate(0, "cuDNN RNN reserve, uncertain part", most_bytes=extra_bytes)
        weakref.finalize(storage, self.recorder.ledger.free, block).atexit = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RnnSizes:
    """Sizes that those of cuDNN's buffers depend on."""

    mode: int
    steps: int
    """T · B; of a packed batch, the sum of its lengths."""
    samples: int
    hidden_size: int
    projected_size: int
    """0: the hidden state is not projected."""
    layers: int
    directions: int
    has_dropout: bool
    element_bytes: int
    matrix_bytes: int
    """Bytes of all weights but the biases."""

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        weights: Sequence[Tensor],
        hx: Tensor,
        mode_and_sizes: Sequence[int],
        dropout: float,
        bidirectional: bool,
    ) -> RnnSizes:
        """The sizes of a call of `_cudnn_rnn`: mode, hidden size, projected size and layers come in a row."""
        mode, hidden_size, projected_size, layers = mode_and_sizes
        return cls(
            mode=mode,
            steps=inputs.numel() // inputs.size(-1),
            samples=hx.size(1),
            hidden_size=hidden_size,
            projected_size=projected_size,
            layers=layers,
            directions=2 if bidirectional else 1,
            has_dropout=dropout > 0,
            element_bytes=inputs.element_size(),
            matrix_bytes=sum(weight.nbytes for weight in weights if weight.dim() > 1),
        )


def reserve_bytes(sizes: RnnSizes) -> tuple[int, int]:
    """Likely and most bytes that cuDNN keeps from forward to backward.

    T · B · H · e · D times (kept states · L + outputs between layers, L - 1), where an LSTM keeps 5 states, a
    GRU 6. That is the very number in three public logs: 736,000,000 (LSTM) and 864,000,000 (GRU) for
    T · B = 25,000, H = 320, L = 4 on a P100, 801,177,600 (GRU) for T · B = 326 · 64, H = 800, D = 2 on a V100,
    all in float32, and what cuDNN 9.19 keeps on an H100 (benchmarks/results/gpu_record.json). For plain
    RNNs 1 state is a guess. Dropout between layers adds a bit an element there. The most has one state more for
    each layer, and a full element for dropout.
    """
    states = sizes.steps * sizes.directions * sizes.element_bytes
    outputs = states * (sizes.projected_size or sizes.hidden_size)
    cells = states * sizes.hidden_size * sizes.layers
    likely = _KEPT_OF_A_CELL[sizes.mode] * cells + (sizes.layers - 1) * outputs
    if sizes.projected_size:
        likely += sizes.layers * outputs
    dropped = (sizes.layers - 1) * outputs if sizes.has_dropout else 0
    return likely + dropped // (8 * sizes.element_bytes), likely + cells + dropped


def workspace_bytes(sizes: RnnSizes) -> tuple[int, int]:
    """Likely and largest size of cuDNN's workspace, in bytes.

    It holds a copy of the matrices, 44 states (B, H) per layer and direction, and six outputs (T, B, D·H) for
    what is computed for all steps at once; the largest size has eight. With one direction cuDNN 9.19 took 4 to
    24 MiB more than this of 111 to 147 MiB on an H100, for LSTM and GRU with one and two layers in float32
    (benchmarks/results/gpu_record.json). cuDNN 6 and 7 took none of these outputs with one direction, and two
    with both: the logs named at `reserve_bytes` (17,730,560, 13,169,920 and 313,344,000 bytes).
    """
    state = sizes.samples * sizes.hidden_size * sizes.element_bytes
    likely = sizes.matrix_bytes + _STATES_AT_WORK * state * sizes.layers * sizes.directions
    steps = sizes.steps * sizes.hidden_size * sizes.element_bytes * sizes.directions
    likely += _OUTPUTS_AT_WORK * steps
    return likely, likely + (_MOST_OUTPUTS_AT_WORK - _OUTPUTS_AT_WORK) * steps


def _cast(
    inputs: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Cast to float16 under autocast, whatever type it is set to: AutocastRNN.cpp names no other."""
    if not torch.is_autocast_enabled("cpu") or inputs.dtype is torch.float64:
        return inputs, hx, cx, list(weights)
    return (
        inputs.half(),
        hx.half(),
        None if cx is None else cx.half(),
        [weight.half() for weight in weights],
    )


def _backward_shapes(
    inputs: Tensor,
    weights: Sequence[Tensor],
    _stride: int,
    _block: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Gradients of the inputs, of both states and of the weights, which are views of one block."""
    output_mask = others[-1]
    gradients: list[Tensor] = []
    if output_mask[3]:
        sizes = [weight.numel() for weight in weights]
        parts = weights[0].new_empty(sum(sizes)).split(sizes)
        gradients = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    return (
        torch.empty_like(inputs, memory_format=torch.contiguous_format),
        torch.empty_like(hx),
        None if cx is None else torch.empty_like(cx),
        gradients,
    )
