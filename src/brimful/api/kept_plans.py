"""A cache of plans that the command line made, in the user's cache directory.

A job is arbitrary Python, so no name of it says what it runs. A plan is cached under a fingerprint of the trace
of the baseline, which is captured again for each request, and of everything else that decides a plan: the
request with the device's rates, what training of the job has measured, the versions of Python and libraries,
and brimful's own source files. A cached plan answers a request only if all of these are the same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from brimful.errors import FileFormatError
from brimful.planner import Plan
from brimful.planner.request import Request
from brimful.profiling.cache import cache_directory
from brimful.results import JobCalibration
from brimful.trace import Trace

MOST_PLANS = 64
"""Kept plans; the oldest are deleted. A plan of 100 units takes about 100 KB. A choice."""

_LIBRARIES = ("brimful", "torch", "transformers", "torchao", "bitsandbytes", "numpy")
"""Whose versions may decide what an optimizer or another micro-batch runs, beside the captured step."""


def fingerprint(request: Request, plain: Trace, calibration: JobCalibration | None = None) -> str:
    """The name under which the plan of a request is kept.

    Args:
        request: What is asked, with the device and its rates.
        plain: A capture of the baseline.
        calibration: What predictions are multiplied by; None if they are not.

    Returns:
        The same for the same request alone, in hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=20)
    parts = (repr(request), repr(calibration), json.dumps(plain.to_json()), *_versions(), *_sources())
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def kept_plan(name: str) -> Plan | None:
    """The plan of that name; None if there is none, or it cannot be read."""
    try:
        return Plan.load(_folder() / f"{name}.json")
    except (FileFormatError, OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


def keep_plan(name: str, plan: Plan) -> None:
    """Keep a plan under a name, and delete the oldest; where nothing can be written, nothing is kept."""
    with suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it must see the whole file or none.
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", delete=False, encoding="utf-8") as file:
            json.dump(plan.to_json(), file)
        Path(file.name).replace(folder / f"{name}.json")
        by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in by_age[MOST_PLANS:]:
            old.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_directory() / "plans"


def _versions() -> list[str]:
    found = [f"python {platform.python_version()}"]
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{library} {metadata.version(library)}")
    return found


def _sources() -> list[str]:
    """Sizes and times of brimful's files: an editable installation changes without its version."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".csv"))
    return [f"{path.relative_to(root)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
