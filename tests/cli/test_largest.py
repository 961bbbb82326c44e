"""`--largest`: the largest size that trains in a budget, as the command line finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import brimful as bf
from brimful.api import largest, largest_plan
from brimful.models import dimension, resolve_job
from brimful.planner import Limit
from helpers.command_line import brimful

JOB = """
import torch
from torch import nn
import brimful as bf

def job(layers=2, width=256):
    if layers > 40:
        raise ValueError(f"at most 40 layers, not {layers}")
    return bf.Job(
        model=lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, width),
        optimizer="sgd",
        name="tiny",
    )
"""
BUDGET = ("--device", "T4", "--budget", "500MiB")
SIZE_KEYS = {"what", "option", "value", "next_value", "limited_by", "reason", "tried"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(JOB)
    return tmp_path


def document(folder: Path, *arguments: str) -> dict:
    done = brimful(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_largest_width_fits_and_the_next_does_not(folder: Path) -> None:
    asked = ("estimate", "mine.py:job", *BUDGET, "--micro-batch-size", "64")
    found = document(folder, *asked, "--largest", "hidden")
    size = found["largest_value"]
    assert set(size) == SIZE_KEYS
    assert (size["what"], size["option"], size["limited_by"]) == ("hidden", "width", "memory")
    assert size["next_value"] == size["value"] + 64
    assert len(size["tried"]) <= 8
    again = document(folder, *asked, "--set", f"width={size['value']}")
    assert again["verdict"] == found["verdict"] == "fits"
    assert again["predicted_peak_device_bytes"] == found["predicted_peak_device_bytes"]
    assert document_of_next(folder, asked, size)["verdict"] != "fits"


def document_of_next(folder: Path, asked: tuple[str, ...], size: dict) -> dict:
    done = brimful(folder, *asked, "--set", f"{size['option']}={size['next_value']}", "--json")
    return json.loads(done.stdout)


def test_what_a_model_refuses_ends_the_search(folder: Path) -> None:
    done = brimful(folder, "estimate", "mine.py:job", *BUDGET, "--largest", "layers")
    assert done.stdout.startswith("tiny on T4: the largest layers that fits is 40\n")
    assert "model: at most 40 layers, not 41" in done.stdout


def test_the_search_for_layers_ends_at_a_number_of_them(folder: Path) -> None:
    """A tiny model's 10,960 layers took 8 minutes to find."""
    name = f"{folder / 'mine.py'}:job"
    assert dimension(name, "layers", {}).most == 1024

    def job_of(layers: int) -> bf.Job:
        return resolve_job(name, layers=layers)

    found = largest(job_of, "T4", option="layers", start=4, most=6, micro_batch_size=4).size
    assert (found.value, found.limited_by, list(found.tried)) == (6, Limit.SEARCH, [4, 6])
    planned = largest_plan(job_of, "T4", option="layers", start=4, most=6, global_batch_size=4).size
    assert (planned.value, planned.limited_by) == (6, Limit.SEARCH)


def test_a_sequence_is_never_longer_than_the_positions_of_a_model(folder: Path) -> None:
    asked = ("--set", "num_hidden_layers=1", "--device", "T4", "--largest", "seq-len")
    found = document(folder, "estimate", "bert-base", *asked)
    size = found["largest_value"]
    assert (size["value"], size["limited_by"], found["tokens_per_sample"]) == (512, "model", 512)
    assert "from 1 to 512" in size["reason"]


def test_largest_alone_asks_for_the_batch(folder: Path) -> None:
    asked = ("estimate", "mine.py:job", *BUDGET, "--set", "width=2048")
    found, named = (document(folder, *asked, *largest) for largest in (["--largest"], ["--largest", "batch"]))
    assert found == named
    assert found["largest_value"]["value"] == found["settings"]["micro_batch_size"]
    assert found["largest_value"]["next_value"] == found["largest_value"]["value"] + 1


@pytest.mark.slow
def test_a_plan_of_the_largest_size_is_larger_than_what_fits_without_one(folder: Path) -> None:
    asked = (
        "plan",
        "mine.py:job",
        *BUDGET,
        "--set",
        "width=1024",
        "--global-batch-size",
        "4096",
        "--micro-batch-size",
        "4096",
    )
    found = document(folder, *asked, "--largest", "layers", "--output", "plan.json")
    size = found["largest_value"]
    assert set(size) == SIZE_KEYS | {"parameter_count", "kept", "without_plan"}
    without = size["without_plan"]
    assert without["value"] < size["value"] < 40
    assert (
        without["predicted_peak_device_bytes"]
        <= found["budget_bytes"]
        < size["kept"]["predicted_peak_device_bytes"]
    )
    assert found["predicted_exceedance_probability"] <= 0.01
    assert found["source"] == {"name": "mine.py:job", "options": {"width": 1024, "layers": size["value"]}}
    checked = brimful(folder, "plan", "mine.py:job", "--set", "width=1024", "--set", f"layers={size['value']}",
                      "--check", "plan.json")  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    beyond = brimful(folder, *asked, "--set", f"layers={size['next_value']}", "--json")
    assert beyond.returncode == 1 or json.loads(beyond.stdout)["predicted_exceedance_probability"] > 0.01


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["estimate", "resnet18", "--largest", "layers"], 2, ["num_hidden_layers", "batch, image-size"]),
        (["estimate", "mine.py:job", "--largest", "seq-len"], 2, ["sequence_length", "batch, layers, hidden"]),
        (["estimate", "mine.py:job", "--largest", "depth"], 2, ["'depth'", "seq-len", "--largest batch"]),
        (["estimate", "mine.py:job", "--largest", "layers", "--set", "layers=3"], 2, ["leave out layers=3"]),
        (["estimate", "mine.py:job", "--largest", "hidden", "--budget", "100MiB"], 1, ["width=64", "plan"]),
        (["plan", "mine.py:job", "--largest", "layers"], 2, ["--global-batch-size"]),
        (["plan", "mine.py:job", "--largest", "batch", "--global-batch-size", "8"], 2, ["--global-batch-size"]),
        (
            ["plan", "mine.py:job", "--largest", "layers", "--global-batch-size", "8", "--budget", "50%"],
            2,
            ["50%", "11GiB"],
        ),
    ],
)
def test_what_cannot_be_searched_is_said(
    folder: Path, arguments: list[str], status: int, words: list[str]
) -> None:
    done = brimful(folder, *arguments, "--device", "T4")
    assert done.returncode == status, done.stderr
    for word in words:
        assert word in done.stderr
