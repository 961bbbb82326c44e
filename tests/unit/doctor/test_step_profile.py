"""Where the time of a step goes: planted costs are found, and the script's own profilers keep working."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset

from brimful.cost.time_shares import HOST, LOADING, MATMUL, NORMALIZATION, OPTIMIZER, POINTWISE
from brimful.doctor import Watch, watched_document, watched_text
from brimful.profiling.timing import WaitsForCores


def train(model: nn.Module, x: Tensor, steps: int = 8, before_step: Callable[[int], object] = id) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def shares_of(*args: object) -> dict[str, float]:
    with Watch() as watch:
        train(*args)  # type: ignore[arg-type]
    shares = watched_document(watch.evidence())["time_shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert f"time goes to    {next(iter(shares))}" in watched_text(watch.evidence())
    return shares


def share_of_normalization(shares: dict[str, float]) -> float:
    """Of the time in ops: a busy machine lengthens the host's."""
    return shares[NORMALIZATION] / (1 - shares[HOST])


def in_one_of_five(holds: Callable[[], bool]) -> bool:
    """One step is profiled, in which another process may take the processor from any op."""
    return any(holds() for _ in range(5))


def test_each_kind_of_op_has_its_share() -> None:
    def are_products_first() -> bool:
        wide = shares_of(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), torch.randn(512, 512))
        assert {OPTIMIZER, POINTWISE, HOST} <= wide.keys()
        assert LOADING not in wide
        norm = shares_of(nn.LayerNorm(1024), torch.randn(4096, 1024))
        # Sums and means are of its kind too.
        is_norm_larger = share_of_normalization(norm) > 2 * share_of_normalization(wide)
        return is_norm_larger and next(kind for kind in wide if kind != HOST) == MATMUL

    def is_host_first() -> bool:
        busy = shares_of(nn.Linear(16, 16), torch.randn(16, 16), 8, lambda _: time.sleep(0.05))
        return next(iter(busy)) == HOST

    assert in_one_of_five(are_products_first)
    assert in_one_of_five(is_host_first)


def test_a_closure_of_the_optimizer_is_not_its_update() -> None:
    """As every loop of Lightning has it."""
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU()), torch.randn(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    losses = list[Tensor]()

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss)  # so that the last step has the peak
        return loss.item()

    def are_products_more() -> bool:
        with Watch() as watch:
            for _ in range(8):
                optimizer.step(closure)
        shares = watched_document(watch.evidence())["time_shares"]
        return bool(shares[MATMUL] > shares[OPTIMIZER] > 0)

    assert in_one_of_five(are_products_more)
    x, optimizer = x[:8], torch.optim.AdamW(model.parameters())
    with Watch() as watch:
        for _ in range(3):
            optimizer.step(closure)
    seen = watched_document(watch.evidence())
    assert (seen["peak_phase"], seen["categories"]["gradients"]) == (
        "optimizer",
        sum(each.nbytes for each in model.parameters()),
    )


def test_data_loading_has_its_share() -> None:
    class Slow(Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            time.sleep(0.05)
            return torch.randn(16)

    batches = iter(DataLoader(Slow(), 1))
    shares = shares_of(nn.Linear(16, 16), torch.randn(16, 16), 8, lambda _: next(batches))
    assert next(iter(shares)) == LOADING


@pytest.mark.parametrize("number_workers", [0, 1])
def test_steps_with_an_evaluation_each_say_where_their_time_goes(number_workers: int) -> None:
    loader = DataLoader(range(4), 2, num_workers=number_workers)
    shares = shares_of(nn.Linear(16, 16), torch.randn(16, 16), 10, lambda _: [*loader])
    assert {HOST, LOADING, OPTIMIZER} <= shares.keys()


def test_an_evaluation_in_the_profiled_step_is_not_part_of_it() -> None:
    """The step after it is profiled in its place."""
    loader = DataLoader(range(4), 2)
    shares = shares_of(nn.Linear(16, 16), torch.randn(16, 16), 10, lambda step: [*loader] if step == 3 else ())
    assert LOADING not in shares


@pytest.mark.parametrize("first", [0, 3, 4], ids=["all along", "in the profiled step", "after it"])
def test_a_profiler_of_the_script_sees_its_steps(first: int) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def before_step(step: int) -> None:
        if step == first:
            profiler.start()

    model = nn.Linear(16, 16)
    with Watch() as watch:
        train(model, torch.randn(16, 16), 8, before_step)
        profiler.stop()
    (row,) = [each for each in profiler.key_averages() if each.key == "aten::addmm"]
    assert row.count >= 8 - first  # an op of a recorded step is dispatched twice
    assert watch.evidence().error == ""
    assert bool(watch.evidence().time_shares) == (first == 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_is_neither_recorded_nor_profiled() -> None:
    """It may be a worker that reads data, which keeps what it inherits to its end."""
    found = []

    def before_step(_step: int) -> None:
        profiles, mode = torch.autograd._profiler_enabled(), _get_current_dispatch_mode()  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            os._exit(torch.autograd._profiler_enabled() or _get_current_dispatch_mode() is not None)  # type: ignore[attr-defined]
        found.append((profiles, mode is not None, os.waitpid(child, 0)[1]))

    shares_of(nn.Linear(16, 16), torch.randn(16, 16), 5, before_step)
    assert found == [*[(False, True, 0)] * 3, (True, False, 0), (False, False, 0)]


@pytest.mark.parametrize("fraction", [0.34, 0.01, None])
def test_steps_beside_other_work_have_a_note(fraction: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitsForCores, "fraction", lambda _: fraction)
    with Watch() as watch:
        train(nn.Linear(16, 16), torch.randn(16, 16), 8)
    assert ("waited for one 34% of the time" in watched_text(watch.evidence())) == (fraction == 0.34)


@pytest.mark.parametrize(
    ("recorded", "profiled", "added"),
    [
        ((None, 15.0, 16.0), 14.0, 3 * 5.0 + 4.0),
        ((None, 12.0, 16.0), 14.0, 4.0),
        ((None, 15.0, 99.0), 13.0, 3 * 5.0),
        ((None, 9.0, 16.0), 13.0, None),
        ((None, 13.0, 13.0), 8.0, None),
    ],
)
def test_what_watching_added_is_measured_only_beyond_the_spread_of_steps(
    recorded: tuple[float | None, ...], profiled: float, added: float | None
) -> None:
    with Watch() as watch:
        train(nn.Linear(16, 16), torch.randn(16, 16), 8)
    seen = watch.evidence()
    ends = tuple(replace(end, seconds=each) for end, each in zip(seen.steps, recorded, strict=True))
    seen = replace(seen, steps=ends, profiled_seconds=profiled, seconds_after=(9.0, 10.0, 13.0))
    assert watched_document(seen)["watching_seconds"] == added
    row = "added less to a step than unwatched steps differ by" if added is None else f"added {added:.3g} s to"
    assert f"watching        {row}" in watched_text(seen)
    seen = replace(seen, seconds_after=())
    assert watched_document(seen)["watching_seconds"] is None
    assert "watching" not in watched_text(seen)


def test_a_run_that_ends_while_it_is_profiled_leaves_no_profiler() -> None:
    with Watch() as watch:
        train(nn.Linear(16, 16), torch.randn(16, 16), 3)
    assert watch.evidence().time_shares == ()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
