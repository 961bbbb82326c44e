"""oneDNN's LSTM allocates a workspace and temporaries that fake tensors do not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.utils.quantities import round_up

# B micro-batch, T sequence, I input size, H hidden size

aten = torch.ops.aten

_FLOAT_BYTES = 4
_PAGE_BYTES = 4096
_LSTM = 2
"""What torch passes as `mode` for an LSTM: cuDNN's number for it. Source: torch
aten/src/ATen/native/mkldnn/RNN.cpp."""


class LstmMemory(Rule):
    """Give the workspace of `mkldnn_rnn_layer` its size, 0 on fake tensors, and count what backward takes."""

    name = "lstm_memory"
    source = (
        "workspace: oneDNN src/cpu/rnn/rnn_utils.hpp, set_workspace_sizes, .cpp, set_offsets (checked: 3.12); "
        "backward: measured with torch 2.13's profiler"
    )
    device_kinds = ("cpu",)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Let the workspace's storage grow to its size; add what backward takes."""
        if func is aten.mkldnn_rnn_layer.default:
            inputs, mode, hidden_size, is_training = args[0], args[9], args[10], args[15]
        elif func is aten.mkldnn_rnn_layer_backward.default:
            inputs, mode, hidden_size, is_training = args[0], args[14], args[15], True
        else:
            return
        if mode != _LSTM or inputs.dtype not in (torch.float32, torch.bfloat16):
            self.recorder.facts.note(f"{func}: the memory of this mode and type is not known")
        elif is_training:
            sizes = (*inputs.shape, hidden_size)  # torch brings samples to the second place before it
            is_reduced = inputs.dtype is torch.bfloat16
            if func is aten.mkldnn_rnn_layer.default:
                size_bytes = lstm_workspace_bytes(*sizes, element_bytes=inputs.element_size())
                outputs[-1].untyped_storage().resize_(size_bytes)
                self.count(size_bytes)
            else:
                grad_output = args[10]
                copied_bytes = 0 if grad_output is None or grad_output.is_contiguous() else grad_output.nbytes
                of_type = reduced_lstm_backward_bytes if is_reduced else lstm_backward_bytes
                size_bytes = of_type(*sizes) + copied_bytes
                self.add(size_bytes, f"inside {func}")


def lstm_workspace_bytes(
    sequence: int, samples: int, input_size: int, hidden_size: int, *, element_bytes: int = _FLOAT_BYTES
) -> int:
    """Workspace of one layer and direction of an LSTM for training, its gradients in float32.

    Gates (T, B, 4H) and hidden states (T, B, H). Of the states before and after it, (2, T + 1, B): those passed
    up and, for backward, the gradients of those passed up and on, each max(I, H) wide, and the cell states with
    their gradients, H wide. All rows but those of cell states are padded; each array takes whole pages.
    """
    states = 2 * (sequence + 1) * samples
    widest = max(input_size, hidden_size)
    values = (
        sequence * samples * _leading_dimension(4 * hidden_size, element_bytes),
        sequence * samples * _leading_dimension(hidden_size, element_bytes),
        states * _leading_dimension(widest, element_bytes),
        states * hidden_size,
    )
    gradients = (*2 * (states * _leading_dimension(widest),), states * hidden_size)
    sizes = (*(numel * element_bytes for numel in values), *(numel * _FLOAT_BYTES for numel in gradients))
    return sum(round_up(size_bytes, _PAGE_BYTES) for size_bytes in sizes)


def lstm_backward_bytes(sequence: int, samples: int, input_size: int, hidden_size: int) -> int:
    """What the backward of one layer and direction in float32 takes beside its outputs, as the profiler shows.

    Gradients of gates (T, B, 4H) and of two states (B, H), padded; those of both weights, (I, 4H) and (H, 4H),
    padded; a padded copy of a weight, (4H, I) or (4H, H), whose rows are not; the zeros that stand for the
    gradients of the last states, (B, H) each; the sum of the biases and its gradient, (4H).
    """
    gates = 4 * hidden_size
    widths = (input_size, hidden_size)
    numels = (
        sequence * samples * _leading_dimension(gates),
        2 * samples * _leading_dimension(hidden_size),
        sum(widths) * _leading_dimension(gates),
        sum(gates * _leading_dimension(width) for width in widths if _leading_dimension(width) != width),
        2 * samples * hidden_size,
        2 * gates,
    )
    return sum(numels) * _FLOAT_BYTES + 2 * _PAGE_BYTES  # arrays begin on pages


def reduced_lstm_backward_bytes(sequence: int, samples: int, input_size: int, hidden_size: int) -> int:
    """What the backward of one layer and direction in bfloat16 takes beside its outputs, as the profiler shows.

    It computes gradients in float32. The gradient of the outputs (T, B, H), of both last states and a copy of
    the first cell state (B, H); copies of both weights, (4H, I) and (4H, H), padded; their gradients, (I, 4H)
    and (H, 4H), padded, in float32; gradients of one step's gates (B, 4H) and of two states (B, H), padded.
    """
    gates = 4 * hidden_size
    widths = (input_size, hidden_size)
    numels = (
        sequence * samples * hidden_size,
        3 * samples * hidden_size,
        sum(widths) * _leading_dimension(gates),
        samples * _leading_dimension(gates),
        2 * samples * _leading_dimension(hidden_size),
        2 * gates,
    )
    copies = sum(gates * _leading_dimension(width, 2) for width in widths) * 2
    return sum(numels) * _FLOAT_BYTES + copies + 2 * _PAGE_BYTES


def _leading_dimension(width: int, element_bytes: int = _FLOAT_BYTES) -> int:
    """oneDNN's `get_good_ld`: a multiple of 64 bytes, and no multiple of 256 elements."""
    step = 64 // element_bytes
    rounded = -(-width // step) * step
    return rounded + step if rounded % 256 == 0 else rounded
