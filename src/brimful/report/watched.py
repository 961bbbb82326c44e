"""The rows of a watched run, in the terminal and on its page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from brimful.report.layout import Part, Remark, Row
from brimful.report.out_of_memory import asked_row
from brimful.report.plans import time_shares_text
from brimful.utils.quantities import format_bytes, format_seconds


def watched_rows(
    *,
    steps: int,
    failed: Any | None,
    measured_peak_bytes: int | None,
    growth_bytes: int | None,
    step_seconds: float | None,
    time_shares: Iterable[tuple[str, float]],
    launches: int | None,
    host_waiting_seconds: float | None,
    watching_seconds: float | None,
    notes: Iterable[str],
) -> Iterator[Part]:
    """What is known of the steps; `failed` has the op, the line and the bytes of what found no memory."""
    if failed is not None:
        yield asked_row(failed.op, failed.line, failed.requested_bytes, "out of memory")
    if measured_peak_bytes is not None:
        yield Row("allocated", f"{format_bytes(measured_peak_bytes)} at most, as torch measures it")
    if growth_bytes is not None:
        text = f"{format_bytes(growth_bytes)} a step" if growth_bytes > 0 else "none from step to step"
        yield Row("growth", text)
    if step_seconds is not None:
        yield Row("step", f"{format_seconds(step_seconds)}, unwatched")
    if shares := tuple(time_shares):
        yield Row("time goes to", time_shares_text(shares))
    if launches is not None and host_waiting_seconds is not None:
        waits = f"the host waits {format_seconds(host_waiting_seconds)} for the GPU"
        yield Row("launches", f"{launches:,} kernels a step; {waits}")
    if watching_seconds is not None:
        yield Row("watching", f"added {format_seconds(watching_seconds)} to these steps")
    elif step_seconds is not None and steps > 1:
        yield Row("watching", "added less to a step than unwatched steps differ by")
    yield from (Remark("note", each) for each in notes)


def why_partial(error: str, compiled: str) -> str:
    """Why recording ended before its time, so that the figures are not those of a step; "" if it did not."""
    if error:
        return f"recording ended by an error of brimful's own, please report it: {error}"
    if compiled:
        return (
            f"{compiled} calls compiled code, or an operator that torch compiles, such as torch.cond: "
            "recording ended there, as it would change. With --eager (in Python eager=True) compiled code runs "
            "eagerly in the recorded steps, which rounds otherwise; such operators do not."
        )
    return ""
