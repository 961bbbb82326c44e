"""The scripts of docs/howto/own-loop.md train as the same loops without brimful, in the memory they predict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo

from helpers.own_loops import OnRank, Ran, run, run_on_two_ranks, scripts, write_files
from helpers.own_loops_alone import losses_alone

ALONE, ON_RANKS = ("plain", "compiled", "lbfgs", "train_gan"), ("ddp", "fsdp2")
OTHER_HALF_BYTES = 512 * (16 * 4 + 8)
"""A plan for ranks counts the global batch on each, as brimful's trainer reads it, and a script reads half."""
BLOCK_BYTES = 4 * (2 * 128 * 512 + 512 + 128)
"""gloo's threads may hold what they gathered a little longer than the caller waits: `explanation/ranks.md`."""

MOST_LINES = {"lbfgs": 24}
"""Of a script, where it has more than fifteen."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loops")
    write_files(made)
    return made


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, OnRank]]:
    run(folder, "plans")
    return run_on_two_ranks(folder, list(ON_RANKS))


def ran_alone(folder: Path, name: str) -> Ran:
    torch._dynamo.utils.counters.clear()
    with torch.random.fork_rng():
        return run(folder, name)


def lines_of_code(script: str) -> int:
    """Lines without blank ones, imports and the file's name."""
    lines = [line for line in script.splitlines() if line.strip()]
    return sum(not line.startswith(("import ", "from ", "# ")) for line in lines)


def test_every_script_is_tested_and_has_about_fifteen_lines() -> None:
    assert scripts().keys() == {"job", "gan", "plans", *ALONE, *ON_RANKS}
    for name in (*ALONE, *ON_RANKS):
        assert lines_of_code(scripts()[name]) <= MOST_LINES.get(name, 15), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by the compiler
@pytest.mark.parametrize("name", ALONE)
def test_a_script_for_one_process(folder: Path, name: str) -> None:
    ran = ran_alone(folder, name)
    plan = ran.variables["plan"]
    assert plan.settings != plan.plain.settings
    assert ran.losses == pytest.approx(losses_alone(folder, name), abs=1e-6)
    assert ran.peak_bytes == pytest.approx(ran.predicted_bytes, rel=1e-3)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (name == "compiled")


@pytest.mark.slow  # launches two processes
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_script_for_two_ranks(folder: Path, on_ranks: list[dict[str, OnRank]], name: str) -> None:
    ranks = [rank[name] for rank in on_ranks]
    mean = [sum(both) / 2 for both in zip(*(rank.losses for rank in ranks), strict=True)]
    assert mean == pytest.approx(losses_alone(folder, name), abs=1e-6)
    for rank in ranks:
        expected = rank.predicted_bytes - OTHER_HALF_BYTES
        assert 0.999 * expected <= rank.peak_bytes <= 1.001 * expected + BLOCK_BYTES
