"""A live page shows what came last, costs little, and changes in a real browser without being loaded again."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from brimful.report.layout import Remark
from brimful.report.page import Page, Section, Unit, curve
from brimful.report.page.live import LivePage
from helpers.chromium import CHROMIUM, Chromium


def run_of(steps: int) -> Page:
    losses = [1 / (step + 1) for step in range(steps)]
    drawn = curve("Loss", "step", [float(step + 1) for step in range(steps)], Unit.NUMBER, {"loss": losses})
    found = (Section(title="Findings", content=(Remark("note", "found later"),)),) if steps > 4 else ()
    return Page(title=f"{steps} steps", sections=(*found, Section(title="Curves", content=(drawn,))))


def shown(page: LivePage) -> str:
    with urlopen(page.url, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def until_shown(page: LivePage, words: str) -> None:
    deadline = time.monotonic() + 20
    while words not in shown(page):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_page_is_made_once_and_when_it_is_asked_for() -> None:
    made = []

    def make() -> Page:
        made.append(1)
        return run_of(3)

    with LivePage("a run") as page:
        assert "<h1>a run</h1>" in shown(page)
        page.show(make)
        assert not made
        assert "<h1>3 steps</h1>" in shown(page)
        assert shown(page) == shown(page)
        assert made == [1]


def test_making_pages_takes_a_small_part_of_the_time() -> None:
    def slow() -> Page:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        return run_of(3)

    with LivePage("a run") as page:
        page.show(slow)
        assert "<h1>3 steps</h1>" in shown(page)
        began = time.monotonic()
        page.show(lambda: run_of(4))
        until_shown(page, "<h1>4 steps</h1>")
        assert time.monotonic() - began > 0.8


def test_a_page_that_cannot_be_made_says_why() -> None:
    def broken() -> Page:
        raise ValueError("<no>")

    with LivePage("a run") as page:
        page.show(broken)
        assert "the run is not affected: ValueError: &lt;no&gt;" in shown(page)
        page.show(lambda: run_of(3))
        until_shown(page, "<h1>3 steps</h1>")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_real_browser_follows_a_page_in_place_until_it_ends(tmp_path: Path) -> None:
    """It draws each chart once, in the same element, and its own policy permits all that it does."""
    with LivePage("a run") as page:

        def first() -> Page:
            page.show(lambda: run_of(9))
            return run_of(4)

        page.show(first)
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
        opened = subprocess.run(
            [
                *(str(CHROMIUM), *options, "--virtual-time-budget=7000", f"--user-data-dir={tmp_path}"),
                page.url,
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "CONSOLE" not in opened.stderr
    dom = opened.stdout
    assert "<h1>9 steps</h1>" in dom
    assert "<title>9 steps</title>" in dom
    assert dom.index("found later") < dom.index("<canvas")
    assert dom.count("<canvas") == 1
    assert 'aria-label="Chart: Loss. loss 1 at first, 0.1111 at last.' in dom
    assert 'aria-live="off">step 9: loss 0.1111</div>' in dom
    assert re.search(r'role="status">Live</span> <span>· [^<]+</span>', dom)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_asks_again_when_it_has_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that takes longer than the time between two asks is made once, and shown."""
    with LivePage("a run") as page, Chromium(tmp_path, page.url) as browser:
        latest, asked = page._latest, []

        def slow() -> bytes:
            asked.append(time.monotonic())
            time.sleep(5)
            return latest()

        monkeypatch.setattr(page, "_latest", slow)
        page.show(lambda: run_of(9))
        browser.until("document.title === '9 steps'")
        assert len(asked) == 1
        browser.evaluate("document.querySelector('.live button').click()")
        assert browser.evaluate("document.querySelector('.live').textContent").startswith("Paused")
        assert not browser.errors
