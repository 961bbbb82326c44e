"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.calibrated import output_of
from helpers.command_line import brimful

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
    ),
    *DOCS,
]
LONGEST_README = 130


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shown(first: str) -> list[str]:
    """Lines of the output in the README that begins so."""
    (found,) = re.findall(rf"^```text\n({first}.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [line for line in str(found).splitlines() if line != "  ..."]


def without_times(line: str) -> str:
    """A line without what depends on how fast this machine is."""
    return re.sub(r" +[\d.]+ .?s\b( predicted)?", "", line)


@pytest.mark.slow
def test_a_watched_script_prints_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    ran = brimful(ROOT, "run", "examples/leaky.py", is_measured=False)
    assert ran.returncode == 0
    assert set(shown("watched 3")) <= set(ran.stderr.splitlines())


@pytest.mark.slow
def test_the_guide_of_the_trainer_ends_as_shown(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    guide = (ROOT / "docs" / "howto" / "trainer.md").read_text(encoding="utf-8")
    script.write_text(re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)[0])
    printed = map(without_times, output_of(script, tmp_path).splitlines())
    assert {without_times(line).partition(", ")[0] for line in shown("brimful:")} <= {
        line.partition(", ")[0] for line in printed
    }


@pytest.mark.slow
def test_an_estimate_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    (command,) = re.findall(r"^brimful (estimate .*?) +#", README, re.MULTILINE)
    ran = brimful(tmp_path, *shlex.split(command))
    assert ran.returncode == 1  # it does not fit
    assert set(map(without_times, shown("gpt2"))) <= set(map(without_times, ran.stdout.splitlines()))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_shown_are_commands(page: Path) -> None:
    from typer.main import get_command

    from brimful.cli.app import app

    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for language, block in fences if not language for line in block.splitlines()]
    shown = [line.partition(" #")[0] for line in lines if re.match(r"(torchrun .* -m )?brimful ", line)]
    for line in shown:
        name, *arguments = shlex.split(line.partition("brimful ")[2])
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        if name == "train":
            first = arguments.pop(0) if arguments[0] in command.commands else "job"
            command = command.commands[first]
        command.make_context(name, arguments)
    if name_of(page) in ("README.md", "docs/reference/cli.md"):
        assert len(shown) >= 3


def test_every_command_has_an_example() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^brimful (\w+)", text, re.MULTILINE))
    assert shown == {"calibrate", "estimate", "gpus", "plan", "train"}


def test_the_command_line_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cli_reference.py"), "--check"], cwd=ROOT, check=False
    )
    assert done.returncode == 0, "run `python scripts/cli_reference.py`"


def test_every_correction_is_described() -> None:
    from brimful.capture.corrections import RULES
    from brimful.devices import find_device
    from brimful.settings import Settings

    described = (ROOT / "docs" / "explanation" / "estimate.md").read_text(encoding="utf-8")
    rows = [row.split(" | ", 1) for row in described.splitlines() if row.startswith("| `")]
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_to_files(page: Path) -> None:
    """Links of Markdown, and code such as `tests/unit/test_job.py`."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    is_of_the_past = page.name == "CHANGELOG.md"  # entries name files that were there then
    for path in re.findall(r"`((?:tests|src|benchmarks|scripts|examples)/[\w/.]+\w)`", text):
        assert is_of_the_past or (ROOT / path).exists(), path
