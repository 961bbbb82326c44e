"""The demo that `make demo` runs: two jobs trained for real inside half their memory, two that cannot run here.

Every line that starts with $ is the command that prints what follows.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRIMFUL = Path(sys.executable).with_name("brimful")
RUNS = ROOT / "runs" / "demo"

TRAINED = (
    ("Images: scikit-learn's digits, a small ResNet", "train examples/digits.py:job", "128", "60%", "digits", "40"),
    ("Text: a byte-level GPT on Python's own documentation", "train examples/tiny_gpt.py:job", "32", "50%", "tiny-gpt", "40"),
)
PLANNED = ("GTX 1080 Ti", "RTX 3090")


def main() -> int:
    """Run the demo; the exit status of the first command that fails."""
    shutil.rmtree(RUNS, ignore_errors=True)
    for title, command, batch, budget, name, steps in TRAINED:
        print(f"\n=== {title}: trained here, in {budget} of what plain training takes ===")
        status = run(
            f"{command} --global-batch-size {batch} --budget {budget} --device cpu --steps {steps} "
            f"--compare-plain --run-dir runs/demo/{name}"
        )
        if status:
            return status
    print("\n=== What cannot run here: BERT-large, sequence 512, global batch 32 ===")
    for device in PLANNED:
        status = run(f'plan bert-large --seq-len 512 --global-batch-size 32 --device "{device}"')
        if status:
            return status
    return 0


def run(arguments: str) -> int:
    """Show a command and run it."""
    print(f"\n$ brimful {arguments}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([str(BRIMFUL), *shlex.split(arguments)], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
