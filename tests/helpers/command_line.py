"""The command line, as a user runs it: in a process of its own, which is a fork of one that has loaded torch.

A start takes seconds for torch alone, and the tests call some hundred commands. `tests/cli/test_streams.py` and
`tests/cli/test_train.py` start some from nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from helpers.forked_commands import Command, as_case

_SECONDS = 300


def brimful(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `brimful` with some arguments says and returns, run in a folder with a cache of its own."""
    with tempfile.TemporaryDirectory() as outputs:
        command = Command(
            arguments=arguments,
            environment={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        )
        case = as_case(command, folder=str(folder), outputs=outputs, seconds=_SECONDS)
        status = _server().run(case)
        out, err = ((Path(outputs) / f"0.{name}").read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(list(arguments), status, out, err)


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
