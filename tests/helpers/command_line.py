"""The command line, as a user runs it: in a process of its own, which is a fork of one that has loaded torch.

A start takes seconds for torch alone, and the tests call some hundred commands. `tests/cli/test_streams.py` and
`tests/cli/test_train.py` start some from nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from brimful.profiling.calibrate import CACHE_FILE, cache_path, calibrate_cpu
from helpers.forked_commands import Command, as_case

_SECONDS = 300


def brimful(
    folder: Path, *arguments: str, is_script: bool = False, is_measured: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `brimful` with some arguments says and returns, run in a folder with a cache of its own.

    Args:
        folder: The working directory.
        *arguments: Of the command.
        is_script: Whether the first is a script that Python runs without `brimful`.
        is_measured: Whether the cache has this machine's rates.
        **variables: Of the environment, beside this process's.
    """
    if is_measured:
        keep_rates(folder / "cache")
    with tempfile.TemporaryDirectory() as outputs:
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        command = Command(
            arguments=arguments, is_script=is_script, environment={**os.environ, **own, **variables}
        )
        case = as_case(command, folder=str(folder), outputs=outputs, seconds=_SECONDS)
        status = _server().run(case)
        out, err = ((Path(outputs) / f"0.{name}").read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(list(arguments), status, out, err)


def keep_rates(cache: Path) -> None:
    """Copy this machine's rates to a cache that has none; a command would measure them, for ten seconds."""
    kept = cache / "brimful" / CACHE_FILE
    if not kept.exists():
        calibrate_cpu()
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cache_path(), kept)


class _Server:
    """A process that has loaded torch, and forks for each command."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("forked_commands.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._close)

    def run(self, case: dict[str, object]) -> int:
        """The exit status of a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        status = json.loads(self._process.stdout.readline())
        if status is None:
            raise subprocess.TimeoutExpired(str(case["arguments"]), _SECONDS)
        return int(status)

    def _close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()  # its end


@cache
def _server() -> _Server:
    return _Server()
