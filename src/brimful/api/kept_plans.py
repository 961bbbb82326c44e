"""A cache of the command line's answers to requests for plans, in the user's cache directory.

A job is arbitrary Python, so no name of it says what it runs. A plan is cached under a fingerprint of the trace
of the baseline, which is captured again for each request, and of everything else that decides a plan: the
request with the device's rates, what training of the job has measured, the versions of Python and libraries,
and brimful's own source files. A cached plan, or that there is none, answers a request only if all of these are
the same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from brimful.codec import (
    NonNegativeInt,
    from_json_document,
    parse_json,
    read_regular_file,
    to_json_document,
)
from brimful.errors import FileFormatError, InfeasibleError
from brimful.planner import Plan
from brimful.planner.request import Request
from brimful.profiling.cache import cache_directory
from brimful.results import JobCalibration
from brimful.trace import Trace

MOST_PLANS = 64
"""Kept answers; the oldest are deleted. A plan of 100 units takes about 100 KB. A choice."""

_REFUSAL = "-infeasible"
"""In the name of a kept answer that there is no plan."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRefusal:
    """That nothing which a request permits fits its budget: the fields of `InfeasibleError`."""

    message: str
    budget_bytes: NonNegativeInt
    smallest_peak_bytes: NonNegativeInt

    def error(self) -> InfeasibleError:
        """The error that the first request got."""
        return InfeasibleError(
            self.message, budget_bytes=self.budget_bytes, smallest_peak_bytes=self.smallest_peak_bytes
        )


def kept_plan(name: str) -> Plan | None:
    """What was kept under a name.

    Args:
        name: A request's `fingerprint`.

    Returns:
        The plan; None if there is none, or it cannot be read.

    Raises:
        InfeasibleError: Nothing fitted when the same was asked before.
    """
    with suppress(FileFormatError, OSError, RuntimeError):  # RuntimeError: there is no home directory
        refusal = _kept_refusal(_folder() / f"{name}{_REFUSAL}.json")
        if refusal is not None:
            raise refusal.error()
        return Plan.load(_folder() / f"{name}.json")
    return None


def keep_plan(name: str, plan: Plan) -> None:
    """Keep a plan under a name, and delete the oldest; where nothing can be written, nothing is kept.

    Args:
        name: Its request's `fingerprint`.
        plan: Any.
    """
    _keep(f"{name}.json", plan.to_json())


def keep_refusal(name: str, error: InfeasibleError) -> None:
    """Keep that a request has no plan, as `keep_plan` keeps plans.

    Args:
        name: The request's `fingerprint`.
        error: What the request got.
    """
    refusal = KeptRefusal(
        message=str(error), budget_bytes=error.budget_bytes, smallest_peak_bytes=error.smallest_peak_bytes
    )
    _keep(f"{name}{_REFUSAL}.json", to_json_document(refusal))


def _kept_refusal(path: Path) -> KeptRefusal | None:
    if not path.exists():
        return None
    where = f"the cached answer {path}"
    return from_json_document(
        parse_json(read_regular_file(path, what="answer"), where=where), KeptRefusal, where=where
    )


def _keep(name: str, document: object) -> None:
    with suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it must see the whole file or none.
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", delete=False, encoding="utf-8") as file:
            json.dump(document, file)
        Path(file.name).replace(folder / name)
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
