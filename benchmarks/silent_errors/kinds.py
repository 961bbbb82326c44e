"""All programs, by kind."""

from __future__ import annotations

from silent_errors import trainers
from silent_errors.case import Case

CASES: tuple[Case, ...] = (*trainers.CASES,)
