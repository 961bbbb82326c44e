"""Rows of timm's files of measurements, and models that are not those measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from times.timm_rows import differs, rows_of


def test_a_sample_has_all_rows_of_its_models_and_is_the_same_each_time(tmp_path: Path) -> None:
    rows = [f"m{index // 2},{'eager' if index % 2 else 'compiled'}" for index in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["model,mode", *rows]), encoding="utf-8")
    sample = rows_of(tmp_path / "rows.csv", 5)
    assert len({row["model"] for row in sample}) == 5
    assert len(sample) == 10
    assert sample == rows_of(tmp_path / "rows.csv", 5)
    assert len(rows_of(tmp_path / "rows.csv")) == 40


@pytest.mark.parametrize("count", [25_557_032, 25_555_000, 25_565_000])
def test_a_model_with_the_measured_number_of_parameters_is_the_same(count: int) -> None:
    assert differs(count, "25.56") is None


@pytest.mark.parametrize("count", [25_554_000, 25_566_000, 88_791_336])
def test_a_model_with_another_number_of_parameters_is_named_with_both(count: int) -> None:
    found = differs(count, "25.56")
    assert found == f"today's timm builds a model of {count / 1e6:.2f}M parameters; 25.56M were measured"
