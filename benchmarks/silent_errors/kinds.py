"""All programs, by kind."""

from __future__ import annotations

from silent_errors import arguments
from silent_errors.case import Case

CASES: tuple[Case, ...] = (*arguments.CASES,)
