"""The demo that `make demo` runs: two jobs trained for real in 55 and 60 % of their memory, one planned.

Every line that starts with $ is the command that prints what follows.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRIMFUL = Path(sys.executable).with_name("brimful")
RUNS = Path("runs") / "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job that `brimful train` trains here."""

    title: str
    job: str
    name: str
    global_batch_size: int
    budget: str
    steps: int

    def arguments(self, run_dir: Path) -> list[str]:
        """Of the command line."""
        return [
            "train", self.job, "--device", "cpu", "--global-batch-size", str(self.global_batch_size),
            "--budget", self.budget, "--steps", str(self.steps), "--compare-plain", "--run-dir", str(run_dir),
        ]  # fmt: skip


TRAINED = (
    Training(
        title="Images: scikit-learn's digits, a small ResNet",
        job="examples/digits.py:job",
        name="digits",
        global_batch_size=128,
        budget="60%",
        steps=36,
    ),
    Training(
        title="Text: a byte-level GPT on Python's own documentation",
        job="examples/tiny_gpt.py:job",
        name="tiny-gpt",
        global_batch_size=32,
        budget="55%",
        steps=30,
    ),
)
PLANNED = ("GTX 1080 Ti", "RTX 3090")


def main() -> int:
    """Run the demo; the exit status of the first command that fails."""
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    for training in TRAINED:
        print(f"\n=== {training.title}: trained here, in {training.budget} of what the baseline takes ===")
        status = run(training.arguments(RUNS / training.name))
        if status:
            return status
    print("\n=== What cannot run here: BERT-large, sequence 512, global batch 32 ===")
    for device in PLANNED:
        status = run(
            ["plan", "bert-large", "--seq-len", "512", "--global-batch-size", "32", "--device", device]
        )
        if status:
            return status
    return 0


def run(arguments: list[str]) -> int:
    """Show a command and run it."""
    print(f"\n$ brimful {shlex.join(arguments)}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([str(BRIMFUL), *arguments], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
