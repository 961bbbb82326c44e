"""A job's own loop is measured as it is written, and its estimate is of the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.errors import UsageError
from brimful.memory import most_reserved_bytes, predict_memory
from brimful.profiling import measure_step
from brimful.settings import Settings
from helpers.captured_jobs import CPU, cross_entropy

SAMPLES, WIDTH, CLASSES = 256, 256, 512

Batches = Iterable[dict[str, Tensor]]
Loop = Callable[[Any, Batches], object]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.randint(0, CLASSES, (samples,))}


def not_used(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    raise AssertionError("the loop has a loss of its own")


def make_job(loop: Loop) -> bf.Job:
    return bf.Job(model=model, loss=not_used, batch=rows, loop=loop)


def adversarial(generator: nn.Module, batches: Batches) -> None:
    critic = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.ReLU(), nn.Linear(CLASSES, 1))
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    for batch in batches:
        made = generator(batch["x"])
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(torch.randn_like(made))).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        loss = F.softplus(-critic(made)).mean()
        second.zero_grad()
        loss.backward()
        second.step()


def averaging(network: nn.Module, batches: Batches) -> None:
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(network.parameters())
    for index, batch in enumerate(batches):
        cross_entropy(network, batch).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), network.parameters(), strict=True):
                    mean.lerp_(parameter, 0.01)


def leaking(network: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.SGD(network.parameters())
    kept = []
    for batch in batches:
        loss = cross_entropy(network, batch)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        kept.append(loss)


def with_lbfgs(line_search: str | None, *, is_convex: bool = False) -> Loop:
    def loop(network: nn.Module, batches: Batches) -> None:
        optimizer = torch.optim.LBFGS(
            network.parameters(),
            lr=0.1 if is_convex else 1 if line_search else 0.5,
            history_size=5,
            max_iter=20,
            line_search_fn=line_search,
            tolerance_grad=0,
            tolerance_change=-1e9,  # or, on one batch again and again, it would soon be done
        )
        for batch in batches:
            with torch.no_grad():
                for parameter in () if is_convex else network.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)

            def closure(batch: dict[str, Tensor] = batch) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(network, batch)
                if is_convex:  # then no pair is rejected, however a CPU rounds
                    loss = loss + sum(500 * parameter.square().sum() for parameter in network.parameters())
                loss.backward()
                return loss

            optimizer.step(closure)

    return loop


@pytest.mark.sweep
@pytest.mark.parametrize(
    "loop",
    [adversarial, averaging, leaking, with_lbfgs(None, is_convex=True), with_lbfgs("strong_wolfe")],
    ids=["adversarial", "averaging", "leaking", "lbfgs", "lbfgs with line search"],
)
def test_a_loop_is_predicted_to_take_what_it_is_measured_to_take(loop: Loop) -> None:
    settings = Settings(micro_batch_size=SAMPLES)
    predicted = predict_memory(capture_step(make_job(loop), settings, CPU, steps=3))
    measured = measure_step(make_job(loop), settings, steps=2)
    assert predicted.peak_allocated_bytes == pytest.approx(measured.measured_peak_allocated_bytes, rel=0.01)
    assert measured.measured_steps == 2
    assert measured.loss is None


def test_a_pair_that_lbfgs_rejects_is_in_the_upper_end_of_the_interval() -> None:
    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256))

    def narrow_rows(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 128), "y": torch.randint(0, 256, (samples,))}

    the_job = replace(make_job(with_lbfgs(None)), model=narrow, batch=narrow_rows)
    settings = Settings(micro_batch_size=128)
    trace = capture_step(the_job, settings, CPU, steps=3)
    likely = predict_memory(trace).peak_allocated_bytes
    measured = measure_step(the_job, settings, steps=1).measured_peak_allocated_bytes
    assert likely < 0.95 * measured
    assert most_reserved_bytes(trace, likely) == pytest.approx(measured, rel=0.01)


def test_what_a_loop_decides_cannot_be_set_for_measuring() -> None:
    with pytest.raises(UsageError, match="brings its own training loop, which decides precision"):
        bf.measure(make_job(leaking), Settings(micro_batch_size=8, gradient_accumulation_steps=2), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that the loop asks for is there")
def test_a_loop_for_a_gpu_is_not_measured_on_a_cpu() -> None:
    def on_gpu(network: nn.Module, batches: Batches) -> None:
        for batch in batches:
            network(batch["x"].cuda())

    with pytest.raises(UsageError, match=r"uses a GPU, but is measured on the CPU\. Use the device"):
        bf.measure(make_job(on_gpu), Settings(micro_batch_size=8), "cpu")


def test_a_loop_that_ends_before_a_steady_step_is_not_measured() -> None:
    def short(network: nn.Module, batches: Batches) -> None:
        optimizer = torch.optim.SGD(network.parameters())
        for batch in [next(iter(batches))]:
            cross_entropy(network, batch).backward()
            optimizer.step()

    with pytest.raises(UsageError, match="ended after 1 optimizer step; the memory of the third is measured"):
        bf.measure(make_job(short), Settings(micro_batch_size=8), "cpu")


def test_a_plan_is_measured_in_brimfuls_step_which_it_is_for() -> None:
    the_job = bf.Job(model=model, loss=cross_entropy, batch=rows, loop=leaking)
    plan = bf.plan(the_job, "cpu", budget="1GiB", global_batch_size=8)
    measured = bf.measure(the_job, plan, "cpu")
    assert measured.loss is not None
    assert measured.measured_peak_allocated_bytes == pytest.approx(
        plan.predicted_peak_allocated_bytes, rel=0.01
    )
