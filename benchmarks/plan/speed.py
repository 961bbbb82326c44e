"""How long the commands take that a user types, imports included.

    git worktree add ../before COMMIT
    python benchmarks/plan/speed.py --before ../before --repeats 3

Each command is a process of its own. Runs of both versions alternate, as other work on the machine slows both:
compare ratios. The cache directory has this machine's rates alone. In
one run more the captures are counted: of some blocks, of the model and the optimizer apart, and whole ones.
Seconds are those of the processor in the best run; wall-clock seconds beside them include what others made a
command wait. The aims are the project's own, in wall-clock seconds on 2 idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import keep

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).with_name("speed_jobs.py")
BERT = ["plan", "bert-large", "--seq-len", "512", "--global-batch-size", "32", "--device", "RTX 3090"]
LLAMA_1B = ["plan", "llama-3.2-1b", "--seq-len", "2048", "--global-batch-size", "16", "--device", "RTX 3090"]

COMMANDS: dict[str, tuple[float | None, list[str]]] = {
    "BERT-large, estimate": (
        2.5, ["estimate", "bert-large", "--micro-batch-size", "8", "--device", "RTX 3090"]
    ),
    "BERT-large in 11 GiB": (5.0, [*BERT, "--budget", "11GiB"]),
    "BERT-large in 4 GiB": (8.0, [*BERT, "--budget", "4GiB"]),
    "BERT-large in 1 GiB, impossible": (None, [*BERT, "--budget", "1GiB"]),
    "Llama 3.2 1B, RTX 3090": (10.0, LLAMA_1B),
    "Llama 3.2 1B in bf16, RTX 3090": (10.0, [*LLAMA_1B, "--precision", "bf16"]),
    "Llama of 100 layers in 50 GiB": (
        12.0,
        ["plan", f"{JOBS}:llama", "--global-batch-size", "16", "--precision", "bf16",
         "--device", "A100 80GB SXM", "--budget", "50GiB"],
    ),
    "LoRA of an 8B Llama, RTX 4090": (
        10.0, ["plan", f"{JOBS}:llama_lora", "--global-batch-size", "16", "--device", "RTX 4090"]
    ),
    "U-Net of Stable Diffusion 1.5, RTX 3060": (
        10.0, ["plan", f"{JOBS}:unet", "--global-batch-size", "8", "--device", "RTX 3060"]
    ),
    "DETR, RTX 3060": (10.0, ["plan", f"{JOBS}:detr", "--global-batch-size", "16", "--device", "RTX 3060"]),
    "ViT-large, RTX 3060": (10.0, ["plan", "vit-large", "--global-batch-size", "64", "--device", "RTX 3060"]),
    "GPUs for BERT-large": (10.0, ["gpus", "bert-large", "--global-batch-size", "32"]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of a command's name")
    asked = parser.parse_args()
    rows = [row_of(name, asked) for name in COMMANDS if asked.only in name]
    before = "" if asked.before is None else " --before COMMIT"
    command = f"python benchmarks/plan/speed.py{before} --repeats {asked.repeats}"
    keep("plan_speed.json", command, {"rows": rows}, "transformers", "diffusers", "peft")


def row_of(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The best run of one command."""
    aim, arguments = COMMANDS[name]
    runs: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as cache:
            measured = Path.home() / ".cache" / "brimful" / "cpu.json"
            if measured.exists():
                (Path(cache) / "brimful").mkdir()
                shutil.copy(measured, Path(cache) / "brimful")
            if asked.before is not None:
                runs["before"].append(seconds_of(arguments, asked.before.resolve(), cache))
            runs["after"].append(seconds_of(arguments, ROOT, cache))
    row: dict[str, Any] = {"name": name, "command": " ".join(["brimful", *arguments]), "runs": asked.repeats}
    for version, of_version in runs.items():
        if of_version:
            cpu, wall = map(min, zip(*of_version, strict=True))
            row |= {f"{version}_cpu_seconds": round(cpu, 2), f"{version}_wall_seconds": round(wall, 2)}
    if asked.before is not None:
        row["before_over_after"] = round(row["before_cpu_seconds"] / row["after_cpu_seconds"], 2)
    row["captures"] = captures_of(arguments)
    if aim is not None:
        row |= {"aim_wall_seconds": aim, "is_reached": row["after_wall_seconds"] <= aim}
    row["command"] = row["command"].replace(f"{ROOT}/", "")
    print(row, flush=True)
    return row


def seconds_of(arguments: list[str], root: Path, cache: str) -> tuple[float, float]:
    """Processor and wall-clock seconds of one command."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
    began, used = time.perf_counter(), os.times()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "brimful", *arguments],
        env=environment, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    now = os.times()
    cpu = now.children_user - used.children_user + now.children_system - used.children_system
    return cpu, time.perf_counter() - began


_COUNTING = """
import json, os
from collections import Counter
from brimful.capture import cache
counts, leave = Counter(), cache.CachedCapture.__exit__

def exit(self, *error):
    counts.update(self.counts)
    return leave(self, *error)

cache.CachedCapture.__exit__ = exit
from brimful.cli.app import main
try:
    main()
finally:
    with open(os.environ["COUNTS"], "w") as file:
        json.dump(counts, file)
"""


def captures_of(arguments: list[str]) -> dict[str, int]:
    """How many captures of one step a command makes in each way."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counts.json"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _COUNTING, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COUNTS": str(counted)},
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return dict(json.loads(counted.read_text())) if counted.exists() else {}


if __name__ == "__main__":
    main()
