"""Everything a change must pass, locally and in CI: format, lint, types, imports, docstrings, docs, tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS: tuple[tuple[str, ...], ...] = (
    ("ruff", "format", "--check", "--quiet", "."),
    ("ruff", "check", "--quiet", "."),
    ("lint-imports", "--no-cache"),
    ("mypy",),
    ("pydoclint", "--quiet", "src/brimful"),
    ("python", "scripts/test_map.py", "--check"),
    ("python", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html"),
    ("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *sys.argv[1:]),
)


def failure_of(command: tuple[str, ...], *, shows_output: bool = False) -> str:
    """Run a check; its name if it failed.

    Args:
        command: The check.
        shows_output: Show what it prints while it runs, not at its end.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    began, name = time.monotonic(), " ".join(command[:3])
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        env=environment,
        check=False,
        text=True,
        stdout=None if shows_output else subprocess.PIPE,
        stderr=None if shows_output else subprocess.STDOUT,
    )
    verdict = "FAILED" if done.returncode else "ok"
    print(f"{done.stdout or ''}== {name}: {verdict} in {time.monotonic() - began:.0f} s", flush=True)
    return name if done.returncode else ""


def main() -> int:
    """Run all checks; the number that failed."""
    *others, tests = CHECKS
    with ThreadPoolExecutor(2) as pool:  # one for each process of the tests
        failed = [*filter(None, pool.map(failure_of, others))]
    failed += [*filter(None, [failure_of(tests, shows_output=True)])]
    print("all checks passed" if not failed else f"failed: {', '.join(failed)}", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
