"""Rows of a file of measurements."""

from __future__ import annotations

from pathlib import Path

from times.sample import rows_of


def test_a_sample_has_all_rows_of_its_models_and_is_the_same_each_time(tmp_path: Path) -> None:
    rows = [f"m{index // 2},{'eager' if index % 2 else 'compiled'}" for index in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["model,mode", *rows]), encoding="utf-8")
    sample = rows_of(tmp_path / "rows.csv", 5)
    assert len({row["model"] for row in sample}) == 5
    assert len(sample) == 10
    assert sample == rows_of(tmp_path / "rows.csv", 5)
    assert len(rows_of(tmp_path / "rows.csv")) == 40
    eager = rows_of(tmp_path / "rows.csv", 5, mode="eager")
    assert [row["mode"] for row in eager] == ["eager"] * 5
