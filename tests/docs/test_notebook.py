"""The notebook runs from top to bottom, and shows what its stored outputs show."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def stored() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[list[str]]:
    return [sorted(output.get("data", {output["output_type"]: ""})) for output in cell["outputs"]]


@pytest.mark.slow
def test_the_cells_run_and_show_what_is_stored() -> None:
    """Exactly, but for cells with the tag "varies": their values are those of a machine."""
    executed = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))["executed"]
    for now, then in zip(code_cells(executed(stored())), code_cells(stored()), strict=True):
        if "varies" in then["metadata"].get("tags", ()):
            assert kinds(now) == kinds(then)
        else:
            assert now["outputs"] == then["outputs"]


def test_the_stored_notebook_is_whole_and_small() -> None:
    cells = code_cells(stored())
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("text/html" in output.get("data", ()) for cell in cells for output in cell["outputs"]) >= 5
    assert NOTEBOOK.stat().st_size < 200_000


def test_the_stored_notebook_has_no_paths_of_a_machine_and_no_scripts() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.findall(r"/(?:home|root|tmp|work|Users|usr|opt)/[^\"\s]*", text) == []
    assert "<script" not in text.lower()


def test_links_of_the_notebook_lead_to_pages() -> None:
    text = "".join("".join(c["source"]) for c in stored()["cells"] if c["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets
    assert [target for target in targets if not (NOTEBOOK.parent / target).is_file()] == []
