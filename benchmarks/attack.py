"""Attacks on brimful: kills, damaged and hostile files, failing memory and disks, odd arguments and jobs.

    python benchmarks/attack.py                          # all areas, kept in results/attack.json
    python benchmarks/attack.py --areas plan.json traces # some, not kept
    python benchmarks/attack.py --seconds 3600           # further random cases until the time is over, not kept
    python benchmarks/attack.py --areas signals --case NAME --folder NEW
    python benchmarks/attack.py --before                 # kept in results/attack_before.json

Every case checks the outcome by its own means. A resumed run must have the metrics of an undisturbed run, bit
for bit. Hostile code creates a file if it runs. A refusal must be an error message without traceback, and must
leave every file unchanged. `attacks/case.py` defines the kinds of failures.

Needs Linux. Cases that need root are skipped without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parent))

import brimful
from attacks.areas import AREAS
from attacks.case import Case, Kind
from attacks.material import make
from attacks.pool import Result, run_all
from machine import commit_of, keep


def main() -> int:
    """Exit status 1 if anything failed."""
    asked = arguments()
    begun = time.monotonic()
    deadline = None if asked.seconds is None else begun + asked.seconds
    folder = asked.folder or Path(
        tempfile.mkdtemp(prefix="attack-")
    )  # forks run what `TemporaryDirectory` leaves
    try:
        folder.chmod(0o755)
        (folder / "material").mkdir()
        material = make(folder / "material")
        print(f"prepared in {time.monotonic() - begun:.0f} s", flush=True)
        results = run_all(
            chosen(asked),
            material,
            folder,
            workers=asked.workers,
            deadline=deadline,
            report=show,
            keeps=asked.folder is not None,
        )
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    rows = [row(area.name, results) for area in AREAS if any(r.area == area.name for r in results)]
    for each in rows:
        print({name: value for name, value in each.items() if name != "failed"}, flush=True)
    if is_whole(asked):
        name = "attack_before.json" if asked.before else "attack.json"
        content = summary(rows, time.monotonic() - begun)
        keep(
            name, "python benchmarks/attack.py" + " --before" * asked.before, content, "safetensors", "msgspec"
        )
    return int(any(result.kind is not None for result in results))


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--areas", nargs="+", choices=[area.name for area in AREAS], metavar="AREA")
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--cases", type=int, help="at most so many in each area, spread over it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="go on with further seeds for so long")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--folder", type=Path, help="an empty one, in which the files of all cases are left")
    parser.add_argument("--before", action="store_true", help="keep the result as that of the code before")
    asked = parser.parse_args()
    if asked.case is not None and next(chosen(asked), None) is None:
        parser.error(f"no area has a case named {asked.case!r}")
    return asked


def is_whole(asked: argparse.Namespace) -> bool:
    """Whether all cases of the fixed seed were asked for."""
    return not (asked.areas or asked.case or asked.cases or asked.seed) and asked.seconds is None


def chosen(asked: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Cases with the names of their areas."""
    seeds = [asked.seed] if asked.seconds is None else count(asked.seed)
    tried: set[tuple[str, str]] = set()
    for seed in seeds:
        for area in AREAS:
            if asked.areas is None or area.name in asked.areas:
                cases = [case for case in area.cases(seed) if asked.case in (None, case.name)]
                new = [
                    case for case in cases if (area.name, case.name) not in tried
                ]  # some do not depend on it
                tried.update((area.name, case.name) for case in new)
                for case in spread(new, asked.cases):
                    yield area.name, case


def spread(cases: Sequence[Case], most: int | None) -> Sequence[Case]:
    """At most so many, from all over the sequence."""
    if most is None or len(cases) <= most:
        return cases
    return [cases[index * len(cases) // most] for index in range(most)]


def show(result: Result) -> None:
    """A line for what did not hold."""
    if result.kind is not None:
        print(f"{result.area} | {result.case} | {result.kind} | {result.detail}", flush=True)


def row(area: str, results: Sequence[Result]) -> dict[str, Any]:
    """An area's counts."""
    own = [result for result in results if result.area == area]
    kinds = Counter(result.kind for result in own if result.kind is not None)
    notes = Counter(result.detail for result in own if result.kind is None and result.detail)
    tried = sum(result.tried for result in own)
    return {
        "area": area,
        "tried": tried,
        "as_expected": tried - sum(kinds.values()),
        "failures": {kind: kinds[kind] for kind in (*map(str, Kind), "broken") if kinds[kind]},
        "ends": dict(sorted(notes.items())),
        "seconds": round(sum(result.seconds for result in own)),
        "failed": [
            {"case": result.case, "kind": result.kind, "detail": result.detail[-300:]}
            for result in own
            if result.kind is not None
        ],
    }


def summary(rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What is kept."""
    failures: Counter[str] = Counter()
    for each in rows:
        failures.update(each["failures"])
    return {
        "attacked_commit": commit_of(Path(brimful.__file__).parent),
        "seconds": round(seconds),
        "total": {
            "tried": sum(each["tried"] for each in rows),
            "as_expected": sum(each["as_expected"] for each in rows),
            "failures": dict(failures),
        },
        "areas": list(rows),
    }


if __name__ == "__main__":
    sys.exit(main())
