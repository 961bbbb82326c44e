"""A second request for the same plan is answered from disk, and no other request is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.api import kept_plans, plans
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.planner import Plan

DEVICE = find_device("RTX 3090")


def job(width: int = 16, *, layers: int = 2) -> bf.Job:
    return bf.Job(
        name="mlp",
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.zeros(n, width),
    )


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one with each search; the cache is empty."""
    made: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    search = plans.search
    monkeypatch.setattr(plans, "search", lambda *asked: made.append(1) or search(*asked))
    return made


def planned(of: bf.Job | None = None, **asked: object) -> Plan:
    return plans.plan_once(of or job(), asked.pop("device", DEVICE), **{"global_batch_size": 4, **asked})


def test_the_same_request_is_answered_from_disk(searches: list[int]) -> None:
    first = planned()
    assert planned() == first == bf.plan(job(), DEVICE, global_batch_size=4)
    assert len(searches) == 2  # bf.plan neither reads nor keeps plans


@pytest.mark.parametrize(
    "other",
    [
        lambda: planned(job(32)),
        lambda: planned(job(layers=3)),
        lambda: planned(global_batch_size=8),
        lambda: planned(budget="1GiB"),
        lambda: planned(precision="bf16"),
        lambda: planned(device="RTX 4090"),
        lambda: planned(device=replace(DEVICE, memory_bandwidth_bytes_per_second=1e9)),
    ],
    ids=["width", "layers", "batch", "budget", "precision", "device", "calibration"],
)
def test_another_request_is_searched(searches: list[int], other: Callable[[], Plan]) -> None:
    planned()
    other()
    assert len(searches) == 2


def test_another_version_is_searched(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(kept_plans, "_sources", lambda: ["planner/search.py 1 1"])
    planned()
    assert len(searches) == 2


def test_that_nothing_fits_is_answered_from_disk_too(searches: list[int], tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with pytest.raises(InfeasibleError) as refused:
            planned(budget="1KiB")
        found.append((str(refused.value), refused.value.budget_bytes, refused.value.smallest_peak_bytes))
    assert found[0] == found[1]
    assert len(searches) == 1
    (kept,) = (tmp_path / "brimful" / "plans").iterdir()
    kept.write_bytes(b"{")
    with pytest.raises(InfeasibleError):
        planned(budget="1KiB")
    assert len(searches) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[]", b'{"brimful_plan": 1}'])
def test_a_damaged_file_is_searched_again_and_replaced(
    searches: list[int], tmp_path: Path, content: bytes
) -> None:
    first = planned()
    (kept,) = (tmp_path / "brimful" / "plans").iterdir()
    kept.write_bytes(content)
    assert planned() == planned() == first
    assert len(searches) == 2


def test_the_oldest_plans_are_deleted(
    searches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_plans, "MOST_PLANS", 2)
    for size in (1, 2, 3):
        planned(global_batch_size=size)
    assert len(list((tmp_path / "brimful" / "plans").iterdir())) == 2
    planned(global_batch_size=3)
    assert len(searches) == 3


def test_a_cache_that_cannot_be_written_is_no_error(
    searches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert planned() == planned()
    assert len(searches) == 2
