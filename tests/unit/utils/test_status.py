"""What takes long says what it is doing, and what is quick says nothing."""

from __future__ import annotations

import time

import pytest

from brimful.utils import status
from brimful.utils.status import busy, report, reporting_part


def test_in_a_log_a_line_says_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "SECONDS_BETWEEN_LINES", 0.0)
    with busy("planning"), busy("estimating"):
        report("capturing [red] micro-batches")
    assert capsys.readouterr().err == "planning: capturing [red] micro-batches (0 s)\n"


def test_a_part_of_the_work_is_named_before_what_happens_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "SECONDS_BETWEEN_LINES", 0.0)
    with busy("comparing GPUs"):
        with reporting_part("L4, 2 of 3"):
            report("capturing")
        report("writing")
    assert capsys.readouterr().err.splitlines() == [
        "comparing GPUs: L4, 2 of 3: capturing (0 s)",
        "comparing GPUs: writing (0 s)",
    ]


def test_what_is_quick_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with busy("planning"):
        report("capturing")
    report("nobody listens")
    assert capsys.readouterr() == ("", "")


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setenv(status.OFF, "0")
    with busy("planning"):
        report("capturing")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_status_line_which_is_removed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "SECONDS_BEFORE_DISPLAY", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    with busy("planning"):
        time.sleep(0.2)
        report("capturing")
        time.sleep(0.5)
    written = capsys.readouterr().err
    assert "planning: capturing …" in written
    assert written.endswith("\x1b[2K")  # the line is cleared


def test_an_interrupt_passes_through_and_ends_the_display() -> None:
    with pytest.raises(KeyboardInterrupt), busy("planning"):
        raise KeyboardInterrupt
    assert status._current.get() is None
