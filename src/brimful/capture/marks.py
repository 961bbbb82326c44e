"""Marks the contents of a training step's tensors in the recorder."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import InputMover, named_tensors
from brimful.capture.recording.places import Place
from brimful.capture.recording.recorder import Recorder
from brimful.execution.attached import attached_tensors
from brimful.job import Batch
from brimful.torch_utils.module_names import plain_namer
from brimful.torch_utils.wrapper_tensors import with_inner_tensors
from brimful.trace import Category


def mark_model(model: nn.Module, recorder: Recorder, *, with_parameters: bool = True) -> None:
    """Mark parameters, buffers and what libraries attach to parameters, as there before the first step.

    Without `with_parameters`, parameters are in another memory and are not marked.
    """
    plain_name = plain_namer(model)
    parameters = with_inner_tensors(dict(model.named_parameters())) if with_parameters else {}
    buffers = with_inner_tensors(dict(model.named_buffers()))
    for tensors in (parameters, buffers, attached_tensors(model)):
        recorder.mark(tensors.values(), Category.PARAMETERS, map(plain_name, tensors))


def mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    """Mark the gradients that parameters hold now."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    recorder.mark(gradients.values(), Category.GRADIENTS, map(plain_namer(model), gradients))


def mark_state(optimizer: Optimizer, model: nn.Module, recorder: Recorder) -> None:
    """Mark the tensors that an optimizer keeps on the device between steps, named after their parameters."""
    plain_name = plain_namer(model)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    state = {
        f"{names.get(id(parameter), 'parameter')} {key.removeprefix('batch')}": value
        for parameter, values in optimizer.state.items()
        for key, value in named_tensors(values)
        if not recorder.places.is_on_host(value)
    }
    recorder.mark(state.values(), Category.OPTIMIZER_STATE, state)


def mark_batch(batch: Batch, recorder: Recorder) -> None:
    """Mark a batch that is in the device's memory, as there before the first step."""
    tensors = dict(named_tensors(batch))
    recorder.mark(tensors.values(), Category.INPUTS, tensors)
    indices = (recorder.ledger.index_of(tensor) for tensor in tensors.values() if tensor.dim())
    recorder.facts.global_batch = tuple(dict.fromkeys(index for index in indices if index is not None))


def mark_input(recorder: Recorder, path: str, tensor: Tensor) -> None:
    """Mark a tensor of a micro-batch that was converted to another memory format on the device."""
    recorder.mark([tensor], Category.INPUTS, [path])


def input_mover(recorder: Recorder, *, repeats: bool = False) -> InputMover:
    """A mover that brings micro-batches to the device, recorded as the step's input; see `InputMover.to`."""

    def copied(path: str, tensor: Tensor) -> Tensor:
        with recorder.places.making(Place.DEVICE):
            copy = recorder.values.empty_copy(tensor)
        recorder.mark([copy], Category.INPUTS, [path])
        return copy

    return InputMover(copied, is_there=recorder.host_is_device and not repeats)
