"""The command line, run as a user runs it: in a process of its own."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from brimful.cli.app import app
from brimful.profiling import calibrate
from brimful.utils import status
from helpers import compared_jobs
from helpers.calibrated import CALIBRATION
from helpers.command_line import brimful

JOB = """
import torch
from torch import nn
import brimful as bf

def job(width=64):
    return bf.Job(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)],
                                    nn.Linear(width, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, width), "y": torch.randint(0, 2, (n,))},
        optimizer="sgd",
        data=lambda: bf.Data(train={"x": torch.randn(64, width), "y": torch.randint(0, 2, (64,))}),
        name="tiny",
    )

def vector_loss():
    return bf.Job(model=lambda: nn.Linear(4, 4), loss=lambda model, batch: model(batch),
                  batch=lambda n: torch.randn(n, 4), optimizer="sgd")

def frozen_loss():
    return bf.Job(model=lambda: nn.Linear(4, 4), loss=lambda model, batch: model(batch).detach().mean(),
                  batch=lambda n: torch.randn(n, 4), optimizer="sgd")

def nan_loss():
    return bf.Job(model=lambda: nn.Linear(4, 4), loss=lambda model, batch: (model(batch) * float("nan")).mean(),
                  batch=lambda n: torch.randn(n, 4), optimizer="sgd",
                  data=lambda: bf.Data(train=torch.randn(16, 4)))

def ragged_batch():
    return bf.Job(model=lambda: nn.Linear(4, 4), loss=lambda model, batch: model(batch[0]).mean(),
                  batch=lambda n: (torch.randn(n, 4), torch.randn(n + 1)), optimizer="sgd")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(JOB)
    return tmp_path


ESTIMATE_KEYS = {
    "job",
    "device",
    "settings",
    "is_own_loop",
    "verdict",
    "capacity_bytes",
    "predicted_peak_allocated_bytes",
    "predicted_peak_reserved_bytes",
    "predicted_peak_device_bytes",
    "predicted_device_interval_bytes",
    "smallest_surviving_capacity_bytes",
    "predicted_paged_state_bytes",
    "predicted_step_seconds",
    "predicted_step_seconds_interval",
    "predicted_samples_per_second",
    "predicted_time_shares",
    "breakdown",
    "peak",
    "largest",
    "modules",
    "phases",
    "allocators",
    "suggestions",
    "context_source",
    "torch_version",
    "cache_flushes",
    "out_of_memory_at",
    "corrections",
    "uncertain_ops",
    "parameter_count",
    "trainable_parameter_count",
    "tokens_per_sample",
    "notes",
}
PLAN_KEYS = {
    "asked",
    "brimful_plan",
    "budget_curve",
    "model_flops",
    "peak_flops_per_second",
    "peak_at",
    "status",
    "job",
    "device",
    "device_kind",
    "budget_bytes",
    "settings",
    "predicted_peak_allocated_bytes",
    "predicted_peak_reserved_bytes",
    "predicted_exceedance_probability",
    "predicted_peak_device_bytes",
    "predicted_pinned_host_bytes",
    "predicted_host_state_bytes",
    "predicted_step_seconds",
    "predicted_step_seconds_interval",
    "plain",
    "alternatives",
    "suggestions",
    "job_calibration",
    "job_kind",
    "notes",
    "sample_sizes",
    "source",
    "tokens_per_sample",
}
RUN_KEYS = {
    "epochs",
    "samples",
    "tokens",
    "steps",
    "global_batch_size",
    "world_size",
    "predicted_seconds",
    "predicted_seconds_interval",
    "predicted_samples_per_second",
    "predicted_tokens_per_second",
    "price_per_hour",
    "predicted_cost",
    "predicted_cost_interval",
}


def test_estimate_json_has_exactly_the_documented_keys(folder: Path) -> None:
    done = brimful(folder, "estimate", "mine:job", "--device", "RTX 3090", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(document) == ESTIMATE_KEYS
    assert set(document["breakdown"]) == {
        "parameters",
        "gradients",
        "optimizer_state",
        "saved_tensors",
        "inputs",
        "other_tensors",
        "temporaries",
    }
    assert sum(document["breakdown"].values()) == document["predicted_peak_allocated_bytes"]


GENERATION_KEYS = {
    *("job", "device", "verdict", "prompt_tokens", "new_tokens", "num_beams", "micro_batch_size", "precision"),
    *("capacity_bytes", "predicted_peak_allocated_bytes", "predicted_peak_reserved_bytes"),
    *("predicted_peak_device_bytes", "predicted_device_interval_bytes", "is_out_of_memory", "cache_flushes"),
    *("weights_bytes", "cache_bytes", "cache_bytes_per_token", "phases", "peak_phase"),
    *("largest_micro_batch_size", "context_source", "torch_version", "uncertain_ops", "notes"),
}


def test_the_memory_of_a_generation_is_predicted(folder: Path) -> None:
    asked = ("estimate", "gpt2", "--set", "num_hidden_layers=1", "--seq-len", "16", "--new-tokens", "8")
    done = brimful(folder, *asked, "--beams", "2", "--micro-batch-size", "3", "--device", "T4", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, set(document)) == (0, GENERATION_KEYS)
    assert set(document["phases"][0]) == {
        *("name", "token", "predicted_peak_allocated_bytes", "cache_bytes", "module", "op"),
    }
    assert document["cache_bytes"] == 2 * 768 * 4 * (16 + 8 - 1) * 2 * 3
    shown = brimful(folder, *asked, "--device", "T4", "--budget", "100MiB")
    assert shown.returncode == 1
    assert all(word in shown.stdout for word in ("does not fit", "prefill", "last decoding step", "greedy"))


def test_plan_json_has_exactly_the_documented_keys(folder: Path) -> None:
    done = brimful(
        folder, "plan", "mine:job", "--device", "RTX 3090", "--global-batch-size", "8", "--json",
        "--output", "plan.json",
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(document) == PLAN_KEYS
    assert set(document["settings"]) == {
        "precision",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "optimizer",
        "optimizer_implementation",
        "units",
        "chunked_loss",
        "expandable_segments",
        "ranks",
        "nodes",
        "parallelism",
    }
    assert json.loads((folder / "plan.json").read_text()) == document


def test_a_plan_that_the_model_has_outgrown_fails_the_check(folder: Path) -> None:
    planned = brimful(
        folder, "plan", "mine:job", "--device", "RTX 3090", "--global-batch-size", "8", "--budget", "1GiB",
        "--set", "width=64", "--output", "plan.json",
    )  # fmt: skip
    assert planned.returncode == 0
    same = brimful(folder, "plan", "mine:job", "--set", "width=64", "--check", "plan.json", "--json")
    document = json.loads(same.stdout)
    assert same.returncode == 0
    assert document["fits"]
    assert document["predicted_peak_device_bytes"] == document["planned_peak_device_bytes"]
    assert document["budget_bytes"] == 2**30
    smaller = brimful(folder, "plan", "mine:job", "--check", "plan.json", "--budget", "300MiB")
    assert (smaller.returncode, "too much: it was planned for more" in smaller.stdout) == (1, True)
    (folder / "mine.py").write_text(JOB.replace("width=64", "width=8192").replace('"tiny"', '"grown"'))
    grown = brimful(folder, "plan", "mine:job", "--check", "plan.json")
    assert grown.returncode == 1
    assert grown.stdout.startswith("grown on RTX 3090: the plan does not fit")
    assert "the job takes more than when it was planned" in grown.stdout


def test_a_plan_is_certified_on_this_machine(folder: Path) -> None:
    asked = ("--device", "cpu", "--global-batch-size", "8", "--micro-batch-size", "4", "--verify")
    done = brimful(folder, "plan", "mine:job", *asked, "--recompute", "all", "--json")
    certificate = json.loads(done.stdout)["certificate"]
    assert (done.returncode, certificate["holds"], certificate["samples"]) == (0, True, 8)
    recomputing, splitting = certificate["comparisons"]
    assert recomputing["is_bitwise"]
    assert splitting["largest_difference"] <= splitting["bound"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--check", "missing.json"), "cannot be read"),
        (("--check", "mine.py"), "the plan mine.py is not valid JSON"),
        (("mine:job", "--check", "mine.py", "--global-batch-size", "4"), "--global-batch-size"),
        (("mine:job",), "--global-batch-size"),
        (("--check", "mine.py", "--seq-len", "8"), "sequence_length"),
    ],
)
def test_a_check_that_makes_no_sense_is_bad_usage(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    done = brimful(folder, "plan", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_differences_of_two_plans_are_listed_and_nothing_else(folder: Path) -> None:
    asked = ("plan", "mine.py:job", "--device", "T4")
    for file, more in (("a.json", ("16",)), ("b.json", ("32", "--recompute", "all"))):
        done = brimful(folder, *asked, "--output", file, "--global-batch-size", *more)
        assert done.returncode == 0, done.stderr
    text = brimful(folder, "plan", "--diff", "a.json", "b.json").stdout
    assert re.search(r"micro_batch_size +16 +32", text)
    assert re.search(r"^  0–\d+ +keep +recompute$", text, re.MULTILINE)  # one line for a run of units
    assert "e-" not in text  # probabilities are in percent
    assert "precision" not in text
    document = json.loads(brimful(folder, "plan", "--diff", "a.json", "b.json", "--json").stdout)
    assert document["settings"][0]["micro_batch_size"] == 16
    assert "device" not in document
    same = brimful(folder, "plan", "--diff", "a.json", "a.json")
    assert "The plans are the same." in same.stdout
    assert json.loads(brimful(folder, "plan", "--diff", "a.json", "a.json", "--json").stdout) == {}
    beside = brimful(folder, "plan", "--diff", "a.json", "b.json", "--budget", "3GiB")
    assert beside.returncode == 2
    assert "does not go with --budget" in beside.stderr


@pytest.mark.slow
def test_compare_json_has_exactly_the_documented_keys_and_measures_each_row(folder: Path) -> None:
    job = f"{compared_jobs.__file__}:plain_job"
    done = brimful(folder, "compare", job, "--global-batch-size=16", "--device=cpu", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        *("job", "device", "global_batch_size", "capacity_bytes", "rows", "fastest", "fastest_of_all", "notes")
    }
    assert document["rows"][0]["technique"] == "baseline"
    for row in document["rows"]:
        assert set(row) == {
            *("technique", "results", "effect", "flag", "is_plan", "settings", "model_options", "verdict"),
            *("predicted_peak_device_bytes", "predicted_peak_allocated_bytes", "predicted_host_bytes"),
            *("predicted_exceedance_probability", "predicted_step_seconds", "predicted_step_seconds_interval"),
            *("predicted_samples_per_second", "uncertain_ops", "measured", "why_not"),
        }
        assert row["why_not"] == ""
        assert row["measured"]["measured_step_seconds"] > 0
        # Casts of autocast are kept or not by shape, and the first use of oneDNN in bf16 packs weights.
        error = 0.01 if row["settings"]["precision"] == "fp32" and not row["model_options"] else 0.15
        measured = pytest.approx(row["measured"]["measured_peak_allocated_bytes"], rel=error)
        assert row["predicted_peak_allocated_bytes"] == measured, row["technique"]


def test_gpus_json_has_exactly_the_documented_keys(folder: Path) -> None:
    asked = ("--global-batch-size", "8", "--device", "T4", "--device", "RTX 4090", "--json")
    done = brimful(folder, "gpus", "mine:job", *asked)
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(document) == {"job", "global_batch_size", "gpus"}
    assert [gpu["device"] for gpu in document["gpus"]] == ["T4", "RTX 4090"]
    assert set(document["gpus"][0]) == {
        "device", "capacity_bytes", "plain_fits", "predicted_plain_peak_device_bytes", "settings",
        "predicted_peak_device_bytes", "predicted_step_seconds", "predicted_samples_per_second",
        "predicted_smallest_peak_device_bytes", "change",
        "predicted_step_seconds_interval", "predicted_samples_per_second_interval", "usual", "confidence",
        "note", "price_per_hour", "predicted_cost_per_step", "predicted_cost_per_million_samples",
    }  # fmt: skip
    t4, rtx_4090 = (gpu["usual"] for gpu in document["gpus"])
    assert (t4["precision"], rtx_4090["precision"]) == ("fp16", "bf16")
    assert set(t4) == {
        "precision", "settings", "predicted_peak_device_bytes", "predicted_step_seconds",
        "predicted_step_seconds_interval", "predicted_samples_per_second",
        "predicted_samples_per_second_interval", "predicted_cost_per_step",
        "predicted_cost_per_million_samples",
    }  # fmt: skip


def test_gpus_are_sorted_by_the_cost_that_a_file_of_prices_gives(folder: Path) -> None:
    (folder / "prices.csv").write_text("gpu,price_per_hour,region\nTesla T4,0.36,eu\nRTX 4090,360,us\n")
    asked = ("--global-batch-size", "8", "--device", "RTX 4090", "--device", "T4", "--device", "L4")
    done = brimful(folder, "gpus", "mine:job", *asked, "--prices", "prices.csv", "--sort", "cost", "--json")
    gpus = json.loads(done.stdout)["gpus"]
    assert [gpu["device"] for gpu in gpus] == ["T4", "RTX 4090", "L4"]
    for gpu in (gpus[0], gpus[0]["usual"]):
        assert gpu["predicted_cost_per_step"] == pytest.approx(0.36 * gpu["predicted_step_seconds"] / 3600)
        assert gpu["predicted_cost_per_million_samples"] == pytest.approx(
            gpu["predicted_cost_per_step"] * 1e6 / 8
        )
    assert gpus[2]["predicted_cost_per_step"] is None
    text = brimful(folder, "gpus", "mine:job", *asked, "--prices", "prices.csv", "--sort", "cost").stdout
    assert "no price" in text
    assert "TF32 is off" in text


def test_a_length_adds_the_hours_and_the_cost_of_the_run(folder: Path) -> None:
    (folder / "prices.json").write_text('{"T4": 0.36, "RTX 4090": 360}')
    length = ("--epochs", "3", "--dataset-size", "20", "--prices", "prices.json")
    estimate = ("estimate", "mine:job", "--device", "T4", "--micro-batch-size", "8")
    plan = ("plan", "mine:job", "--device", "T4", "--global-batch-size", "8", "--output", "plan.json")
    compared = ("--device", "RTX 4090", "--device", "T4", "--sort", "cost")
    gpus = ("gpus", "mine:job", "--global-batch-size", "8", *compared)
    for command in (estimate, plan):
        document = json.loads(brimful(folder, *command, *length, "--json").stdout)
        run = document["run"]
        assert set(run) == RUN_KEYS
        assert (run["steps"], run["samples"], run["tokens"]) == (9, 60, None)
        assert run["predicted_seconds"] == pytest.approx(9 * document["predicted_step_seconds"])
        assert run["predicted_cost"] == pytest.approx(0.36 * run["predicted_seconds"] / 3600)
        assert "run of 3 epochs, 60 samples: 9 steps of 8" in brimful(folder, *command, *length).stdout
    assert "run" not in json.loads((folder / "plan.json").read_text())
    found = json.loads(brimful(folder, *gpus, *length, "--json").stdout)["gpus"]
    assert [gpu["device"] for gpu in found] == ["T4", "RTX 4090"]
    assert all(
        set(of["run"]) == RUN_KEYS and of["run"]["predicted_cost"]
        for gpu in found
        for of in (gpu, gpu["usual"])
    )
    text = brimful(folder, *gpus, *length).stdout
    assert "cost" in text
    assert not re.search(r"iB\d", text)  # hours of a short run have many digits
    assert max(map(len, text.splitlines()[:8])) <= 90


def test_no_run_is_predicted_of_a_step_that_does_not_fit(folder: Path) -> None:
    asked = ("estimate", "mine:job", "--device", "T4", "--budget", "1MiB", "--samples", "100")
    done = brimful(folder, *asked, "--json")
    assert (done.returncode, json.loads(done.stdout)["run"]) == (1, None)
    assert "run: not predicted, as the step does not fit" in brimful(folder, *asked).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--samples", "5", "--epochs", "2", "--dataset-size", "3"), "epochs and samples are given"),
        (("--epochs", "2"), "--dataset-size"),
        (("--prices", "prices.csv"), "Give its length too"),
        (("--samples", "5", "--prices", "prices.csv"), "no price of T4; it has those of: L4"),
        (("--samples", "5", "--prices", "prices.csv", "--device", "cpu"), "Name a GPU by --device"),
        (("--tokens", "5"), "tokens of a sample"),
    ],
)
def test_a_length_or_price_that_cannot_be_used_is_bad_usage(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    (folder / "prices.csv").write_text("gpu,price_per_hour\nL4,0.8\n")
    done = brimful(folder, "estimate", "mine:job", "--device", "T4", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_the_largest_micro_batch_fits_and_the_next_does_not(folder: Path) -> None:
    asked = ("estimate", "mine:job", "--device", "T4", "--budget", "500MiB", "--set", "width=2048", "--json")
    largest = json.loads(brimful(folder, *asked, "--largest").stdout)
    size = largest["settings"]["micro_batch_size"]
    assert largest["verdict"] == "fits"
    again = json.loads(brimful(folder, *asked, "--micro-batch-size", str(size)).stdout)
    assert again["predicted_peak_reserved_bytes"] == largest["predicted_peak_reserved_bytes"]
    beyond = json.loads(brimful(folder, *asked, "--micro-batch-size", str(size + 1)).stdout)
    assert beyond["verdict"] != "fits"


def test_a_file_and_model_options_name_a_job(folder: Path) -> None:
    small = brimful(folder, "estimate", "mine.py:job", "--device", "T4", "--json")
    large = brimful(folder, "estimate", "mine.py:job", "--device", "T4", "--set", "width=1024", "--json")
    assert json.loads(large.stdout)["parameter_count"] > 100 * json.loads(small.stdout)["parameter_count"]


def test_what_libraries_warn_of_at_import_is_not_shown(folder: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")  # transformers imports it then
    command = [sys.executable, "-m", "brimful", "estimate", "bert-base", "--device", "T4"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "torchao" not in done.stderr
    assert "_pytree" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["estimate", "mine:job", "--device", "RTX 3900"], 2, ["unknown device", "RTX 3090"]),
        (["estimate", "mine:job", "--device", "T4", "--new-tokens", "4"], 2, ["Sequential", "t5-small"]),
        (["estimate", "gpt2", "--new-tokens", "4", "--largest"], 2, ["--new-tokens", "--largest"]),
        (
            ["estimate", "gpt2", "--new-tokens", "4", "--recompute", "all"],
            2,
            ["no training step", "--recompute"],
        ),
        (["estimate", "gpt2", "--new-tokens", "4", "--epochs", "1"], 2, ["no training step", "--epochs"]),
        (["estimate", "mine:job", "--device", "T4", "--beams", "4"], 2, ["--beams", "--new-tokens"]),
        (["estimate", "bert-lrge", "--device", "T4"], 2, ["unknown model", "bert-large"]),
        (["estimate", "mine:jab", "--device", "T4"], 2, ["jab", "job"]),
        (["estimate", "mine:job", "--device", "T4", "--optimizer", "adamv"], 2, ["adamw"]),
        (["estimate", "mine:job", "--device", "T4", "--precision", "fp61"], 2, ["fp16"]),
        (["estimate", "mine:job", "--device", "T4", "--precision", "bf16"], 2, ["T4", "bf16", "fp16"]),
        (["estimate", "mine:job", "--device", "T4", "--without", "dropout"], 2, ["dropout_mask"]),
        (["estimate", "mine:job", "--device", "T4", "--allocator", "expand:True"], 2, ["expandable_segments"]),
        (["estimate", "mine:job", "--largest", "--micro-batch-size", "2"], 2, ["--largest", "--micro-batch"]),
        (["gpus", "mine:job", "--global-batch-size", "8", "--device", "cpu"], 2, ["not a CUDA GPU"]),
        (["compare", "--study", "vgg"], 2, ["vgg16"]),
        (["compare", "mine:job", "--study", "vgg16"], 2, ["does not go with MODEL"]),
        (["compare"], 2, ["MODEL", "--study NAME"]),
        (["compare", "gpt2"], 2, ["brimful compare gpt2 --global-batch-size 32"]),
        (["plan", "gpt3"], 2, ["unknown model 'gpt3'. Nearest: gpt2"]),
        (["plan", "gpt2"], 2, ["For example: brimful plan gpt2 --global-batch-size 32"]),
        (["plan", "gpt3", "--largest", "sequence_length"], 2, ["unknown model 'gpt3'"]),
        (["plan", "gpt2", "--largest", "sequence_length"], 2, ["--largest sequence_length --global-batch"]),
        (
            ["compare", "mine:job", "--global-batch-size", "8", "--device", "T4", "--measure"],
            2,
            ["on this machine", "T4"],
        ),
        (
            ["gpus", "mine:job", "--global-batch-size", "8", "--sort", "price"],
            2,
            ["price", "cost, memory, speed"],
        ),
        (["gpus", "mine:job", "--global-batch-size", "8", "--sort", "cost"], 2, ["--prices FILE"]),
        (
            ["estimate", "mine:job", "--device", "name=Mine,memory=8GiB,bandwith=300GB,tflops=9"],
            2,
            ["bandwith", "bandwidth"],
        ),
        (["estimate", "mine:job", "--device", "T4", "--budget", "lots"], 2, ["lots", "11GiB"]),
        (["estimate", "mine:job", "--device", "T4", "--budget", "16"], 2, ["16GiB"]),
        (["estimate", "mine:job", "--device", "T4", "--set", "height=3"], 2, ["height", "width"]),
        (["estimate", "mine:vector_loss", "--device", "T4"], 2, ["shape (1, 4)", "scalar"]),
        (["estimate", "mine:frozen_loss", "--device", "T4"], 2, ["no gradient"]),
        (
            [
                *("plan", "mine:ragged_batch", "--device", "T4"),
                *("--global-batch-size", "8", "--micro-batch-size", "4"),
            ],
            2,
            ["(8, 4)", "(9,)", "Job(batch_dim=1)", "Job(split="],
        ),
        (
            ["plan", "mine:job", "--device", "T4", "--global-batch-size", "8", "--micro-batch-size", "3"],
            2,
            ["3", "does not divide", "8"],
        ),
    ],
)
def test_bad_usage_says_what_was_found_and_the_nearest_way_out(
    folder: Path, arguments: list[str], status: int, words: list[str]
) -> None:
    done = brimful(folder, *arguments)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_budget_too_small_says_by_how_much_because_of_what_and_what_would_fit(folder: Path) -> None:
    done = brimful(
        folder, "plan", "mine:job", "--device", "T4", "--global-batch-size", "8", "--budget", "138MiB",
        "--set", "width=1024", "--json",
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["status"] == "infeasible"
    assert document["shortfall_bytes"] == document["smallest_peak_bytes"] - document["budget_bytes"] > 0
    message = document["error"]["message"]
    for words in ("too much", "largest part", "would fit"):
        assert words in message


def test_an_estimate_that_does_not_fit_exits_with_1(folder: Path) -> None:
    done = brimful(folder, "estimate", "mine:job", "--device", "T4", "--budget", "1MiB")
    assert done.returncode == 1
    assert "does not fit" in done.stdout


def test_help_loads_no_torch(folder: Path) -> None:
    code = "import sys; import brimful, brimful.cli.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    done = brimful(folder, "--help")
    assert done.returncode == 0
    for command in ("estimate", "plan", "train"):
        assert command in done.stdout


CALIBRATED_DEVICE_KEYS = {
    "name",
    "source",
    "kept_in",
    "launch_seconds",
    "host_link_bytes_per_second",
    "context_bytes",
    "dispatch",
    "curves",
}


def test_calibrate_tells_what_is_kept_without_measuring_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(calibrate, "measure_device", lambda *_args, **_kwargs: CALIBRATION)
    calibrate.calibrate_cpu()
    done = brimful(folder, "calibrate", "--json")
    assert done.returncode == 0, done.stderr
    device = json.loads(done.stdout)["devices"][0]
    assert set(device) == CALIBRATED_DEVICE_KEYS
    assert device["curves"] == {"elementwise": [[8.0, 1e-6], [8e6, 1e-3]]}
    shown = brimful(folder, "calibrate")
    assert str(folder / "cache" / "brimful" / "cpu.json") in shown.stdout
    assert "cpu: measured on this machine" in shown.stdout
    assert "measuring" not in shown.stderr


def test_calibrate_shows_what_it_measures_in_a_line_every_ten_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_args: object, progress: Callable[[str], None], **_options: object) -> calibrate.Calibration:
        for sweep in range(70):
            progress(f"matmul in float32 ({sweep} of 70)")
        return CALIBRATION

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(calibrate, "measure_device", measured)
    app(["calibrate", "--force"], standalone_mode=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(status, "SECONDS_BETWEEN_LINES", 0.0)
    app(["calibrate", "--force"], standalone_mode=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "measuring: matmul in float32 (69 of 70) (0 s)"
    assert len(lines) == 70


@pytest.mark.slow
def test_calibrate_measures_this_machine_and_estimates_then_use_it(folder: Path) -> None:
    done = brimful(folder, "calibrate", is_measured=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) <= 6  # one every ten seconds, of less than a minute
    assert "kept in" in done.stdout
    assert brimful(folder, "estimate", "mine.py:job", "--device", "cpu").returncode == 0
    assert len(json.loads((folder / "cache" / "brimful" / "cpu.json").read_text())["cpus"]) == 1


TRAIN = (
    "--global-batch-size", "--budget", "--device", "--precision", "--micro-batch-size", "--recompute",
    "--optimizer", "--optimizer-implementation", "--allow-optimizer", "--chunked-loss",
    "--expandable-segments", "--max-exceedance", "--effort", "--offload-activations",
    "--host-memory", "--split-batch-norm",
    "--optimizer-in-backward",
    "--offload-optimizer", "--prefetch-inputs", "--own-checkpointing", "--memory-format",
    "--compile", "--parallelism", "--reshard",
    "--param-dtype", "--offload-parameters", "--job-calibration",
    "--tensorboard", "--wandb", "--plan", "--plan-only", "--epochs",
    "--steps",
    "--seed", "--max-gradient-norm", "--learning-rate", "--weight-decay", "--schedule",
    "--warmup", "--ema-decay", "--correct-batch-norm", "--patience", "--run-dir",
    "--live", "--live-port", "--resume", "--save-every",
    "--validate-every",
    "--keep-saves", "--compare-plain", "--json",
)  # fmt: skip
LENGTH = ["--epochs", "--dataset-size", "--samples", "--tokens"]
OPTIONS = {
    "calibrate": ["--force", "--json"],
    "doctor": [
        "--sarif", "--device", "--micro-batch-size", "--precision", "--seq-len", "--image-size", "--set",
        "--dtype", "--lora", "--quantize", "--kill", "--json",
    ],
    "estimate": [
        "--device", "--micro-batch-size", "--gradient-accumulation-steps", "--precision", "--optimizer",
        "--optimizer-implementation", "--recompute", "--memory-format", "--budget", "--seq-len",
        "--image-size", "--set", "--dtype", "--lora", "--quantize", "--largest",
        "--chunked-loss", "--offload-activations", "--optimizer-in-backward", "--offload-optimizer",
        "--allocator", "--compare-allocators", "--phases", "--without", "--save-trace", "--json",
        "--compile", "--new-tokens", "--beams",
        "--prices", *LENGTH,
    ],
    "compare": [
        "--global-batch-size", "--device", "--budget", "--precision", "--optimizer", "--micro-batch-size",
        "--measure", "--study", "--markdown", "--plot", "--seq-len", "--image-size", "--set", "--dtype",
        "--lora", "--quantize", "--json",
    ],
    "gpus": [
        "--global-batch-size", "--precision", "--optimizer", "--split-batch-norm", "--device", "--prices",
        "--sort", "--seq-len", "--image-size", "--set", "--dtype", "--lora", "--quantize", "--json", *LENGTH,
    ],
    "plan": [
        "--global-batch-size", "--device", "--budget", "--precision", "--micro-batch-size", "--recompute",
        "--optimizer", "--optimizer-implementation", "--allow-optimizer", "--chunked-loss",
        "--expandable-segments", "--max-exceedance", "--effort", "--offload-activations",
    "--host-memory", "--split-batch-norm",
    "--optimizer-in-backward",
        "--offload-optimizer", "--prefetch-inputs", "--own-checkpointing", "--memory-format", "--compile",
        "--world-size", "--num-nodes", "--network", "--parallelism", "--reshard", "--param-dtype",
        "--offload-parameters", "--job-calibration",
        "--seq-len",
        "--image-size", "--set", "--dtype", "--lora", "--quantize",
        "--largest", "--output", "--check", "--diff", "--export", "--verify", "--json", "--prices", *LENGTH,
    ],
    "run": [
        "--module", "--steps", "--eager", "--budget", "--device", "--output", "--timeline", "--live",
        "--live-port",
    ],
    "report": ["--output", "--device", "--model", "--force"],
    "train job": [
        *TRAIN, "--seq-len", "--image-size", "--set", "--dtype", "--lora", "--quantize", "--workers",
        "--prefetch-factor", "--pin-memory",
    ],
    "train images": [
        *TRAIN, "--model", "--weights", "--augment", "--balance-classes", "--bad-samples", "--check-files",
        "--image-size", "--validation-fraction", "--workers", "--prefetch-factor", "--timm-transforms",
        "--training-metrics",
    ],
    "train text-classification": [
        *TRAIN, "--lora", "--quantize", "--merge-adapters",
        "--model", "--tokenizer", "--validation-file", "--text-column", "--pair-column",
        "--label-column", "--encoding", "--seq-len", "--balance-classes", "--validation-fraction",
        "--bad-samples", "--multi-label", "--label-separator", "--training-metrics",
    ],
    "train language-model": [
        *TRAIN, "--lora", "--quantize", "--merge-adapters",
        "--model", "--tokenizer", "--text-column", "--encoding", "--seq-len", "--validation-fraction",
        "--bad-samples",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("record", "recipe"),
    [
        ("ImageOptions", "image_classification"),
        ("TextClassificationOptions", "text_classification"),
        ("LanguageModelOptions", "language_model"),
    ],
)
def test_the_options_of_a_recipe_are_its_arguments_with_the_same_defaults(record: str, recipe: str) -> None:
    from brimful import recipes
    from brimful.cli import options

    given = {field.name: field.default for field in fields(getattr(options, record))}
    parameters = inspect.signature(getattr(recipes, recipe)).parameters.values()
    taken = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    taken.pop("seed", None)
    assert given == taken


@pytest.mark.parametrize("command", OPTIONS)
def test_options_are_exactly_these(command: str) -> None:
    from typer.main import get_command

    from brimful.cli.app import app

    found = get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    parameters = found.params
    options = [name for p in parameters for name in p.opts if name.startswith("--")]
    assert sorted(options) == sorted(OPTIONS[command])
