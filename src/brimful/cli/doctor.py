"""`brimful doctor`: what is wrong with scripts, memory snapshots, jobs and this machine, from outside."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brimful.cli.options import AsJson, DeviceName, ModelOptions, OnePrecision, flattened
from brimful.cli.output import asked_on_command_line, refuse, report_errors, show
from brimful.cli.sources import find_job
from brimful.errors import UsageError, nearest_names
from brimful.utils.files import is_directory, is_file, write_file
from brimful.utils.status import busy

if TYPE_CHECKING:
    from brimful.doctor.findings import Finding

SNAPSHOTS = (".pickle", ".pkl")


@flattened
def doctor(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            help="Scripts and folders of scripts (train.py, src); or a CUDA memory snapshot (snapshot.pickle); "
            "or a job (file.py:NAME, gpt2), as for estimate; or the word machine.",
            show_default=False,
        ),
    ],
    options: ModelOptions,
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", help="Also write the findings in scripts to this SARIF file, for CI."),
    ] = None,
    device: DeviceName = "auto",
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", help="Samples in a step of the job.", min=1)
    ] = 8,
    precision: OnePrecision = "fp32",
    kill: Annotated[
        int | None,
        typer.Option(
            "--kill",
            metavar="PID",
            help="With machine: end a process of yours that holds memory of a GPU, after a question.",
            min=1,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with scripts (from their text), a memory snapshot, a job, or this machine.

    No script and no step runs. The exit status is 1 if something is found that is not a note.
    """
    with report_errors(as_json):
        if all(each.endswith(".py") or is_directory(Path(each)) for each in what):
            _check_options(context, "scripts", {"sarif"})
            is_well = _sources(what, sarif, as_json)
        elif len(what) > 1:
            _check_paths(what)
            raise UsageError(f"several scripts can be named, or one other thing: {', '.join(what)}.")
        elif what[0] == "machine":
            _check_options(context, "machine", {"kill"})
            is_well = _machine(kill, as_json)
        elif what[0].endswith(SNAPSHOTS):
            _check_options(context, "a memory snapshot", set())
            is_well = _snapshot(what[0], as_json)
        elif nearest_names(what[0], ("machine",), likeness=0.8):
            raise UsageError(f"{what[0]!r} names nothing to look at. For this machine: brimful doctor machine")
        else:
            _check_options(context, "a job", {*_OF_JOBS, *ModelOptions.__dataclass_fields__})
            is_well = _job(what[0], options, device, micro_batch_size, precision, as_json)
        if not is_well:
            raise typer.Exit(1)


def _check_paths(what: Sequence[str]) -> None:
    """UsageError if one of several things that are named is a path of nothing, or of another file."""
    from brimful.models.hub import is_path

    for each in what:
        if ":" not in each and is_path(each) and not Path(each).exists():
            raise UsageError(f"there is no file {each} (looked in {Path.cwd()}).")
        if is_file(Path(each)) and not each.endswith((".py", *SNAPSHOTS)):
            raise UsageError(f"{each} is not a Python script: its name does not end in .py.")


_OF_JOBS = ("device", "micro_batch_size", "precision")


def _check_options(context: typer.Context, kind: str, taken: set[str]) -> None:
    """Refuse options that are of another kind of thing."""
    asked = asked_on_command_line(context, lambda name: name not in {*taken, "what", "as_json"})
    if asked:
        raise UsageError(f"{', '.join(asked)} does not go with {kind}. What does: brimful doctor --help")


def _sources(paths: Sequence[str], sarif: Path | None, as_json: bool) -> bool:
    """Show what is wrong with scripts; whether nothing but notes is."""
    from brimful.doctor.sarif import sarif_document
    from brimful.doctor.source_checks import NOTES, check_sources

    checked = check_sources(paths)
    found = [each for findings in checked.values() for each in findings]
    if sarif is not None:
        write_file(sarif, json.dumps(sarif_document(found), indent=2))
    kinds = ["note: " if each.check in NOTES else "" for each in found]
    lines = [_finding_text(each, kind) for each, kind in zip(found, kinds, strict=True)]
    scripts = f"{len(checked)} script{'s' if len(checked) != 1 else ''}"
    lines.append(f"{len(found) or 'no'} finding{'s' if len(found) != 1 else ''} in the text of {scripts}")
    document = {"scripts": list(checked), "findings": [asdict(each) for each in found]}
    show("\n".join(lines), lambda: document, as_json)
    return not any(each.check not in NOTES for each in found)


def _finding_text(finding: Finding, kind: str) -> str:
    """A finding and its change: a line each, as tools read it, or in lines as wide as the terminal."""
    from brimful.report.layout import wrapped

    found = f"{finding.line}: {kind}{finding.check}: {finding.what}"
    if not sys.stdout.isatty():
        return f"{found}\n  → {finding.change}"
    return "\n".join([*wrapped("", found, indent=4), *wrapped("  → ", finding.change)])


def _snapshot(path: str, as_json: bool) -> bool:
    """Show what a memory snapshot has; whether nothing is wrong."""
    from brimful.doctor.allocations import device_uses
    from brimful.doctor.snapshot import read_snapshot
    from brimful.doctor.snapshot_text import snapshot_document, snapshot_text

    uses = device_uses(read_snapshot(path))
    show(snapshot_text(path, uses), lambda: snapshot_document(uses), as_json)
    return not any(each.findings for each in uses)


def _job(
    model: str, options: ModelOptions, device: str, micro_batch_size: int, precision: str, as_json: bool
) -> bool:
    """Show what holds the memory of a job's captured step, and what is wrong; whether nothing is."""
    from brimful import api
    from brimful.doctor import Evidence
    from brimful.doctor.findings import captured_findings
    from brimful.doctor.text import captured_document, captured_notes, captured_text
    from brimful.options import parse_precision
    from brimful.profiling.named_device import resolve_device
    from brimful.settings import Settings

    job, target = find_job(model, options), resolve_device(device)
    settings = Settings(micro_batch_size=micro_batch_size, precision=parse_precision(precision))
    target.check_precision(settings.precision)
    with busy("capturing a step"):
        name = job.optimizer if isinstance(job.optimizer, str) else ""
        evidence = Evidence.of_trace(api.capture_trace(job, settings, target), name)
    found, notes = captured_findings(evidence), captured_notes(evidence.trace, target)
    show(
        captured_text(evidence, device=target.name, found=found, notes=notes),
        lambda: captured_document(evidence, device=target.name, found=found, notes=notes),
        as_json,
    )
    return not found


def _machine(kill: int | None, as_json: bool) -> bool:
    """Show this machine, or end a process of it; whether nothing is odd, or the process ended."""
    from brimful.doctor.machine import end_process, this_machine
    from brimful.doctor.machine_text import holder_text, machine_document, machine_text
    from brimful.profiling.nvml import Holder

    machine = this_machine()
    if kill is None:
        show(machine_text(machine), lambda: machine_document(machine), as_json)
        return not machine.odd
    refuse({"--json": as_json}, "--kill asks at the terminal")

    def confirms(holder: Holder) -> bool:
        if not sys.stdin.isatty():
            raise UsageError(f"--kill asks at a terminal, and there is none. Without it: kill {holder.pid}")
        return input(f"{holder_text(holder)}\nEnd this process (SIGTERM)? Type yes: ").strip() == "yes"

    has_ended = end_process(kill, machine, confirms)
    show(f"process {kill} {'has ended' if has_ended else 'still runs'}", dict, as_json)
    return has_ended
