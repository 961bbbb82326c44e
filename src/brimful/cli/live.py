"""`--live`: a page that follows a script or a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from brimful.cli.output import say
from brimful.cli.report import run_so_far
from brimful.utils.first_rank import is_first_rank

if TYPE_CHECKING:
    from brimful.doctor import Evidence
    from brimful.report.page import Page
    from brimful.report.page.live import LivePage
    from brimful.trainer import Callback

LIVE_HELP = "Serve a page that follows it on this machine; standard error has its address."
PORT_HELP = "The port of the page of --live. Default: a free one."


@contextmanager
def live_page(title: str, live: bool, port: int | None) -> Iterator[LivePage | None]:
    """A page that is served while the context is open, where it is asked for, by the first of several ranks."""
    if not (live or port is not None) or not is_first_rank():
        yield None
        return
    from brimful.report.page.live import LivePage

    with LivePage(title, port) as page:
        say(f"live page, until this ends: {page.url}")
        yield page


def showing_evidence(page: LivePage | None) -> Callable[[Evidence], None] | None:
    """What shows on a page what was seen of a script so far."""
    if page is None:
        return None
    return lambda evidence: page.show(partial(_evidence_page, evidence))


def _evidence_page(evidence: Evidence) -> Page:
    from brimful.doctor import watched_document
    from brimful.report.page import watched_file_page

    return watched_file_page(json.dumps(watched_document(evidence)).encode(), where="what was seen")


def showing_run(page: LivePage | None, directory: Path) -> list[Callback]:
    """The callbacks that show on a page what a run has written so far."""
    if page is None:
        return []
    from brimful.trainer import Callback

    def show(*_: object) -> None:
        page.show(partial(run_so_far, directory))

    shown = Callback()
    for event in ("on_step", "on_epoch", "on_validation"):
        setattr(shown, event, show)
    return [shown]
