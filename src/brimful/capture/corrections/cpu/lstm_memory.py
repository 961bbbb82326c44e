"""oneDNN's LSTM allocates a workspace and temporaries that fake tensors do not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

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
        if mode != _LSTM or inputs.dtype is not torch.float32:
            self.recorder.facts.note(f"{func}: the memory of this mode and type is not known")
        elif is_training:
            sizes = (*inputs.shape, hidden_size)  # torch brings samples to the second place before it
            if func is aten.mkldnn_rnn_layer.default:
                size_bytes = lstm_workspace_bytes(*sizes)
                outputs[-1].untyped_storage().resize_(size_bytes)
                self.count(size_bytes)
            else:
                grad_output = args[10]
                copied_bytes = 0 if grad_output is None or grad_output.is_contiguous() else grad_output.nbytes
                size_bytes = lstm_backward_bytes(*sizes) + copied_bytes
                self.add(size_bytes, f"inside {func}")


def lstm_workspace_bytes(sequence: int, samples: int, input_size: int, hidden_size: int) -> int:
    """Workspace of one layer and direction of an LSTM in float32, for training.

    Gates (T, B, 4H) and hidden states (T, B, H). Of the states before and after it, (2, T + 1, B): those passed
    up and, for backward, the gradients of those passed up and on, each max(I, H) wide, and the cell states with
    their gradients, H wide. All rows but those of cell states are padded; each array takes whole pages.
    """
    states = 2 * (sequence + 1) * samples
    wide = _leading_dimension(max(input_size, hidden_size))
    numels = (
        sequence * samples * _leading_dimension(4 * hidden_size),
        sequence * samples * _leading_dimension(hidden_size),
        states * wide,
        states * hidden_size,
        states * wide,
        states * wide,
        states * hidden_size,
    )
    return sum(-(-numel * _FLOAT_BYTES // _PAGE_BYTES) * _PAGE_BYTES for numel in numels)


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


def _leading_dimension(width: int) -> int:
    """`get_good_ld` for float32: a multiple of 64 bytes, and no multiple of 256 elements."""
    step = 64 // _FLOAT_BYTES
    rounded = -(-width // step) * step
    return rounded + step if rounded % 256 == 0 else rounded
