"""The Python of the documentation runs as written, and prints what the page shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "```python\n" in path.read_text(encoding="utf-8") and path.name != "weights.md"
)
"""`weights.md` needs a run for each of its examples: `test_weights.py`."""

SCRIPT = re.compile(r"# \w+\.py\n")
"""First line of a script by itself; those of `own-loop.md` run in `test_own_loop.py`."""
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
JOB = """
import torch
import brimful as bf

batches = [torch.randn(32, 8) for _ in range(2)]
job = bf.Job(
    model=lambda: torch.nn.Linear(8, 4),
    loss=lambda model, x: model(x).square().mean(),
    batch=lambda n: torch.randn(n, 8),
    data=lambda: bf.Data(train=torch.ones(64, 8)),
)
"""


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")  # the width of what pages show
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "job", raising=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    sys.modules.pop("job", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, but as an error
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine with few processors
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*")  # of torch 2.13's names
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")  # Lightning's advice
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run_and_print_what_is_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = ""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            assert block == printed
        elif page.name == "tutorial.md" and not names:
            Path("job.py").write_text(block, encoding="utf-8")
            names["job"] = None
        elif not SCRIPT.match(block):
            capsys.readouterr()
            exec(compile(block, page.name, "exec"), names)
            printed = capsys.readouterr().out
