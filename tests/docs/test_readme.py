"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def block(language: str, number: int = 0) -> str:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return found[number]


@pytest.mark.slow
def test_the_first_example_runs_as_pasted_and_its_estimate_is_the_one_shown(tmp_path: Path) -> None:
    """Times on a CPU differ by machine; an estimate for a GPU does not."""
    script = tmp_path / "first.py"
    script.write_text(block("python"), encoding="utf-8")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"^```\n(job on RTX 3090.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    estimate, _, rest = shown.group(1).partition("job on cpu")
    assert done.stdout.startswith(estimate)
    for label in re.findall(r"^  (\w+)", rest, re.MULTILINE):
        assert f"\n  {label}" in done.stdout


def test_the_commands_shown_are_commands() -> None:
    from typer.main import get_command

    from brimful.cli.app import app

    shown = [line for text in (README,) for line in text.splitlines() if line.startswith("brimful ")]
    assert {shlex.split(line)[1] for line in shown} == {"calibrate", "estimate", "gpus", "plan", "train"}
    for line in shown:
        _, name, *arguments = shlex.split(line)
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        command.make_context(name, arguments)


def test_every_correction_is_told_about() -> None:
    from brimful.capture.corrections import RULES
    from brimful.devices import find_device
    from brimful.settings import Settings

    told = (ROOT / "docs" / "how-the-estimate-works.md").read_text(encoding="utf-8")
    rows = [row.split(" | ", 1) for row in told.splitlines() if row.startswith("| `")]
    devices = {name: text.partition(":")[0] for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    for rule in RULES:
        applies = tuple(
            rule(target=find_device(name), settings=Settings(micro_batch_size=1)).applies()
            for name in ("cpu", "A100-SXM4-80GB")
        )
        if applies != (False, False):  # else a rule for another CPU than this one
            words = {(True, False): "CPU", (False, True): "CUDA", (True, True): "every device"}
            assert devices.get(rule.name) == words[applies], rule.name


def test_the_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], cwd=ROOT, check=False
    )
    assert done.returncode == 0, "run `python benchmarks/tables.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
