"""One real step, measured: against arithmetic by hand, and against the prediction."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import LossError, UsageError
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.profiling import PeakMemory, measure_step, peak_memory, timing
from brimful.profiling.peak import measurement_of
from brimful.results import OpTemporary
from brimful.settings import Action, Precision, Settings, UnitAction

# B samples, I inputs, H hidden, C classes

SAMPLES, INPUTS, HIDDEN, CLASSES = 64, 12, 300, 5


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, INPUTS), "y": torch.randint(0, CLASSES, (samples,))}


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mlp_job(**others: Any) -> Job:
    return Job(**{"model": mlp, "loss": cross_entropy, "batch": rows, "optimizer": "sgd"} | others)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attention(x).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mlp(self.norm(attended.transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(200, 32)
        self.blocks = nn.ModuleList(Block(32, dropout) for _ in range(3))
        self.head = nn.Linear(32, 200, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def gpt_job(dropout: float = 0.0) -> Job:
    return Job(
        model=lambda: Gpt(dropout),
        loss=next_token,
        batch=lambda samples: {"ids": torch.randint(0, 200, (samples, 24))},
        count=lambda batch: batch["ids"][:, 1:].numel(),
    )


def test_the_peak_of_a_small_mlp_is_what_one_can_add_up() -> None:
    measured = measure_step(mlp_job(), Settings(micro_batch_size=SAMPLES), steps=1)
    parameters = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    inputs_bytes = SAMPLES * INPUTS * 4
    # ReLU's backward holds, in float32: what ReLU returned, the gradient by that and by its input, and the last
    # layer's gradients. Linear's output was freed as ReLU returned, the labels by the loss's backward. Beside
    # them stand the loss, which is still wanted, and the gradient that backward starts from.
    activations = 3 * SAMPLES * HIDDEN
    last_layer = HIDDEN * CLASSES + CLASSES
    # The batch, labels included, is in the same memory and is not copied.
    expected = 4 * (2 * parameters + activations + last_layer + 2) + inputs_bytes + SAMPLES * 8
    assert measured.measured_peak_allocated_bytes == expected
    assert measured.measured_peak_reserved_bytes == measured.measured_peak_allocated_bytes
    assert measured.measured_peak_device_bytes is None
    assert measured.temporaries_at_peak == ()
    assert measured.device == "cpu"


@pytest.mark.sweep
@pytest.mark.parametrize("job", [mlp_job, lambda: mlp_job(optimizer="adamw"), gpt_job, lambda: gpt_job(0.1)])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_predicted_is_measured_to_the_byte(job: Callable[[], Job], steps: int, recompute: bool) -> None:
    the_job = job()
    model = the_job.model()  # type: ignore[operator]
    units = ("[0..1]",) if isinstance(model, nn.Sequential) else ("blocks.0", "blocks.1", "blocks.2")
    settings = Settings(
        micro_batch_size=64 // steps,
        gradient_accumulation_steps=steps,
        units=tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in units) if recompute else (),
    )
    predicted = predict_memory(capture_step(the_job, settings, find_device("cpu")))
    measured = measure_step(the_job, settings, steps=1)
    assert measured.temporaries_at_peak == ()
    assert predicted.peak_allocated_bytes == measured.measured_peak_allocated_bytes


def test_what_a_kernel_keeps_to_itself_is_named() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(4096, 4)
    with peak_memory(model, torch.optim.SGD(model.parameters()), "cpu") as peak:
        torch.median(x)  # works on a copy of its input
    assert peak.temporaries_at_peak == (OpTemporary(op="aten::median", size_bytes=4096 * 4 * 4),)


def test_what_an_op_that_consists_of_others_leaves_between_them_is_no_secret_of_its() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(64, 65)
    with peak_memory(model, torch.optim.SGD(model.parameters()), "cpu") as peak:
        torch.trapezoid(x, torch.arange(65))  # adds neighbours, multiplies, sums, halves
    assert peak.allocated_bytes >= 64 * 64 * 4
    assert "aten::trapezoid" not in {temporary.op for temporary in peak.temporaries_at_peak}


def test_the_baseline_is_what_the_loop_holds_and_counts_shared_storage_once() -> None:
    model = Gpt(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    next_token(model, {"ids": torch.randint(0, 200, (2, 8))}).backward()
    optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    with peak_memory(model, optimizer, torch.device("cpu")) as peak:
        held = torch.empty(100, dtype=torch.uint8)
    del held
    # weight and gradient, two moments, a step count for each tensor
    assert peak.allocated_bytes == 4 * 4 * parameters + 4 * tensors + 100
    assert peak.reserved_bytes == peak.allocated_bytes
    assert peak.device_bytes is None


def test_a_release_of_what_was_there_before_is_not_seen() -> None:
    """Torch's profiler leaves it out; so the peak is of what the step adds to what the loop holds."""
    model = nn.Linear(4, 4)
    before = [torch.empty(1000, dtype=torch.uint8)]
    with peak_memory(model, torch.optim.SGD(model.parameters()), "cpu") as peak:
        before.clear()
        made = torch.empty(600, dtype=torch.uint8)
    del made
    assert peak.allocated_bytes == 4 * 20 + 600


def test_a_release_by_another_thread_is_seen() -> None:
    """As by gloo's, which may be the last that hold the tensors of a collective."""
    model = nn.Linear(4, 4)
    with peak_memory(model, torch.optim.SGD(model.parameters()), "cpu") as peak:
        made = [torch.empty(1000, dtype=torch.uint8)]
        _in_a_thread(made.clear)
        made.append(torch.empty(600, dtype=torch.uint8))
    assert peak.allocated_bytes == 4 * 20 + 1000


def test_what_another_thread_makes_is_not_counted() -> None:
    """As a batch that is read ahead."""
    model = nn.Linear(4, 4)
    ahead: list[torch.Tensor] = []
    with peak_memory(model, torch.optim.SGD(model.parameters()), "cpu") as peak:
        _in_a_thread(lambda: ahead.append(torch.empty(1000, dtype=torch.uint8)))
        made = torch.empty(600, dtype=torch.uint8)
    del made
    assert peak.allocated_bytes == 4 * 20 + 600


def _in_a_thread(run: Callable[[], None]) -> None:
    thread = Thread(target=run)
    thread.start()
    thread.join()


def test_memory_cannot_be_measured_on_a_device_of_another_kind() -> None:
    model = nn.Linear(4, 4)
    with (
        pytest.raises(UsageError, match="not on 'meta'"),
        peak_memory(model, torch.optim.SGD(model.parameters()), "meta"),
    ):
        pass


def test_a_measurement_is_repeatable_and_leaves_the_random_state_alone() -> None:
    settings = Settings(micro_batch_size=8)
    torch.manual_seed(5)
    first = measure_step(gpt_job(0.1), settings, steps=1, seed=3)
    drawn = torch.rand(1)
    second = measure_step(gpt_job(0.1), settings, steps=1, seed=3)
    assert (first.loss, first.measured_peak_allocated_bytes) == (
        second.loss,
        second.measured_peak_allocated_bytes,
    )
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)


def test_the_loss_is_the_mean_over_the_global_batch_whatever_the_micro_batches() -> None:
    whole = measure_step(mlp_job(), Settings(micro_batch_size=8), steps=1)
    parts = measure_step(mlp_job(), Settings(micro_batch_size=2, gradient_accumulation_steps=4), steps=1)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_module_that_is_given_is_not_trained() -> None:
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_step(mlp_job(model=model), Settings(micro_batch_size=8), steps=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_as_many_steps_are_timed_as_are_asked_for() -> None:
    measured = measure_step(mlp_job(), Settings(micro_batch_size=8), steps=3)
    assert measured.measured_steps == 3
    assert 0 < measured.measured_step_seconds < 10
    with pytest.raises(UsageError, match="steps is 0"):
        measure_step(mlp_job(), Settings(micro_batch_size=8), steps=0)


def test_the_spread_of_the_timed_steps_is_shown() -> None:
    measured = measurement_of(
        PeakMemory(), [0.2, 3.77, 0.175], torch.device("cpu"), loss=None, core_wait_fraction=0.01
    )
    assert measured.measured_step_seconds == 0.2
    assert "measured on cpu, 3 steps of 175 ms to 3.77 s" in str(measured)
    assert "busy" not in str(measured)
    assert "1 step\n" in str(measure_step(mlp_job(), Settings(micro_batch_size=8), steps=1))


def loop_job() -> Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(batch["x"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return mlp_job(loop=loop)


@pytest.mark.parametrize("make", [mlp_job, loop_job])
def test_a_measurement_beside_other_work_says_so(
    make: Callable[[], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the system: the main thread waits for a processor for nearly as long as it can."""
    read: list[float] = []

    def clock() -> float:
        read.append(time.perf_counter())
        return read[-1]

    def waited() -> dict[str, float]:
        """By the clock as it was read: this test may itself have to wait in between."""
        return {"1": 0.9 * (read[-1] - read[0]) if read else 0.0, "2": 5.0}

    monkeypatch.setattr(timing, "time", SimpleNamespace(**vars(time) | {"perf_counter": clock}))
    monkeypatch.setattr(timing, "_waited_seconds", waited)
    measured = measure_step(make(), Settings(micro_batch_size=8), steps=3)
    assert measured.core_wait_fraction == pytest.approx(0.9, abs=0.02)
    assert re.search(r"busy machine +other work .* waited for one [89]\d% of the time", str(measured))
    monkeypatch.setattr(timing, "_waited_seconds", dict)
    assert measure_step(make(), Settings(micro_batch_size=8), steps=3).core_wait_fraction is None


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.TF32])
def test_every_precision_is_measured(precision: Precision) -> None:
    settings = Settings(micro_batch_size=8, precision=precision)
    assert measure_step(mlp_job(), settings, steps=1).measured_peak_allocated_bytes > 0


@pytest.mark.parametrize(("device", "said"), [("nowhere", "is not a torch device"), ("meta", "not on 'meta'")])
def test_a_device_that_is_none_is_a_usage_error(device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        measure_step(mlp_job(), Settings(micro_batch_size=8), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_device_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no CUDA GPU"):
        measure_step(mlp_job(), Settings(micro_batch_size=8), device="cuda")


def test_a_wrong_loss_is_a_loss_error() -> None:
    with pytest.raises(LossError, match="must be a scalar"):
        measure_step(mlp_job(loss=lambda model, batch: model(batch["x"])), Settings(micro_batch_size=8))


def test_a_factory_that_builds_no_module_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is built as a int"):
        measure_step(mlp_job(model=lambda: 3), Settings(micro_batch_size=8))
