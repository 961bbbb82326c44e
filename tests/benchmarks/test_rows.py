"""Rows of a long benchmark: written one by one, taken up again only by the same commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import machine  # noqa: E402


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    at_commit(monkeypatch, "a1")
    return tmp_path


def at_commit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(machine, "commit", lambda: name)


def rows(command: str = "python some.py") -> machine.Rows:
    return machine.Rows("some.json", command)


def test_a_stopped_run_goes_on_where_it_was() -> None:
    rows().add({"model": "a", "seconds": 1.0})
    again = rows()
    assert again.has(model="a")
    assert not again.has(model="b")
    again.add({"model": "b", "seconds": 2.0})
    assert [row["model"] for row in rows().rows] == ["a", "b"]


def test_another_commit_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rows().add({"model": "a"})
    at_commit(monkeypatch, "b2")
    assert rows().rows == []


def test_changed_files_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of changed files have the same name."""
    at_commit(monkeypatch, "a1+")
    rows().add({"model": "a"})
    assert rows().rows == []


def test_another_command_begins_anew() -> None:
    rows().add({"model": "a"})
    assert rows("python other.py").rows == []


def test_a_finished_result_has_all_rows_and_the_next_run_begins_anew(results: Path) -> None:
    first = rows()
    first.add({"model": "a"})
    first.keep({"summary": 1})
    document = json.loads((results / "some.json").read_text())
    assert document["rows"] == [{"model": "a"}]
    assert (document["commit"], document["command"], document["summary"]) == ("a1", "python some.py", 1)
    assert sorted(path.name for path in results.iterdir()) == ["some.json"]
    assert rows().rows == []


def test_rows_are_stamped_with_the_commit_that_began(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    """What runs was loaded then, whatever is committed meanwhile."""
    first = rows()
    at_commit(monkeypatch, "b2")
    first.add({"model": "a"})
    first.keep({})
    assert json.loads((results / "some.json").read_text())["commit"] == "a1"
