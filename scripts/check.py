"""Everything a change must pass, locally and in CI: format, lint, types, imports, docstrings, docs, tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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


def main() -> int:
    """Run all checks; the number that failed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    failed = []
    for command in CHECKS:
        began = time.monotonic()
        done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment, check=False)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        print(f"== {' '.join(command[:3])}: {verdict} in {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(" ".join(command[:3]))
    print("all checks passed" if not failed else f"failed: {', '.join(failed)}", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
