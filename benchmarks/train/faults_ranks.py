"""One of two ranks is killed, again and again, and whether anything is lost.

    python benchmarks/train/faults_ranks.py

`torchrun` launches two ranks over gloo; one of them, drawn from a seed, is killed (SIGKILL) at random moments;
the launcher starts both again, and they go on from their last save. What is left is compared with a run of two
ranks that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file

from machine import keep
from train.faults import JOB, ROOT, SAVE_EVERY, losses

KILLS = 6
STEPS = 1000
RESTARTS = 30


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "jobs.py").write_text(JOB)
        rows = [killed(where, parallelism) for parallelism in ("ddp", "fsdp2")]
    keep("train_faults_ranks.json", "python benchmarks/train/faults_ranks.py", {"rows": rows})
    print(json.dumps(rows, indent=1))


def start(where: Path, run_dir: str, parallelism: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", str(RESTARTS), "-m", "brimful", "train", "jobs:job", "--device", "cpu"),
            *("--global-batch-size", "32", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)),
            *("--parallelism", parallelism, "--run-dir", run_dir, "--resume"),
        ],
        cwd=where,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


def killed(where: Path, parallelism: str) -> dict[str, Any]:
    whole, parts = f"{parallelism}-undisturbed", f"{parallelism}-killed"
    status, said = finish(start(where, whole, parallelism))
    assert status == 0, said
    chance = random.Random(3)
    process = start(where, parts, parallelism)
    kills = 0
    while process.poll() is None and kills < KILLS:
        time.sleep(chance.uniform(4.0, 14.0))  # a launch takes some seconds to its first step
        ranks = ranks_of(process.pid)
        if len(ranks) == 2 and process.poll() is None:
            chance.choice(ranks).kill()
            kills += 1
    status, said = finish(process)
    row = {
        "parallelism": parallelism,
        "kills": kills,
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "status": status,
        "losses_bit_for_bit": losses(where / parts) == losses(where / whole),
        "weights_bit_for_bit": same_weights(where / parts, where / whole),
    }
    print(row, flush=True)
    return row


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The two ranks, in the order of their numbers; not the workers of their loaders."""
    children = psutil.Process(launcher).children()
    return sorted((child for child in children if "brimful" in child.cmdline()), key=lambda child: child.pid)


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":
    main()
