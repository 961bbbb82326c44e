"""Findings as SARIF 2.1.0, which CI systems show beside the lines of code.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, sections 3.13 to 3.52.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from brimful import __version__
from brimful.doctor.findings import Finding
from brimful.doctor.source_checks import NOT_CHECKED, NOTES, SOURCE_CHECKS, check_name, line_number


def sarif_document(found: Sequence[Finding]) -> dict[str, Any]:
    """Findings in source text as a SARIF log; paths are relative to where the command runs."""
    texts = {check_name(each): inspect.getdoc(each) for each in SOURCE_CHECKS}
    texts[NOT_CHECKED] = "A script that is not Python, or cannot be read."
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in texts.items()]
    names = [*texts]
    results = [
        {
            "ruleId": each.check,
            "ruleIndex": names.index(each.check),
            "level": "note" if each.check in NOTES else "warning",
            "message": {"text": f"{each.what}. Change: {each.change}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(each.line.rpartition(":")[0])},
                        "region": {"startLine": line_number(each)},
                    }
                }
            ],
        }
        for each in found
    ]
    driver = {"name": "brimful", "version": __version__, "rules": rules}
    return {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _uri(path: str) -> str:
    """The URI of a path: relative to the current folder, or of the scheme "file"."""
    pure = PurePath(path)
    return pure.as_uri() if pure.is_absolute() else quote(pure.as_posix())
