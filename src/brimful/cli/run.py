"""`brimful run`: a script of any framework, unchanged and watched."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brimful.cli.live import LIVE_HELP, PORT_HELP, live_page, showing_evidence
from brimful.cli.output import exit_script, report_errors, say
from brimful.cli.report import TIMELINES
from brimful.cli.report import timeline as written_timeline
from brimful.cli.tracebacks import traceback_text
from brimful.errors import SaveError, UsageError
from brimful.utils.files import is_directory, write_file
from brimful.utils.first_rank import is_first_rank, srun_task

if TYPE_CHECKING:
    from brimful.doctor import Evidence, ScriptRun
    from brimful.integrations.unchanged_scripts import PlannedTrainers


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(help="A script, with its own arguments after it.", show_default=False)
    ],
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps that are recorded.")] = 3,
    eager: Annotated[
        bool, typer.Option("--eager", help="Run what torch.compile compiles eagerly in the recorded steps.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Plan what a trainer of transformers or lightning trains inside this size, such as 11GiB, and "
            "apply the plan. Elsewhere the lines to write are printed.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Plan what a trainer of transformers or lightning trains for this GPU, such as "
            '"RTX 3090", which need not be in this machine, and end the script in place of training.',
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Also write what was seen to this JSON file.")
    ] = None,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(
            "--timeline",
            help="Also write memory over the recorded steps to this file: .pickle for pytorch.org/memory_viz, "
            ".json for Perfetto; may be repeated.",
            show_default=False,
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help=LIVE_HELP)] = False,
    live_port: Annotated[
        int | None, typer.Option("--live-port", min=1, max=65535, help=PORT_HELP, show_default=False)
    ] = None,
) -> None:
    """Run a training script unchanged, and say what holds its memory and what is wrong with it.

    Its first optimizer steps are recorded, then it is left alone. Its output, results and exit status stay its
    own; what was seen follows on standard error when it ends. Of several ranks the first shows it, and those
    that fail. With --budget, a script whose trainer cannot be planned does not train: it ends with exit status
    1, or 2 where the trainer's options are why.
    """
    with report_errors(as_json=False):
        from brimful.doctor import run_script

        sys.excepthook = sys.__excepthook__  # typer's own shows its frames
        process, file = os.getpid(), None if output is None else output.absolute()
        timelines = [each.absolute() for each in timeline or ()]
        for each in filter(None, (file, *timelines)):
            if not is_directory(each.parent):
                raise UsageError(f"{each} cannot be written: there is no folder {each.parent}. Make it first.")
            if is_directory(each):
                raise UsageError(f"{each} cannot be written: it is a folder. Name a file in it.")
        if script.startswith("-"):
            raise UsageError(f"run has no option {script}: brimful run --help lists those it has.")
        for each in timelines:
            if each.suffix not in TIMELINES:
                raise UsageError(f"--timeline {each.name}: end the name in .pickle or in .json.")
        within = _planned_trainers(budget, device) if budget or device else None
        shown = shlex.join([script, *context.args])
        with live_page(f"watching {script}", live, live_port) as page:
            ran = run_script(
                script,
                context.args,
                steps=steps,
                is_module=is_module,
                eager=eager,
                within=within,
                on_step=_after_step(showing_evidence(page), shown, file),
            )
        has_ended = within is not None and within.has_ended_script
        if ran.shows_report and os.getpid() == process and not has_ended:  # not in a fork that exits
            _show(ran, shown, *(_own_file(each, ran.own_task) for each in (file, *timelines)))
    if ran.is_interrupted:
        with suppress(KeyboardInterrupt):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()  # as Python does both; the signal ends this process without
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise typer.Exit(ran.exit_status)


def _planned_trainers(budget: str | None, device: str | None) -> PlannedTrainers:
    from brimful.distributed.ranks import trains_with_ranks
    from brimful.integrations.unchanged_scripts import PlannedTrainers

    def say_once(text: str) -> None:
        if is_first_rank() or (srun_task() and not trains_with_ranks()):
            say(text)

    return PlannedTrainers(budget, device, say=say_once, refuse=exit_script)


def _own_file(file: Path | None, own_task: str) -> Path | None:
    """The file that this process writes: that of the first rank, or its own for a task that runs alone."""
    if file is None or (not own_task and not is_first_rank()):
        return None
    return file.with_suffix(f".{own_task}{file.suffix}") if own_task else file


def _after_step(
    show: Callable[[Evidence], None] | None, script: str, file: Path | None
) -> Callable[[Evidence], None] | None:
    """What shows and writes what was seen so far, which remains if the script is killed."""
    if file is None:
        return show
    from brimful.distributed.ranks import trains_with_ranks

    process = os.getpid()

    def write(evidence: Evidence) -> None:
        if os.getpid() != process:  # a fork
            return
        if show is not None:
            show(evidence)
        own = _own_file(file, "" if trains_with_ranks() else srun_task())
        if own is not None:
            with suppress(SaveError):  # which the end of the script says
                write_file(own, _document_text(evidence, script))

    return write


def _document_text(evidence: Evidence, script: str) -> str:
    from brimful.doctor import watched_document

    return json.dumps({"script": script, **watched_document(evidence)}, indent=2)


def _show(ran: ScriptRun, script: str, file: Path | None, *timelines: Path | None) -> None:
    """Show and write what was seen; that neither can be done leaves the script's exit status."""
    from brimful.doctor import watched_text

    evidence = ran.evidence
    has_failed_early = ran.exit_status and not (evidence.trace.events or evidence.error)
    try:
        if not has_failed_early:
            task = f"task {ran.own_task} of srun, a run of its own: " if ran.own_task else ""
            say(f"{task}{watched_text(evidence)}")
        if file is not None:
            write_file(file, _document_text(evidence, script))
            say(f"for a page: brimful report {shlex.quote(str(file))}")
        for each in filter(None, timelines):
            write_file(each, written_timeline(evidence.trace, each.suffix))
    except SaveError as error:
        say(str(error))
    except Exception as error:
        say(f"{traceback_text(error)}the report ended by an error of brimful's own, please report it")
