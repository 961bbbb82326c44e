"""What a training loop keeps beside the model: scalers, averages, gradients, outputs. All of it is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.memory import predict_memory
from brimful.settings import Precision
from brimful.trace import Category, Phase, Trace
from helpers.captured_jobs import (
    A100,
    CLASSES,
    HIDDEN,
    INPUTS,
    SAMPLES,
    bytes_of,
    capture,
    cross_entropy,
    job,
    made_by,
    mlp,
    ops,
)


def looped(loop: Any, model: Any = mlp) -> Trace:
    return capture(job(model, loop=loop), A100)


def test_a_loss_scaler_keeps_its_scale_and_unscales_in_place() -> None:
    trace = capture(job(), A100, precision=Precision.FP16)
    unscaled = [
        op for op in trace.ops if "_amp_foreach_non_finite_check_and_unscale_" in op.name and op.step == 0
    ]
    assert unscaled
    assert all(op.phase is Phase.OPTIMIZER for op in unscaled)
    made = made_by(trace, "aten._amp_foreach_non_finite_check_and_unscale_", Phase.OPTIMIZER)
    assert not made
    scale_and_tracker = [s.size_bytes for s in made_by(trace, "aten.full", Phase.BACKWARD)]
    assert scale_and_tracker == [4, 4]  # a float32 and an int32


def test_a_fused_optimizer_takes_nothing_beside_its_state() -> None:
    fused = capture(job(optimizer=lambda p: torch.optim.AdamW(p, fused=True)), A100)
    assert not ops(fused, "aten._foreach_sqrt")
    assert ops(fused, "aten._fused_adamw")
    plain = capture(job(), A100)
    in_step = {
        name: sum(
            s.size_bytes
            for s in made_by(trace, "aten.", Phase.OPTIMIZER)
            if s.category is not Category.OPTIMIZER_STATE
        )
        for name, trace in (("fused", fused), ("plain", plain))
    }
    assert in_step["plain"] - in_step["fused"] >= 4 * plain.parameter_count


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    def half_frozen() -> nn.Module:
        model = mlp()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    trace = capture(job(half_frozen), A100)
    trained = HIDDEN * CLASSES + CLASSES
    gradients = [s.size_bytes for s in trace.storages if s.category is Category.GRADIENTS]
    assert sum(gradients) == trace.captured_steps * 4 * trained
    state = [s.size_bytes for s in trace.storages if s.category is Category.OPTIMIZER_STATE if s.size_bytes > 4]
    assert sum(state) == 2 * 4 * trained


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS, bias=False)
        self.second = nn.Linear(INPUTS, INPUTS, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def test_tied_weights_are_there_once_and_their_gradients_are_added() -> None:
    trace = capture(job(Tied), A100)
    shared = INPUTS * INPUTS * 4
    parameters = [s.size_bytes for s in trace.storages if s.category is Category.PARAMETERS]
    assert parameters.count(shared) == 1
    gradients = [s.size_bytes for s in made_by(trace, "aten.mm", Phase.BACKWARD)]
    assert gradients.count(shared) == 2


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["x"])
    F.cross_entropy(outputs, batch["y"]).backward()
    optimizer.step()
    return outputs


def test_gradients_that_are_zeroed_stay_where_they_are() -> None:
    def loop(set_to_none: bool) -> Any:
        def run(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in batches:
                step(model, optimizer, batch)
                optimizer.zero_grad(set_to_none=set_to_none)

        return run

    kept, dropped = looped(loop(False)), looped(loop(True))
    assert bytes_of(dropped, Category.GRADIENTS) == dropped.captured_steps * 4 * dropped.parameter_count
    # zeroed gradients are added to: the first step's blocks stay, the second step's are temporaries
    assert bytes_of(kept, Category.GRADIENTS) == 4 * kept.parameter_count
    assert predict_memory(kept).peak_allocated_bytes >= predict_memory(dropped).peak_allocated_bytes


def test_an_average_of_the_weights_is_one_more_copy() -> None:
    def loop(averages: bool) -> Any:
        def run(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            average = [p.detach().clone() for p in model.parameters()] if averages else []
            for batch in batches:
                step(model, optimizer, batch)
                optimizer.zero_grad()
                torch._foreach_lerp_(
                    average, [p.detach() for p in model.parameters()], 0.1
                ) if averages else None

        return run

    with_average, without = looped(loop(True)), looped(loop(False))
    more = predict_memory(with_average).peak_allocated_bytes - predict_memory(without).peak_allocated_bytes
    assert more >= 4 * without.parameter_count  # blocks are of 512 bytes
    assert more <= 4 * without.parameter_count + 512 * 4


def test_outputs_that_a_loop_holds_live_through_the_next_forward_pass() -> None:
    def loop(holds: bool) -> Any:
        def run(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in batches:
                optimizer.zero_grad()
                outputs = step(model, optimizer, batch)
                if not holds:
                    del outputs

        return run

    def freed_in(trace: Trace) -> int:
        """The step in which the first step's outputs are freed."""
        (index,) = [
            index
            for index, s in enumerate(trace.storages)
            if s.op is not None
            and s.size_bytes == SAMPLES * CLASSES * 4
            and trace.ops[s.op].name == "aten.addmm.default"
            and trace.ops[s.op].step == 0
        ]
        (event,) = [e for e in trace.events if e.storage == index and e.kind == "free"]
        return trace.ops[event.op].step

    assert freed_in(looped(loop(holds=True))) == 1
    assert freed_in(looped(loop(holds=False))) == 0


def test_the_loss_of_a_job_is_the_one_that_is_trained() -> None:
    assert ops(capture(job(loss=cross_entropy), A100), "aten.nll_loss_forward")
