"""One op at a time: what its forward and its backward take beside inputs and results.

The same loop runs on a GPU, under torch's memory history, and in brimful's capture of a tiny job. In both,
allocations of a size that nothing else has mark where forward and backward begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import Device
from brimful.execution.precision import matmul_precision
from brimful.job import Job
from brimful.settings import Precision, Settings
from gpu.allocations import (
    Allocations,
    captured_history,
    in_numbers,
    parts_between,
    start_history,
    stop_history,
)

PASSES = 3
"""The first takes workspaces that stay; the last is the one that is told."""
CAPTURED_PASSES = 2
MARKER_BYTES = 1_000_003
"""A prime, so that no tensor of a case has as many bytes."""

Input = Callable[[torch.device | str], Tensor]
"""Makes an input on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op on inputs of one size."""

    name: str
    group: str
    """Cases of a group run in one process."""
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    toy_inputs: tuple[Input, ...] | None
    """For a run without a GPU; None where the op runs on CUDA only."""
    precision: Precision = Precision.FP32
    """TF32 permits it; all else is up to the types of weights and inputs."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    """The op is its step, on random gradients."""
    note: Callable[[tuple[Tensor, ...]], str] | None = None
    """Says something about the inputs on the GPU, such as which kernel is chosen."""


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any], *parameters: nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(parameters)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.weights, *inputs)


def predict_operation(case: Case, device: Device) -> dict[str, Any]:
    """Parts as `measure_operation` tells them, from a capture for `device`."""

    def loop(model: nn.Module, batches: Iterable[Any]) -> None:
        run = _Passes(case, model, case.inputs, "cuda")
        for _ in batches:
            run()

    job = Job(
        model=lambda: _Holder(case.make()),
        loss=lambda _model, _batch: torch.zeros(()),
        batch=lambda samples: torch.zeros(samples, 1),
        loop=loop,
        name=case.name,
    )
    settings = Settings(micro_batch_size=1, precision=case.precision)
    trace = capture_step(job, settings, device, steps=CAPTURED_PASSES)
    return {
        "predicted": _last_pass(in_numbers(captured_history(trace)), case),
        "corrections": {
            each.name: [each.occurrences, each.changed_bytes] for each in trace.corrections if each.occurrences
        },
        "uncertain_ops": list(trace.uncertain_ops),
    }


def measure_operation(case: Case, device: torch.device) -> dict[str, Any]:
    """Run the op on a GPU.

    Returns:
        `measured`: its parts, "forward" and "backward" or "step", as `allocations.parts_between` tells them.
    """
    model = _Holder(case.make().to(device))
    run = _Passes(case, model, case.inputs, device)
    start_history()
    with matmul_precision(case.precision):
        for _ in range(PASSES):
            run()
    history = in_numbers(stop_history(device))
    return {"measured": _last_pass(history, case), "note": _note(case, device)}


def _note(case: Case, device: torch.device) -> str | None:
    if case.note is None:
        return None
    try:
        return case.note(tuple(make(device) for make in case.inputs))
    except (RuntimeError, TypeError) as error:  # it asks a private function
        return str(error)[:200]


def rehearse_operation(case: Case) -> dict[str, Any]:
    """Run the same loop on a CPU at toy size; nothing is measured."""
    if case.toy_inputs is None:
        return {"measured": None, "note": "runs on CUDA only"}
    _Passes(case, _Holder(case.make()), case.toy_inputs, "cpu")()
    return {"measured": None, "note": None}


class _Holder(nn.Module):
    """The op's module, beside one parameter, so that there is something for an optimizer to step."""

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.operation = operation
        self.anchor = nn.Parameter(torch.zeros(1))


class _Passes:
    """Runs forward and backward once a call, between marks."""

    def __init__(self, case: Case, model: Any, inputs: tuple[Input, ...], device: torch.device | str) -> None:
        self._case, self._model, self._inputs, self._device = case, model, inputs, device
        make_optimizer = case.optimizer or (lambda _parameters: torch.optim.SGD([model.anchor]))
        self._optimizer = make_optimizer(list(model.operation.parameters()))

    def __call__(self) -> None:
        if self._case.optimizer is not None:
            for parameter in self._model.operation.parameters():
                parameter.grad = torch.empty_like(parameter).normal_()
            self._mark()
            self._optimizer.step()
            self._mark()
        else:
            self._forward_and_backward()
            self._optimizer.step()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _forward_and_backward(self) -> None:
        inputs = tuple(make(self._device) for make in self._inputs)
        self._mark()
        results = self._model.operation(*inputs)
        self._mark()
        outputs = [tensor for tensor in _tensors(results) if tensor.requires_grad]
        gradients = [torch.empty_like(output).normal_() for output in outputs]
        self._mark()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        self._mark()

    def _mark(self) -> None:
        torch.empty(MARKER_BYTES, dtype=torch.uint8, device=self._device)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _last_pass(history: Allocations, case: Case) -> dict[str, Any]:
    """The parts of the last pass by name; between forward and backward the gradients are made."""
    names = ("step",) if case.optimizer is not None else ("forward", None, "backward")
    parts = parts_between(history, MARKER_BYTES)
    last = parts[len(parts) - len(names) :]
    return {name: part for name, part in zip(names, last, strict=True) if name is not None}
