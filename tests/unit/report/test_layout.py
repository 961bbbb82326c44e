"""Text of results: lines are as wide as the terminal, and say the same however wide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.report.layout import Listing, Remark, Report, Row, as_text

WORDS = st.lists(st.sampled_from(["a", "micro-batch", "8.65 GiB", "(3.24–5.76 s)", "×"]), max_size=60).map(
    " ".join
)


@given(WORDS, WORDS, WORDS, WORDS)
def test_lines_fit_and_lose_no_word(heading: str, fact: str, note: str, cell: str) -> None:
    parts = (
        Row("predicted", fact),
        Remark("note", note),
        Listing(
            title=note, line="    {:>9}  {}", heading=("peak", "change"), rows=(("1 GiB", cell), ("", "→ x"))
        ),
    )
    report = Report(heading=heading, parts=parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100000")
        whole = as_text(report)
        patch.setenv("COLUMNS", "72")
        narrow = as_text(report)
    assert narrow.split() == whole.split()
    assert all(len(line) <= 72 for line in narrow.splitlines())
    assert "\u00a0" not in narrow


def test_a_sentence_continues_below_itself_and_a_number_keeps_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    report = Report(
        heading="job", parts=(Row("peak", "word " * 8 + "8.65 GiB and more"), Remark("note", "x " * 40))
    )
    first, second, note, rest = as_text(report).splitlines()[1:]
    assert first == "  peak            " + "word " * 7 + "word"
    assert second == "                  8.65 GiB and more"
    assert note.startswith("  note: x x")
    assert rest.startswith("    x")


def test_without_a_terminal_text_has_90_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    lines = as_text(Report(heading="job", parts=(Remark("note", "x " * 200),))).splitlines()
    assert len(lines[1]) in (89, 90)
