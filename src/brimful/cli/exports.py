"""The option `--export`: plans as files of other tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from brimful.cli.output import say
from brimful.errors import UnknownNameError, UsageError
from brimful.exports import ExportTool

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planner import Plan


def export_files(asked: Iterable[str]) -> dict[ExportTool, Path]:
    """The files to write, by tool, from options of the form TOOL or TOOL=FILE.

    Raises `UsageError` if a tool is unknown or repeated, or two have one file.
    """
    files: dict[ExportTool, Path] = {}
    for each in asked:
        name, equals, file = each.partition("=")
        if name not in list(ExportTool):
            raise UnknownNameError(
                "tool", name, list(ExportTool), hint="Write --export TOOL or --export TOOL=FILE."
            )
        tool = ExportTool(name)
        if tool in files or (equals and not file):
            raise UsageError(f"--export {each!r} repeats a tool or names no file. Write --export TOOL=FILE.")
        files[tool] = Path(file or tool.file_name)
    if len(set(files.values())) < len(files):
        raise UsageError("--export has one file for several tools. Name one for each.")
    return files


def write_exports(job: Job, plan: Plan, files: Mapping[ExportTool, Path]) -> None:
    """Write a plan for each tool, and on standard error what each file leaves to its user.

    Raises `UsageError` if a tool cannot train by the plan, after the files of the tools before it are written,
    and `SaveError` if a file cannot be written.
    """
    from brimful import api

    for tool, file in files.items():
        export = api.export(job, plan, tool)
        export.save(file)
        say(f"{file}, {export}")
