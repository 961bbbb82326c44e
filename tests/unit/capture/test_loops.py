"""A user's own training loop is captured as it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brimful.capture import capture_step
from brimful.errors import CaptureError
from brimful.memory import live_profile, predict_memory
from brimful.prediction import estimate_trace
from brimful.prediction.growth import growth_notes
from brimful.settings import Settings
from brimful.trace import Category, Phase, Trace
from helpers.captured_jobs import A100, CPU, bytes_of, cross_entropy, job, loop_of

SAMPLES, WIDTH, CLASSES = 64, 512, 4096
LOGITS_BYTES = SAMPLES * CLASSES * 4
PARAMETER_BYTES = (WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES) * 4

Loop = Callable[[nn.Module, Iterable[Any]], object]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.randint(0, CLASSES, (samples,))}


def on_gpu(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(network(batch["x"].cuda()), batch["y"].cuda())


def captured(loop: Loop, device: Any = A100, steps: int = 3) -> Trace:
    the_job = job(model, cross_entropy, rows, loop=loop)
    return capture_step(the_job, Settings(micro_batch_size=SAMPLES), device, steps=steps)


def peak(loop: Loop) -> int:
    return predict_memory(captured(loop)).peak_allocated_bytes


def plain(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
    optimizer = torch.optim.SGD(network.parameters())
    for batch in batches:
        x, y = batch["x"].to("cuda"), batch["y"].cuda()
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_plain_loop_holds_parameters_gradients_and_the_batch() -> None:
    trace = captured(plain)
    held = {
        category: sum(s.size_bytes for s in trace.storages if s.category is category) for category in Category
    }
    assert held[Category.PARAMETERS] == PARAMETER_BYTES
    assert held[Category.INPUTS] == 3 * (SAMPLES * WIDTH * 4 + SAMPLES * 8)
    assert held[Category.GRADIENTS] == 3 * PARAMETER_BYTES
    assert {op.phase for op in trace.ops} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert max(op.step for op in trace.ops) == 2


def test_gradients_that_are_cleared_early_are_not_there_in_forward() -> None:
    def cleared_first(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            optimizer.zero_grad()
            on_gpu(network, batch).backward()
            optimizer.step()

    def kept(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            optimizer.zero_grad(set_to_none=False)
            on_gpu(network, batch).backward()
            optimizer.step()

    def forward_peak(loop: Loop) -> int:
        trace = captured(loop)
        profile = live_profile(trace, 512)
        last = [i for i, event in enumerate(trace.events) if event.op >= 0 and trace.ops[event.op].step == 2]
        forward = [i for i in last if trace.ops[trace.events[i].op].phase is Phase.FORWARD]
        return max(int(profile.live_bytes[i]) for i in forward)

    assert forward_peak(kept) - forward_peak(cleared_first) == pytest.approx(PARAMETER_BYTES, rel=0.01)


def test_outputs_that_stay_alive_until_the_next_forward_returns_count() -> None:
    def dropped(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            logits = network(batch["x"].cuda())
            F.cross_entropy(logits, batch["y"].cuda()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()

    def kept(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            logits = network(batch["x"].cuda())
            F.cross_entropy(logits, batch["y"].cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def live_at_end(loop: Loop) -> int:
        trace = captured(loop)
        positions = [
            i for i, event in enumerate(trace.events) if event.op >= 0 and trace.ops[event.op].step == 2
        ]
        return int(live_profile(trace, 512).live_bytes[positions[0] - 1])

    assert live_at_end(kept) - live_at_end(dropped) == pytest.approx(LOGITS_BYTES, rel=0.01)


def test_an_average_of_weights_takes_a_copy_of_the_parameters() -> None:
    def averaged(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        average = copy.deepcopy(network)
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            loss = on_gpu(network, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), network.parameters(), strict=True):
                    mean.lerp_(parameter, 0.01)

    assert peak(averaged) - peak(plain) == pytest.approx(PARAMETER_BYTES, rel=0.01)


def test_gradient_clipping_takes_next_to_nothing() -> None:
    def clipped(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            loss = on_gpu(network, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()

    assert abs(peak(clipped) - peak(plain)) < 2**20


def test_two_optimizers_of_one_batch_make_one_step() -> None:
    def adversarial(network: Any, batches: Iterable[dict[str, Tensor]]) -> None:
        first = torch.optim.Adam(network[0].parameters())
        second = torch.optim.Adam(network[2].parameters())
        for batch in batches:
            x, y = batch["x"].cuda(), batch["y"].cuda()
            F.cross_entropy(network(x).detach() + network[2](network[0](x)), y).backward()
            first.step()
            F.cross_entropy(network(x), y).backward()
            second.step()
            network.zero_grad()

    trace = captured(adversarial)
    state = [s for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.size_bytes > 4]
    assert sum(s.size_bytes for s in state) == 2 * PARAMETER_BYTES
    assert max(op.step for op in trace.ops) == 2


def test_a_loop_with_cuda_autocast_and_a_scaler_runs_in_half_precision() -> None:
    def mixed(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters(), momentum=0.9)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(network(batch["x"].to("cuda")), batch["y"].to("cuda"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    trace = captured(mixed)
    assert {op.dtype for op in trace.ops if op.name == "aten.addmm.default"} == {"float16"}
    assert any(op.phase is Phase.OPTIMIZER for op in trace.ops if op.step == 2)


def test_backward_goes_on_after_a_reentrant_checkpoint_inside_it() -> None:
    def checkpointing(network: Any, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            optimizer.zero_grad()
            hidden = checkpoint(network[1], network[0](batch["x"].cuda()), use_reentrant=True)
            F.cross_entropy(network[2](hidden), batch["y"].cuda()).backward()
            optimizer.step()

    trace = captured(checkpointing)
    last_gradient = [op for op in trace.ops if op.name == "aten.mm.default"][-1]
    assert last_gradient.phase is Phase.BACKWARD


def test_an_estimate_of_a_loop_says_so() -> None:
    assert "the job's own loop, batches of 64" in str(estimate_trace(captured(plain), A100))


def test_a_loop_that_never_ends_is_ended() -> None:
    def endless(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        while True:
            for batch in batches:
                on_gpu(network, batch).backward()
                optimizer.step()

    assert captured(endless).captured_steps == 3


def test_loops_that_take_no_batch_or_make_no_step_are_refused() -> None:
    with pytest.raises(CaptureError, match="took no batch from its iterator"):
        captured(lambda network, batches: None)
    with pytest.raises(CaptureError, match="no optimizer step in 64 micro-batches"):
        captured(lambda network, batches: [network(batch["x"].cuda()).sum().backward() for batch in batches])


def test_a_loop_runs_on_a_cpu_too() -> None:
    assert predict_memory(captured(loop_of(cross_entropy), CPU)).peak_allocated_bytes > 2 * PARAMETER_BYTES


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_loop_that_accumulates_gradients_is_followed_through_whole_steps(count: int) -> None:
    trace = captured(loop_of(on_gpu, every=count))
    assert (trace.captured_steps, trace.captured_micro_batches) == (3, count)
    assert max(op.step for op in trace.ops) == 2
    assert max(op.micro_batch for op in trace.ops) == count - 1
    assert trace.settings.global_batch_size == SAMPLES * count
    one, estimate = estimate_trace(captured(plain), A100), estimate_trace(trace, A100)
    per_sample = estimate.predicted_step_seconds / count
    assert per_sample == pytest.approx(one.predicted_step_seconds, rel=0.2)
    assert f"{count} to an optimizer step" in str(estimate) or count == 1
    rules = {rule.name for rule in estimate.corrections if rule.occurrences}
    assert rules == {rule.name for rule in one.corrections if rule.occurrences}


def test_a_loop_that_converts_its_model_has_the_converted_parameters() -> None:
    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(network(batch["x"].to("cuda", torch.bfloat16)), batch["y"].cuda())

        loop_of(loss)(network.to(torch.bfloat16), batches)

    estimate = estimate_trace(captured(loop), A100)
    held = dict(estimate.breakdown)
    assert held[Category.PARAMETERS] == pytest.approx(PARAMETER_BYTES / 2, rel=0.01)
    saving = {phase.name: phase.predicted_peak_allocated_bytes for phase in estimate.phases}["saving weights"]
    assert saving == PARAMETER_BYTES / 2


def checking(check: Callable[[Tensor], bool]) -> Loop:
    """A plain loop that stops if a check of its loss says so."""

    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            loss = on_gpu(network, batch)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            if check(loss) or check(norm):
                raise RuntimeError("something is wrong with the loss")
            optimizer.step()

    return loop


@pytest.mark.parametrize(
    "check",
    [
        lambda x: torch.isnan(x),
        lambda x: bool(torch.isnan(x).any() or torch.isinf(x)),
        lambda x: not torch.isfinite(x),
        lambda x: x > 1e4,
        lambda x: x < 0.01,
        lambda x: bool((x != x).any()),
    ],
)
def test_a_loop_that_checks_its_loss_finds_nothing_wrong(check: Callable[[Tensor], bool]) -> None:
    trace = captured(checking(check))
    assert trace.captured_steps == 3
    assert any("answered as if they were 1" in uncertain for uncertain in trace.uncertain_ops)


def test_a_batch_that_is_moved_where_torch_sees_a_device_counts_as_copied() -> None:
    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(next(network.parameters()).device)
            return F.cross_entropy(network(x), y)

        loop_of(loss)(network.to(device), batches)

    assert bytes_of(captured(loop), Category.INPUTS) == 3 * (SAMPLES * WIDTH * 4 + SAMPLES * 8)


def test_what_saving_takes_is_what_there_is_after_a_step() -> None:
    phases = {
        phase.name: phase for phase in estimate_trace(captured(loop_of(on_gpu, torch.optim.Adam)), A100).phases
    }
    assert phases["saving weights"].predicted_peak_allocated_bytes == pytest.approx(
        3 * PARAMETER_BYTES, rel=0.01
    )


def lbfgs(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
    optimizer = torch.optim.LBFGS(network.parameters(), history_size=7, max_iter=4)
    for batch in batches:

        def closure(batch: dict[str, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(batch["x"]), batch["y"])
            loss.backward()
            return loss

        optimizer.step(closure)


def test_the_steps_of_lbfgs_are_captured_with_all_iterations_and_a_full_history() -> None:
    trace = captured(lbfgs, CPU)
    forwards = [op for op in trace.ops if op.name == "aten.addmm.default" and op.step == 2]
    assert {op.phase for op in forwards} == {Phase.FORWARD}
    assert len(forwards) == 2 * 4  # two layers; the first iteration uses the first of the closure's calls
    state = [s for s in trace.storages if s.category is Category.OPTIMIZER_STATE]
    assert sum(s.size_bytes == PARAMETER_BYTES for s in state) >= 2 * 7
    assert any("a full history of 7" in note for note in trace.uncertain_ops)


def keeping(what: Callable[[Tensor], object], most: int) -> Loop:
    """A plain loop that keeps something of its latest losses."""

    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters(), momentum=0.9)
        kept: list[object] = []
        for batch in batches:
            loss = on_gpu(network, batch)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            kept = [*kept, what(loss)][-most:]

    return loop


def test_an_estimate_says_where_memory_grows_with_every_step() -> None:
    (note,) = growth_notes(captured(keeping(lambda loss: loss, most=1000)))
    assert "in the last of 3 steps" in note
    assert "loss.item()" in note


@pytest.mark.parametrize(
    ("what", "most"),
    [(lambda loss: loss.item(), 1000), (lambda loss: loss.detach(), 1000), (lambda loss: loss, 1)],
)
def test_a_loop_that_keeps_no_more_from_step_to_step_is_not_said_to_grow(
    what: Callable[[Tensor], object], most: int
) -> None:
    assert growth_notes(captured(keeping(what, most))) == ()


def test_a_loop_may_ask_for_more_batches_than_there_are() -> None:
    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        waiting = iter(batches)
        for _ in range(100):
            batch = next(waiting)
            on_gpu(network, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert captured(loop).captured_steps == 3


def test_an_iterator_of_the_loops_own_that_ends_is_an_error() -> None:
    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        for batch in batches:
            network(batch["x"].cuda()).sum().backward()
            next(iter(()))

    with pytest.raises(CaptureError, match="StopIteration"):
        captured(loop)
