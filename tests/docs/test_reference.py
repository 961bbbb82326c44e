"""The reference pages describe all that there is, and nothing else."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful as bf

DOCS = Path(__file__).resolve().parents[2] / "docs"
PACKAGE = DOCS.parent / "src" / "brimful"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_api_reference_has_every_public_name() -> None:
    described = re.findall(
        r"^\.\. auto(?:class|function|exception):: brimful\.(\w+)$", page("reference/api.md"), re.M
    )
    assert sorted(described) == sorted(set(bf.__all__) - {"__version__"})


def test_the_architecture_has_every_package_and_its_files_exist() -> None:
    text = page("architecture.md")
    table = text.split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| `([^|]+)` \|$", table, re.M)
    named = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    there = {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__")) or (path / "__init__.py").exists()
    }
    assert named == there
    for path in re.findall(r"`([\w/]+\.py)`", text):
        if "/" in path or path in {first for _, first in rows}:
            root = DOCS.parent if path.startswith(("tests/", "benchmarks/")) else PACKAGE
            assert (root / path).exists(), path


def keys(heading: str) -> list[set[str]]:
    """The keys of each table in a section of the page about JSON."""
    section = page("reference/json.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"\| key \| meaning \|\n\|---\|---\|\n((?:\|.*\n?)+)", section)
    return [
        {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split(" | ")[0])}
        for table in tables
    ]


@pytest.fixture
def job() -> bf.Job:
    return bf.Job(
        model=lambda: torch.nn.Linear(4, 4),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda n: torch.ones(n, 4),
        data=lambda: bf.Data(train=torch.ones(8, 4)),
    )


def test_the_keys_of_predictions_are_described(job: bf.Job) -> None:
    from brimful.api import largest, largest_plan
    from brimful.codec import to_json_document
    from brimful.prediction import GenerationEstimate
    from brimful.report import error_document

    estimate = bf.estimate(job, "T4", micro_batch_size=8)
    sized = of_size_1(job)
    of_largest = {*largest(sized, "T4").to_json()["largest_value"], "what"}
    of_generation = {*(field.name for field in fields(GenerationEstimate)), "verdict"}
    assert keys("brimful estimate") == [set(estimate.to_json()), of_generation, of_largest]
    document = bf.gpus(job, global_batch_size=8, devices=["T4"]).to_json()
    of_gpu = document["gpus"][0]
    assert keys("brimful gpus") == [set(document), set(of_gpu), set(of_gpu["usual"])]
    plan = bf.plan(job, "T4", global_batch_size=8)
    planned = largest_plan(sized, "T4", global_batch_size=8).to_json()["largest_value"]
    of_plan, beyond_estimate = keys("brimful plan")
    assert of_plan == set(plan.to_json())
    assert beyond_estimate == set(planned) - of_largest
    assert keys("brimful plan --check") == [set(plan.check(job).to_json())]
    (settings,) = keys("Settings")
    assert settings == set(to_json_document(plan.settings))
    with pytest.raises(bf.InfeasibleError) as failed:
        bf.plan(job, "T4", global_batch_size=8, budget="1MiB")
    always, infeasible = keys("Errors")
    assert set(error_document(failed.value)) == always | infeasible


def of_size_1(job: bf.Job) -> Callable[[int], bf.Job]:
    """What makes a job of one size only."""

    def sized(size: int) -> bf.Job:
        if size > 1:
            raise ValueError(f"at most 1, not {size}")
        return job

    return sized


def test_the_keys_of_runs_are_described(job: bf.Job) -> None:
    from brimful.report import calibration_document, training_document

    result, _ = bf.fit(job, bf.Settings(micro_batch_size=8), steps=1, show_progress=False)
    assert keys("brimful train") == [set(training_document(result, None))]
    document: dict[str, Any] = calibration_document([bf.devices.find_device("T4")], ["there"])
    assert keys("brimful calibrate") == [set(document), set(document["devices"][0])]


def test_the_keys_of_checks_are_described(job: bf.Job) -> None:
    from brimful.api import capture_trace
    from brimful.doctor import Evidence, Finding
    from brimful.doctor.allocations import DeviceUse
    from brimful.doctor.machine import this_machine
    from brimful.doctor.machine_text import machine_document
    from brimful.doctor.text import captured_document

    trace = capture_trace(job, bf.Settings(micro_batch_size=8), "T4")
    of_job = captured_document(Evidence.of_trace(trace), device="T4", found=(), notes=())
    of_scripts, *described = keys("brimful doctor")
    assert of_scripts == {"scripts", "findings"}
    records = [{field.name for field in fields(each)} for each in (Finding, DeviceUse)]
    assert described == [records[0], set(of_job), records[1], set(machine_document(this_machine()))]


GUIDES = [
    DOCS.parent / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "decisions"} & set(path.parts)),
]
OF_OTHERS = {"--nproc-per-node", "--max-restarts", "--cpu", "--config_file"}
"""Options of torchrun and accelerate."""


def options_of(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_errors_options_and_modules_that_guides_name_exist(guide: Path) -> None:
    from typer.main import get_command

    import brimful.errors
    from brimful.cli.app import app

    text = guide.read_text(encoding="utf-8")
    text = re.sub(r"<!-- benchmarks/tables\.py.*?<!-- end -->", "", text, flags=re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text)
    named = {name for span in code for name in re.findall(r"^(\w+Error)$", span)}
    assert {name for name in named if not hasattr(brimful.errors, name)} == set()
    flags = {flag for span in code for flag in re.findall(r"(?:^| )(--[a-z][\w-]*)", span)}
    scripts = {"--check", "--help", "--seconds", "--dry"}
    assert flags - set(options_of(get_command(app))) - OF_OTHERS - scripts == set()
    for dotted in {name for span in code for name in re.findall(r"\bbrimful((?:\.\w+)+)", span)}:
        assert pkgutil.resolve_name(f"brimful{dotted}") is not None, dotted
