"""The tables of README.md and docs/, made from the JSON in benchmarks/results/.

python benchmarks/tables.py            # writes them
python benchmarks/tables.py --check    # exit status 1 if a file has others

A page has each table between `<!-- benchmarks/tables.py: NAME -->` and `<!-- end -->`. `tables.md` has their
templates, `table_records.py` what is computed of results before they are filled in.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brimful.utils.quantities import format_bytes, format_seconds
from table_records import COMPUTED, Record, load, percent, stamp

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = (
    "README.md",
    "docs/accuracy.md",
    "docs/benchmarks.md",
    "docs/howto/out-of-memory.md",
    "docs/howto/own-loop.md",
    "docs/reference/jobs.md",
)
BLOCK = re.compile(r"<!-- benchmarks/tables\.py: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
TEMPLATE = re.compile(r"^## (\w+)(?: \((\w+)\))?\n\n(.*?)\n*(?=^## |\Z)", re.MULTILINE | re.DOTALL)


SPECS: dict[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "percent": percent,
    "yes": lambda holds: "yes" if holds else "no",
    "counts": lambda counts: ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "0",
}
"""Of format strings, besides Python's own."""


class Formatter(string.Formatter):
    """Format strings with `SPECS`, and a dash for what is None."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        own = SPECS.get(format_spec)
        return super().format_field(value, format_spec) if own is None else own(value)


def main() -> int:
    """Write or check; the exit status."""
    templates = {
        name: (result, text) for name, result, text in TEMPLATE.findall((HERE / "tables.md").read_text("utf-8"))
    }
    unused, stale = set(templates), []
    for path in map(ROOT.joinpath, PAGES):
        text = path.read_text(encoding="utf-8")
        unused -= set(BLOCK.findall(text))
        fresh = BLOCK.sub(lambda found: _block(found[1], *templates[found[1]]), text)
        if fresh != text:
            stale.append(path)
        if "--check" not in sys.argv:
            path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} has other tables than the results")
    for name in sorted(unused):
        print(f"no page has the table {name!r}")
    return int(bool(unused) or ("--check" in sys.argv and bool(stale)))


def _block(name: str, result: str, template: str) -> str:
    record = load(result) | {"stamp": stamp(load(result))} if result else {}
    record |= COMPUTED[name](record) if name in COMPUTED else {}
    lines = "\n".join(_lines(template, record)).rstrip()
    return f"<!-- benchmarks/tables.py: {name} -->\n{lines}\n<!-- end -->"


def _lines(template: str, record: Record) -> Iterator[str]:
    fill = Formatter().vformat
    for line in template.splitlines():
        if found := re.match(r"each (\w+): (.*)", line):
            yield from (fill(found[2], (), each) for each in record[found[1]])
        else:
            yield fill(line, (), record)


if __name__ == "__main__":
    sys.exit(main())
