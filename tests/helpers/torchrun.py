"""Scripts that torchrun starts in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
_MARK = "RESULT "

_END = f"""
def report(result):
    import os, json, sys, torch
    if torch.distributed.get_rank() == 0:
        print({_MARK!r} + json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may abort the interpreter at its end
"""


def result_of_two_ranks(tmp_path: Path, source: str, *arguments: str) -> Any:
    """What a script passes to `report`, which is defined in it, on its first rank.

    Args:
        tmp_path: Where the script is written.
        source: The script; each rank ends with a call of `report`.
        *arguments: Of its command line.

    Returns:
        The result, which has been JSON.
    """
    script = tmp_path / "rank.py"
    script.write_text(_END + source)
    done = subprocess.run(
        [sys.executable, *LAUNCHER, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    return json.loads(line.removeprefix(_MARK))
