"""`brimful.watch`: a watched loop of a notebook or a script, whose report follows when it ends."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Self

from brimful.distributed.ranks import shows_report
from brimful.doctor.text import watched_document, watched_report, watched_text
from brimful.doctor.watch import STEPS, Watch
from brimful.report.html import as_html
from brimful.utils.display import BestEffortText


class ShownWatch(Watch):
    """A `Watch` that shows what it saw when it is left; see `brimful.watch`."""

    _has_entered = False

    def __enter__(self) -> Self:
        self._has_entered = True
        return super().__enter__()

    def __del__(self) -> None:
        if not self._has_entered:
            warnings.warn(
                "bf.watch() was called without `with`, and watches nothing. "
                "Write `with bf.watch():` around the training loop.",
                stacklevel=2,
            )

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        try:
            if shows_report(error, self.own_task):
                self._show()
        except Exception as own:  # an error of the loop passes through
            self.error = self.error or f"{type(own).__name__}: {own}"
            print(
                f"brimful: the report failed, please report it: {self.error}", file=BestEffortText(sys.stderr)
            )

    def _show(self) -> None:
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            ipython.display.display(self)
        else:
            print(self, file=BestEffortText(sys.stderr), flush=True)

    @property
    def report(self) -> str:
        """What was seen, for a reader."""
        return watched_text(self.evidence())

    @property
    def document(self) -> dict[str, Any]:
        """What was seen, as `brimful run --output` writes it."""
        return watched_document(self.evidence())

    def __str__(self) -> str:
        return self.report

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(self.report)

    def _repr_html_(self) -> str:
        return as_html(watched_report(self.evidence()))


def watch(steps: int = STEPS, *, eager: bool = False) -> ShownWatch:
    """Watch a training loop: what holds its memory, where its time goes, what is wrong with it::

        with bf.watch():
            for batch in loader:
                ...

    When the context ends, also by an error, the report follows: in a notebook below the cell, elsewhere on
    standard error. Of several ranks the first shows it, and those that fail. What the loop computes stays the
    same.

    Args:
        steps: Optimizer steps that are recorded; as many are timed after them.
        eager: Whether compiled code runs eagerly in the recorded steps; recording ends at its first call
            otherwise.

    Returns:
        A context manager, with the `report` as text and the `document` as for JSON.
    """
    return ShownWatch(steps, eager=eager)
