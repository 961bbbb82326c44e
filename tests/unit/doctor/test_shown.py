"""`brimful.watch`: the report follows the loop, whatever ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import brimful as bf


def train(steps: int, before_step: Callable[[int], object] = lambda _: None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


def test_the_report_is_printed_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    alone = train(8)
    with bf.watch(steps=4) as watch:
        watched = train(8)
    assert torch.equal(alone, watched)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"{watch.report}\n"
    assert printed.err.startswith("watched 4 optimizer steps on cpu")
    assert watch.document["steps"] == 4
    assert watch.document["categories"]["parameters"] == (16 * 4 + 4) * 4


def test_the_report_follows_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(step: int) -> None:
        if step == 2:
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), bf.watch():
        train(4, stop)
    assert capsys.readouterr().err.startswith("watched 2 optimizer steps")


def test_a_watch_without_with_warns_at_its_line() -> None:
    with pytest.warns(UserWarning, match="Write `with bf.watch") as warned:
        bf.watch()
    assert warned[0].filename == __file__


def test_a_notebook_displays_the_report_as_html(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[bf.doctor.ShownWatch] = []
    notebook = SimpleNamespace(get_ipython=lambda: notebook, display=SimpleNamespace(display=displayed.append))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    with bf.watch() as watch:
        train(3)
    assert displayed == [watch]
    assert "watched 3 optimizer steps on cpu</div>" in watch._repr_html_()
    printer = SimpleNamespace(text=displayed.append)
    watch._repr_pretty_(printer, False)
    assert displayed[1:] == [watch.report]


def test_planning_inside_a_watched_loop_is_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither changes the other."""
    job = bf.Job(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda n: torch.randn(n, 64),
    )

    def plan(_step: int) -> bf.Plan:
        bf.estimate(job, "cpu", micro_batch_size=4)
        return bf.plan(job, "cpu", global_batch_size=64, budget="1GiB")

    planned = []
    with bf.watch() as plain:
        train(3)
    with bf.watch() as watch:
        train(3, lambda step: planned.append(plan(step)))
    alone = plan(0)
    for each in planned:
        assert each.settings == alone.settings
        assert each.predicted_peak_allocated_bytes == alone.predicted_peak_allocated_bytes
    assert watch.evidence().error == ""
    assert watch.evidence().models == plain.evidence().models == ("Linear",)
    assert watch.document["peak_bytes"] == plain.document["peak_bytes"]
    assert len(watch.evidence().trace.ops) == len(plain.evidence().trace.ops)
    assert len(watch.evidence().steps) == 3


def test_another_thread_plans_while_a_loop_is_watched_and_neither_sees_the_other() -> None:
    job = bf.Job(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda n: torch.randn(n, 64),
    )

    def plan() -> bf.Plan:
        return bf.plan(job, "cpu", global_batch_size=64, budget="1GiB")

    alone = plan()
    with ThreadPoolExecutor(1) as pool, bf.watch(steps=1000) as watch:
        planned = pool.submit(plan)
        steps = 0
        while not planned.done() and steps < 1000:
            train(1)
            steps += 1
        beside = planned.result(timeout=60)
    assert beside.predicted_peak_allocated_bytes == alone.predicted_peak_allocated_bytes
    assert beside.settings == alone.settings
    assert watch.evidence().models == ("Linear",) * steps
