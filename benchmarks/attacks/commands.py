"""Odd paths, encodings, widths and environments; and every option of the command line with odd values."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from attacks.case import (
    Case,
    FailedError,
    Kind,
    Place,
    check_done,
    check_done_or_refused,
    check_refused,
    control,
)
from attacks.material import ESTIMATE
from attacks.process import Ran

# Places


def surroundings_cases(_seed: int) -> Iterator[Case]:
    """Names of files and folders; encodings and widths of what is printed; environment variables."""
    for name, use in {"train": _train_into, "plan": _plan_into, "trace": _trace_into}.items():
        yield control(name, lambda place, use=use: check_done(use(place, "plain")))
    for name in _NAMES:
        yield Case(f"run directory {name!a}", partial(_named, _train_into, name))
        yield Case(f"plan {name!a}", partial(_named, _plan_into, name))
        yield Case(f"trace {name!a}", partial(_named, _trace_into, name))
    for name in _FOLDERS:
        yield Case(f"a job in {name!a}", partial(_job_in, name))
    for encoding in ("ascii", "ascii:replace", "latin-1", "cp1252", "utf-16", "utf-8"):
        yield Case(
            f"PYTHONIOENCODING={encoding}, estimate",
            partial(_in_environment, {"PYTHONIOENCODING": encoding}, False),
        )
        yield Case(
            f"PYTHONIOENCODING={encoding}, train",
            partial(_in_environment, {"PYTHONIOENCODING": encoding}, True),
        )
    for name, environment in _ENVIRONMENTS.items():
        yield Case(name, partial(_in_environment, environment, "RANK" in name or "WORLD" in name))
    yield Case("a working directory that is gone", _no_working_directory)


_NAMES = (
    *("a space", "quotes'\"", "-dash", "--option", "new\nline", "emoji \U0001f525", "a" * 250, "a" * 300),
    *("{0} %s", "undecodable \udcff", "not/there/yet", ".", "/dev/null", "/proc/self/fd/9", "a/../b"),
)
_FOLDERS = (
    "a space",
    "emoji \U0001f525",
    "undecodable \udcff",
    "new\nline",
    "dots.in.it",
    "a:colon",
    "{braces}",
)
_ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    **{f"COLUMNS={value}": {"COLUMNS": value} for value in ("1", "10", "100000", "-5", "x")},
    "TERM=dumb": {"TERM": "dumb"},
    "FORCE_COLOR=1": {"FORCE_COLOR": "1"},
    "TMPDIR that is not there": {"TMPDIR": "/not/there"},
    "WORLD_SIZE without RANK": {"WORLD_SIZE": "2"},
    "WORLD_SIZE=0": {"WORLD_SIZE": "0", "RANK": "0"},
    "WORLD_SIZE=x": {"WORLD_SIZE": "x", "RANK": "0"},
    "RANK=x": {"WORLD_SIZE": "1", "RANK": "x"},
    "LOCAL_RANK without the others": {"LOCAL_RANK": "3"},
    "PYTORCH_ALLOC_CONF=x": {"PYTORCH_ALLOC_CONF": "x"},
}


def _named(use: Callable[[Place, str], Ran], name: str, place: Place) -> None:
    """Whatever a file is called, it is written or refused, and a run that begins ends with its report."""
    ran = use(place, name)
    check_done_or_refused(ran)
    path = place.folder / name
    if ran.status == 0 and use is _train_into and not (path / "report.txt").exists():
        raise FailedError(Kind.WRONG, "report.txt is not there")


def _train_into(place: Place, name: str) -> Ran:
    plan = str(place.material.plain_plan)
    return place.run("train", "job.py:plain", "--plan", plan, "--steps", "2", "--run-dir", name)


def _plan_into(place: Place, name: str) -> Ran:
    return place.run(*_PLAN, "--output", name)


def _trace_into(place: Place, name: str) -> Ran:
    return place.run(*ESTIMATE, "--device", "T4", "--save-trace", name)


def _job_in(name: str, place: Place) -> None:
    folder = place.folder / name
    folder.mkdir()
    shutil.copy(place.folder / "job.py", folder)
    check_done_or_refused(place.run("estimate", f"{name}/job.py:plain", "--device", "T4"))


def _in_environment(environment: dict[str, str | None], trains: bool, place: Place) -> None:
    if trains:
        plan = ("--plan", str(place.material.plain_plan))
        arguments = ("train", "job.py:plain", *plan, "--steps", "2", "--run-dir", "run")
    else:
        arguments = (*ESTIMATE, "--device", "T4")
    check_done_or_refused(place.run(*arguments, environment=environment))


def _no_working_directory(place: Place) -> None:
    (place.folder / "gone").mkdir()

    def leave() -> None:
        os.chdir("gone")
        (place.folder / "gone").rmdir()

    check_done_or_refused(
        place.run("estimate", "resnet18", "--image-size", "32", "--device", "T4", prepare=leave)
    )


# Arguments

_PLAN = ("plan", "job.py:plain", "--global-batch-size", "16", "--device", "T4")
_TRAIN = ("train", "job", "job.py:plain", "--global-batch-size", "16", "--steps", "1", "--epochs", "1")
_COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate": (*ESTIMATE, "--device", "T4"),
    "plan": _PLAN,
    "gpus": ("gpus", "job.py:plain", "--global-batch-size", "16", "--device", "T4"),
    "train": (*_TRAIN, "--run-dir", "run"),
}
VALUES = (
    *("", " ", "nan", "inf", "-1", "0", "1.5", "1e400", "9" * 23, "9" * 5000, "x", "x" * 5000, "\U0001f525"),
    *("nan%", "1e400%", "-5%", "0%", "%", "9" * 5000 + "GiB", "nanGiB", "-1GiB", "1e400GiB", "GiB"),
    *("undecodable \udcff", "a=b=c", "=", "a=" + "[" * 5000, "new\nline", "--help", "..:x", "/dev/null", "."),
)
_MODELS = (
    *("", ":", "a:", ":b", "..:x", ".:job", "/:job", "job.py", "job.py:", "job.py:nothing", "job.py:network"),
    *("job.py:torch", "job.py:losses", "not_there.py:job", "json:dumps", "x" * 5000, "x" * 5000 + ":job"),
    *("bert-large:job", "job:job:job", "undecodable \udcff:job", "job.py:job.job", "new\nline:job", "-:-"),
)


def options(command: str) -> list[str]:
    """Options of a command that take a value, as the command line itself lists them."""
    from typer.main import get_command

    from brimful.cli.app import app

    found: Any = get_command(app)
    for name in _COMMANDS[command][: 2 if command == "train" else 1]:
        found = found.commands[name]
    return [p.opts[0] for p in found.params if p.opts[0].startswith("--") and not getattr(p, "is_flag", False)]


def argument_cases(seed: int) -> Iterator[Case]:
    """Options with values that they do not expect, and models that are none."""
    random = Random(f"arguments {seed}")
    for command in _COMMANDS:
        yield control(command, partial(_argument, command, [], check=check_done))
    for command in _COMMANDS:
        for option in options(command):
            for value in random.sample(VALUES, 2):
                shown = value if len(value) < 40 else f"{value[:10]}… ({len(value)})"
                yield Case(f"{command} {option} {shown!a}", partial(_argument, command, [option, value]))
    for number, model in enumerate(_MODELS):
        command = random.choice(list(_COMMANDS))
        yield Case(f"{command} model {number}", partial(_model, command, model))
    for command in _COMMANDS:
        known = options(command)
        for flag in _FLAGS_OF_OTHERS:
            yield Case(f"{command} {flag}", partial(_flag_of_others, command, flag, flag in known))
        for number in range(_PAIRS):
            pair = [part for option in random.sample(known, 2) for part in (option, random.choice(_PLAUSIBLE))]
            yield Case(f"{command} --json {number}: {' '.join(pair)!a}", partial(_json, command, pair))
    for name, arguments in _OTHERS.items():
        yield Case(name, partial(_other_arguments, arguments))


_FLAGS_OF_OTHERS = (
    *(
        "--lora",
        "--bf16",
        "--fp16",
        "--batch-size",
        "--gradient-checkpointing",
        "--per_device_train_batch_size",
    ),
    *("--optim", "--fsdp", "--gpus", "--lr", "--max-memory", "--load-in-4bit", "--output-dir", "--x", "-x"),
)
_PAIRS = 25
"""Pairs of options for each command."""
_PLAUSIBLE = (
    *("1", "2", "8", "16", "0.5", "auto", "none", "all", "fp16", "bf16,fp16", "adamw", "sgd", "fused", "50%"),
    *(
        "4GiB",
        "T4",
        "A100",
        "cpu",
        "channels_last",
        "ddp",
        "fsdp2",
        "zero3",
        "cosine",
        "max",
        "plan.json",
        "new",
    ),
)


_OTHERS: dict[str, Sequence[str]] = {
    "no command": (),
    "an unknown command": ("x" * 5000,),
    "an option of no command": ("--x",),
    "all at once": ("estimate", "plan", "train"),
    "plan without a model": ("plan",),
    "resume without a run directory": (*_TRAIN, "--resume"),
    "a plan of nothing": ("plan", "--check", "not-there.json"),
    "calibrate with an argument": ("calibrate", "x"),
    "2000 times --set": ("estimate", "job.py:plain", *(["--set", "a=1"] * 2000)),
}


def _argument(
    command: str,
    arguments: Sequence[str],
    place: Place,
    *,
    check: Callable[[Ran], None] = check_done_or_refused,
) -> None:
    check(place.run(*_COMMANDS[command], *arguments))


def _flag_of_others(command: str, flag: str, is_known: bool, place: Place) -> None:
    """A flag of another tool is refused, by the name of brimful's own option where there is one."""
    ran = place.run(*_COMMANDS[command], flag, "1")
    (check_done_or_refused if is_known else check_refused)(ran)
    if not is_known and ran.status == 2 and flag in _FLAGS_OF_OTHERS[:5]:
        said = ran.err.partition("No such option")[2].partition(". ")[2]
        if "--" not in said:
            raise FailedError(Kind.WRONG, f"names no option: {ran.err[-200:]}")


def _json(command: str, arguments: Sequence[str], place: Place) -> None:
    """Whatever comes of it, what is printed as JSON can be read."""
    ran = place.run(*_COMMANDS[command], *arguments, "--json")
    check_done_or_refused(ran)
    try:
        json.loads(ran.out)
    except ValueError as error:
        raise FailedError(Kind.WRONG, f"no JSON: {error}, {ran.out[:100]!r}") from error


def _model(command: str, model: str, place: Place) -> None:
    arguments = [model if argument == "job.py:plain" else argument for argument in _COMMANDS[command]]
    check_refused(place.run(*arguments))


def _other_arguments(arguments: Sequence[str], place: Place) -> None:
    ran = place.run(*arguments)
    if ran.status == 2 and not arguments:
        return  # the help text
    check_refused(ran)
