"""`brimful doctor`: what is wrong, from outside: with scripts that do not run, and in memory snapshots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from brimful.cli.options import AsJson
from brimful.cli.output import refuse, report_errors, show
from brimful.errors import UsageError
from brimful.utils.files import is_directory, write_file

_SNAPSHOTS = (".pickle", ".pkl")


def doctor(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Scripts and folders of scripts (train.py, src); or a CUDA memory snapshot (snapshot.pickle).",
            show_default=False,
        ),
    ],
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", help="Also write the findings in scripts to this SARIF file, for CI."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with a script from its text alone, or what held the memory in a snapshot.

    Nothing is run. The exit status is 1 if something is found that is not a note.
    """
    with report_errors(as_json):
        if all(each.endswith(".py") or is_directory(Path(each)) for each in what):
            is_well = _sources(what, sarif, as_json)
        else:
            refuse({"--sarif": sarif}, "only findings in scripts have lines for SARIF")
            if len(what) > 1:
                raise UsageError(f"several scripts can be named, or one other thing: {', '.join(what)}.")
            is_well = _snapshot(what[0], as_json)
        if not is_well:
            raise typer.Exit(1)


def _sources(paths: Sequence[str], sarif: Path | None, as_json: bool) -> bool:
    """Show what is wrong with scripts; whether nothing but notes is."""
    from brimful.doctor.sarif import sarif_document
    from brimful.doctor.source_checks import NOTES, check_sources

    checked = check_sources(paths)
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
    return not any(each.check not in NOTES for each in found)


def _snapshot(path: str, as_json: bool) -> bool:
    """Show what a memory snapshot has; whether nothing is wrong."""
    from brimful.doctor.allocations import device_uses
    from brimful.doctor.snapshot import read_snapshot
    from brimful.doctor.snapshot_text import snapshot_document, snapshot_text

    uses = device_uses(read_snapshot(path))
    show(snapshot_text(path, uses), lambda: snapshot_document(uses), as_json)
    return not any(each.findings for each in uses)
