"""Captures of a part of a step: forward and backward without the optimizer, or the optimizer without them.

`recording/update.py` joins the two. Where parts meet is noted here, and what runs in place of the other part.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch._C.DisableTorchFunction` (checked: torch
2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful.capture.corrections import Rule
from brimful.capture.recording.recorder import Recorder
from brimful.capture.recording.update import Gradient, Recorded, RecordedPart, later_ops
from brimful.execution.hooks import StepHooks
from brimful.job import Batch
from brimful.torch_utils.replaced import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """The part of a step that a capture runs; by default all of it."""

    has_model: bool = True
    """Forward and backward."""
    has_update: bool = True
    """The optimizer, its state and its update."""
    gradients: tuple[Gradient, ...] = ()
    """Without a model: the gradients that the optimizer is given."""


ALL_OF_STEP = StepPart()


class Seams:
    """Notes where a step begins, where its gradients are complete, and where its update ends.

    `names` has the names of parameters, by id.
    """

    def __init__(self, part: StepPart, model: nn.Module, recorder: Recorder, names: Mapping[int, str]) -> None:
        self._part, self._model, self._recorder, self._names = part, model, recorder, names
        self._forward = self._update = self._updated = recorder.mark_here()
        self._gradients: tuple[Gradient, ...] | None = None

    def hooks(self, hooks: StepHooks) -> StepHooks:
        """The hooks of a step, with what runs in place of the other part."""
        if not self._part.has_update:
            return replace(hooks, clip=self._not_clipped, call_update=self._skipped)
        return hooks if self._part.has_model else replace(hooks, loss=self._given)

    def step_began(self) -> None:
        """Note where the setup ended."""
        self._forward = self._recorder.mark_here()

    def backward_ended(self) -> None:
        """Note the gradients, which are complete."""
        self._gradients = self._gradients_now()
        self._update = self._recorder.mark_here()

    def recorded(self, optimizer: Optimizer, rules: list[Rule]) -> RecordedPart | None:
        """What the capture recorded so far, as a part of the step; None where it depends on the other part.

        The part does not have what tensors release from now on.
        """
        recorder = self._recorder
        facts = recorder.facts
        if self._part.has_model:
            is_apart = not optimizer.state
        else:
            lasting = (count for rule in rules if rule.lasts for count in rule.counted)
            is_apart = not facts.all_uncertain and all(op < self._forward.ops for op, *_ in lasting)
        if self._gradients is None or not is_apart:
            return None
        return RecordedPart(
            recorded=recorded_by(recorder),
            forward=self._forward,
            update=self._update,
            updated=self._updated,
            gradients=self._gradients,
            host_state_bytes=facts.host_state_bytes,
            host_staging_bytes=facts.host_staging_bytes,
            paged_state_bytes=facts.paged_state_bytes,
            counts={rule.name: tuple(rule.counted) for rule in rules},
        )

    def _gradients_now(self) -> tuple[Gradient, ...] | None:
        """The gradients of all parameters; None if one is not a dense fake tensor."""
        found = []
        with torch._C.DisableTorchFunction():
            for parameter in self._model.parameters():
                gradient = parameter.grad
                if gradient is None:
                    continue
                if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
                    return None
                name = self._names[id(parameter)]
                found.append(Gradient(name, tuple(gradient.shape), gradient.stride(), gradient.dtype))
        return tuple(found)

    def _given(self, model: nn.Module, _batch: Batch) -> Tensor:
        """A loss that sets the given gradients, in place of the model."""
        given = {gradient.parameter: gradient for gradient in self._part.gradients}
        with self._recorder.paused(), torch.no_grad():
            for parameter in model.parameters():
                gradient = given.get(self._names[id(parameter)])
                if gradient is not None:
                    parameter.grad = torch.empty_strided(gradient.shape, gradient.stride, dtype=gradient.dtype)
        return torch.zeros((), requires_grad=True)

    def _not_clipped(self, _optimizer: Optimizer, _max_norm: float | None) -> Tensor:
        with self._recorder.paused():
            return torch.zeros(())

    def _skipped(self, _update: Callable[[], object]) -> None:
        self._updated = self._recorder.mark_here()


@contextmanager
def scaler_without_update() -> Iterator[None]:
    """Let a loss scaler scale the loss and leave gradients as they are, for a part without the update.

    Source: torch/amp/grad_scaler.py (checked: 2.13, 2.11).
    """

    def step(_scaler: GradScaler, optimizer: Optimizer) -> None:
        optimizer.step()

    def unused(*_args: object) -> None:
        """Nothing is unscaled, and no scale is updated."""

    with ExitStack() as stack:
        for name, instead in {"unscale_": unused, "step": step, "update": unused}.items():
            stack.enter_context(replaced(GradScaler, name, instead))
        yield


def recorded_by(recorder: Recorder) -> Recorded:
    """The ops and blocks that a recorder has recorded so far."""
    return Recorded(tuple(recorder.ops), tuple(recorder.ledger.blocks), tuple(recorder.ledger.events))


def join_counts(rules: list[Rule], model: RecordedPart, update: RecordedPart) -> None:
    """Set what corrections counted to the counts of the whole step.

    `rules` are those of the capture of `model`, which is forward and backward as `after_setup` returns them. Of
    `update`, the optimizer's update counts, and what stays that its setup made.
    """
    of_model, of_update = later_ops(model, update)
    for rule in rules:
        counts = update.counts.get(rule.name, ())
        rule.counted[:] = [
            *(count for count in counts if count[0] < update.forward.ops),
            *(
                (op + of_model, times, added)
                for op, times, added in model.counts[rule.name]
                if op >= model.forward.ops
            ),
            *((op + of_update, times, added) for op, times, added in counts if op >= update.update.ops),
        ]
        rule.occurrences = sum(times for _, times, _ in rule.counted)
        rule.changed_bytes = sum(added for _, _, added in rule.counted)
