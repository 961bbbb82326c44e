"""Telling the recorder what tensors of a training step hold."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from brimful.batches import map_tensors, named_tensors
from brimful.capture.recorder import Recorder
from brimful.job import Batch
from brimful.trace import Category


def mark_model(model: nn.Module, recorder: Recorder, *, with_parameters: bool = True) -> None:
    """Parameters, unless they are in another memory, and buffers, as there before the first step."""
    parameters = dict(model.named_parameters()) if with_parameters else {}
    for tensors in (parameters, dict(model.named_buffers())):
        recorder.mark(tensors.values(), Category.PARAMETERS, tensors)


def mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    """The gradients that parameters hold now."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    recorder.mark(gradients.values(), Category.GRADIENTS, gradients)


def mark_state(optimizer: Optimizer, model: nn.Module, recorder: Recorder) -> None:
    """The tensors an optimizer keeps between steps, named after their parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"{names.get(id(parameter), 'parameter')} {key.removeprefix('batch')}": value
        for parameter, values in optimizer.state.items()
        for key, value in named_tensors(values)
    }
    recorder.mark(state.values(), Category.OPTIMIZER_STATE, state)


def copy_to_device(batch: Batch, recorder: Recorder) -> Batch:
    """A copy of a host batch on the device, recorded as the step's input."""
    moved = map_tensors(batch, recorder.empty_copy)
    names, tensors = zip(*named_tensors(moved), strict=True)
    recorder.mark(tensors, Category.INPUTS, names)
    return moved
