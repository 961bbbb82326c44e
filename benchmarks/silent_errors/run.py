"""Are answers that once were silently wrong right, refused, or stated to be uncertain? Programs by kind.

    python benchmarks/silent_errors/run.py                   # all kinds, kept in results/silent_errors.json
    python benchmarks/silent_errors/run.py --kinds "links"   # some, not kept
    python benchmarks/silent_errors/run.py --before SRC      # the code in SRC, the `src` of an earlier
                                                             # commit: results/silent_errors_before.json

Each program runs in a process of its own. A raw error of brimful's, a program that does not end and an answer
that differs from the oracle without a word all count as wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SECONDS = 300
"""After which a program counts as one that does not end."""


def main() -> int:
    """Exit status 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="only these kinds")
    parser.add_argument("--before", type=Path, help="folder of earlier source code")
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from silent_errors.kinds import CASES

    if asked.one is not None:
        kind, name = asked.one.split("/", 1)
        return _run_here(next(case for case in CASES if (case.kind, case.name) == (kind, name)))
    cases = [case for case in CASES if asked.kinds is None or case.kind in asked.kinds]
    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(lambda case: _row(case, asked.before), cases))
    kinds = {kind: Counter(row["verdict"] for row in rows if row["kind"] == kind) for kind in _kinds(rows)}
    for kind, counts in kinds.items():
        print(f"{kind}: {dict(counts)}")
    if asked.kinds is None:
        from machine import commit_of, keep

        source = {} if asked.before is None else {"src_commit": commit_of(asked.before)}
        name = "silent_errors.json" if asked.before is None else "silent_errors_before.json"
        command = "python benchmarks/silent_errors/run.py" + " --before SRC" * (asked.before is not None)
        keep(name, command, source | {"kinds": kinds, "rows": rows}, "transformers", "lightning", "trl", "peft")
    return int(any(row["verdict"] in ("wrong", "error") for row in rows))


def _kinds(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def _row(case, before: Path | None) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="silent-") as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "BRIMFUL_PROGRESS": "0",
            "XDG_CACHE_HOME": folder,
        }
        if before is not None:
            environment["PYTHONPATH"] = str(before.resolve())
        command = [sys.executable, __file__, "--one", f"{case.kind}/{case.name}"]
        try:
            ran = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            last = (ran.stdout.strip().splitlines() or [""])[-1]
            verdict, _, detail = last.partition(":")
        except subprocess.TimeoutExpired:
            verdict, detail = "error", f"did not end within {SECONDS} s"
    if verdict not in ("right", "refused", "stated", "wrong", "error"):
        verdict, detail = "error", (ran.stderr.strip().splitlines() or ["no output"])[-1]
    print(f"{case.kind} / {case.name}: {verdict} {detail}"[:200], flush=True)
    return {"kind": case.kind, "case": case.name, "verdict": verdict, "detail": _without_folders(detail)[:300]}


def _without_folders(text: str) -> str:
    """A message without folders of this machine: the checkout's, and those of temporary files."""
    checkout, temporary = Path(__file__).resolve().parents[2], tempfile.gettempdir()
    return re.sub(rf"{re.escape(temporary)}/[^/\s'\"]+/", "", text.replace(f"{checkout}/", ""))


def _run_here(case) -> int:
    from silent_errors.case import WrongError

    try:
        print(f"{case.run()}: ", flush=True)
    except WrongError as error:
        print(f"wrong: {error}".replace("\n", " "), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
