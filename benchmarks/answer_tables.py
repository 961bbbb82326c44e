"""The table of `docs/benchmarks.md` on answers that once were silently wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _made(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, torch {machine['torch']}, commit {result['commit'][:9]}; `{result['command']}`"


def _verdicts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items())) or "–"


def silent_error_lines() -> Iterator[str]:
    """Programs by kind, on the code before and on the present one."""
    result, before = _load("silent_errors"), _load("silent_errors_before")
    total, earlier = (Counter(row["verdict"] for row in each["rows"]) for each in (result, before))
    yield (
        f"*{total.total()} programs: {_verdicts(total)}. Of {earlier.total()} of them at commit "
        f"{before['src_commit'][:9]}: {_verdicts(earlier)}. {_made(result)}*"
    )
    yield ""
    yield "| kind | programs | earlier commit | now |"
    yield "|---|--:|---|---|"
    for kind, found in result["kinds"].items():
        was = _verdicts(before["kinds"].get(kind, {}))
        yield f"| {kind} | {sum(found.values())} | {was} | {_verdicts(found)} |"
