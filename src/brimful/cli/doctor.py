"""`brimful doctor`: what is wrong, from outside: with scripts that do not run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from brimful.cli.options import AsJson
from brimful.cli.output import report_errors, show
from brimful.utils.files import write_file


def doctor(
    what: Annotated[
        list[str],
        typer.Argument(help="Scripts, and folders of scripts (train.py, src).", show_default=False),
    ],
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", help="Also write the findings in scripts to this SARIF file, for CI."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with a script from its text alone, which is not run.

    The exit status is 1 if something is found that is not a note.
    """
    with report_errors(as_json):
        from brimful.doctor.sarif import sarif_document
        from brimful.doctor.source_checks import NOTES, check_sources

        checked = check_sources(what)
        found = [each for findings in checked.values() for each in findings]
        if sarif is not None:
            write_file(sarif, json.dumps(sarif_document(found), indent=2))
        kinds = ["note: " if each.check in NOTES else "" for each in found]
        lines = [
            f"{each.line}: {kind}{each.check}: {each.what}\n  → {each.change}"
            for each, kind in zip(found, kinds, strict=True)
        ]
        scripts = f"{len(checked)} script{'s' if len(checked) != 1 else ''}"
        lines.append(f"{len(found) or 'no'} finding{'s' if len(found) != 1 else ''} in the text of {scripts}")
        document = {"scripts": list(checked), "findings": [asdict(each) for each in found]}
        show("\n".join(lines), lambda: document, as_json)
        if any(each.check not in NOTES for each in found):
            raise typer.Exit(1)
