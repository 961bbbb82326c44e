"""The studies by name."""

from __future__ import annotations

from collections.abc import Mapping

from brimful.errors import UnknownNameError
from brimful.studies.multi_gpu import MULTI_GPU
from brimful.studies.study import Study
from brimful.studies.text import TEXT
from brimful.studies.vision import VISION


def find_study(name: str) -> Study:
    """The study of a name; UnknownNameError has those that there are."""
    if name not in STUDIES:
        raise UnknownNameError("study", name, STUDIES)
    return STUDIES[name]


STUDIES: Mapping[str, Study] = {
    study.name: study for study in (make() for make in (*TEXT, *VISION, *MULTI_GPU))
}
"""The studies by name."""
