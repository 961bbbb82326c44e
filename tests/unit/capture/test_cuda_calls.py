"""Loops for a GPU are captured on a machine without one, with the calls that only a GPU answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda.amp.common import amp_definitely_not_available
from torch.nn.attention.flex_attention import flex_attention

import brimful as bf
from brimful.capture import capture_step
from brimful.errors import CaptureError, UsageError
from brimful.memory import predict_memory
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.utils.quantities import format_bytes
from helpers.captured_jobs import A100, CPU, job, loop_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers for itself")

WIDTH, SAMPLES = 64, 8


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH)}


def square(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = network(batch["x"]).square().mean()
    return loss


def captured(after_step: Callable[[nn.Module], object], device: Any = A100) -> Trace:
    def loop(network: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in batches:
            optimizer.zero_grad()
            square(network, {"x": batch["x"].to("cuda")}).backward()
            optimizer.step()
            after_step(network)

    the_job = job(lambda: nn.Linear(WIDTH, WIDTH), square, rows, loop=loop)
    return capture_step(the_job, Settings(micro_batch_size=SAMPLES), device, steps=3)


def nothing(_network: nn.Module) -> None:
    pass


def timed(_network: nn.Module) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0


def streamed(_network: nn.Module) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("copy"):
        pass


def measured(_network: nn.Module) -> None:
    held = torch.cuda.memory_allocated()
    assert held >= 2 * WIDTH * (WIDTH + 1) * 4  # parameters and gradients
    assert torch.cuda.max_memory_allocated() >= held
    free, capacity = torch.cuda.mem_get_info()
    assert free + held == capacity == A100.capacity_bytes
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()


def named(_network: nn.Module) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name(0) == A100.name
    assert torch.cuda.get_device_properties(0).total_memory == A100.capacity_bytes
    assert torch.cuda.is_bf16_supported()


def drawn(_network: nn.Module) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.randperm(4, generator=torch.Generator(device=device).manual_seed(1), device=device)


@pytest.mark.parametrize("after_step", [timed, streamed, measured, named, drawn])
def test_a_loop_that_calls_a_gpu_takes_what_it_takes_without_the_calls(
    after_step: Callable[[nn.Module], object],
) -> None:
    trace = captured(after_step)
    assert predict_memory(trace).peak_allocated_bytes == pytest.approx(
        predict_memory(captured(nothing)).peak_allocated_bytes, rel=0.001
    )
    assert not torch.cuda.is_available()


def test_libraries_find_no_gpu_while_a_step_is_captured() -> None:
    found: list[bool] = []
    captured(lambda _network: found.append(amp_definitely_not_available()))
    assert found == [True] * 3


def test_a_checkpoint_that_a_loop_saves_is_left_as_it_was(tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.pt"
    torch.save({"step": 7}, checkpoint)
    trace = captured(lambda network: torch.save(network.state_dict(), checkpoint))
    assert trace.captured_steps == 3
    assert torch.load(checkpoint) == {"step": 7}


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.mixed(x).view(len(x), -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(query, key, value)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.arange(len(x) + 1) * x.shape[1]
        nested = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets)
        values: Tensor = self.mixed(nested).values()
        return values


@pytest.mark.parametrize(
    ("model", "hint"),
    [(Flex, "Take F.scaled_dot_product_attention"), (Jagged, "Pad the samples and mask them")],
)
@pytest.mark.parametrize("device", [A100, CPU])
def test_what_cannot_be_captured_is_refused_with_what_to_take_instead(
    model: Callable[[], nn.Module], hint: str, device: Any
) -> None:
    the_job = job(model, square, lambda samples: {"x": torch.randn(samples, 32, WIDTH)})
    with pytest.raises(CaptureError, match=hint) as refused:
        capture_step(the_job, Settings(micro_batch_size=4), device)
    assert "the error is the job's own" not in str(refused.value)


def in_replicas(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.DataParallel(network)(batch["x"]).square().mean()


def in_replicas_by_the_function(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.parallel.data_parallel(network, batch["x"]).square().mean()


def by_the_function_with_keywords(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.parallel.data_parallel(network, (), module_kwargs={"input": batch["x"]}).square().mean()


@pytest.mark.parametrize("loss", [in_replicas, in_replicas_by_the_function, by_the_function_with_keywords])
@pytest.mark.parametrize("has_own_loop", [False, True])
def test_a_loss_or_loop_that_spreads_its_batch_over_gpus_is_refused(
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor], has_own_loop: bool
) -> None:
    """It would be predicted as one GPU."""
    the_job = job(lambda: nn.Linear(WIDTH, WIDTH), loss, rows, loop=loop_of(loss) if has_own_loop else None)
    forward, function = nn.DataParallel.forward, nn.parallel.data_parallel
    with pytest.raises(UsageError, match=r"calls (an )?nn\..*world_size=N") as refused:
        capture_step(the_job, Settings(micro_batch_size=SAMPLES), A100)
    gathered = format_bytes(SAMPLES * WIDTH * 4)
    assert f"the outputs of the whole batch ({gathered} for this batch)" in str(refused.value)
    assert (nn.DataParallel.forward, nn.parallel.data_parallel) == (forward, function)


@pytest.mark.parametrize("spread", [in_replicas, in_replicas_by_the_function])
def test_what_spreads_its_batch_is_refused_also_where_its_forward_fails(
    spread: Callable[[nn.Module, dict[str, Tensor]], Tensor],
) -> None:
    too_wide = job(lambda: nn.Linear(WIDTH + 1, WIDTH), spread, rows)
    with pytest.raises(UsageError, match=r"the outputs of the whole batch, as much"):
        capture_step(too_wide, Settings(micro_batch_size=SAMPLES), A100)


@pytest.mark.parametrize(
    ("move", "number_bytes"),
    [(lambda net: net.cuda(device=0), 4), (lambda net: net.to("cuda", torch.bfloat16), 2)],
)
def test_a_model_may_be_moved_to_the_gpu_where_it_is_built(
    move: Callable[[nn.Module], nn.Module], number_bytes: int
) -> None:
    def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        dtype = next(network.parameters()).dtype
        return network(batch["x"].to(dtype)).float().square().mean()

    trace = capture_step(
        job(lambda: move(nn.Linear(WIDTH, WIDTH)), loss, rows), Settings(micro_batch_size=SAMPLES), A100
    )
    assert {s.size_bytes for s in trace.storages if s.label == "weight"} == {WIDTH * WIDTH * number_bytes}


def test_a_generator_of_the_gpu_is_one_of_torchs() -> None:
    found: list[bool] = []

    def draw(_network: nn.Module) -> None:
        found.append(isinstance(torch.Generator(device="cuda"), torch.Generator))

    captured(draw)
    assert found
    assert all(found)


def test_a_tensor_goes_where_another_one_is() -> None:
    """As Adafactor of transformers does: `torch.zeros(…).to(gradient)`."""

    def loop(model: nn.Module, batches: Iterable[Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            batch = batch.to("cuda")
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                state = torch.zeros(parameter.shape).to(parameter.grad)
                parameter.data.add_(state.mul_(2))
                beside = torch.zeros(4).to(torch.ones(4))
                beside.add_(1)
            optimizer.step()
            optimizer.zero_grad()

    adds = bf.Job(
        model=lambda: nn.Linear(64, 64, bias=False),
        loss=lambda model, x: model(x).mean(),
        batch=lambda count: torch.zeros(count, 64),
        loop=loop,
    )
    trace = capture_step(adds, Settings(micro_batch_size=2), A100, steps=2)
    scaled = [op for op in trace.ops if op.name == "aten.mul_.Tensor"]
    assert scaled
    assert not any(op.on_host for op in scaled)
    beside = [op for op in trace.ops if op.name == "aten.add_.Tensor" and op.written_bytes == 16]
    assert beside
    assert all(op.on_host for op in beside)
