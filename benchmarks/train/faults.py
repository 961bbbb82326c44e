"""Faults, one after another, and whether anything is lost.

    python benchmarks/train/faults.py

Runs of `brimful train` in processes of their own are killed at random moments (SIGKILL, at times drawn from a
seed) and resumed until they end; what they leave is compared with a run that nobody disturbed, bit for bit.
Memory runs out at each op of a step in turn, in the harness of the tests. Saves are damaged at random places. A
disk is full, a worker dies, a loss becomes NaN.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file

from machine import keep

ROOT = Path(__file__).resolve().parents[2]
KILLS = 32
SAVE_EVERY = 4
STEPS = 6000
DAMAGES = 60

JOB = """
import os, torch, time
from torch import nn
from torch.utils.data import DataLoader, Dataset
import brimful as bf

WIDTH = 256

class Noisy(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        if index == int(os.environ.get("DIES_AT", -1)):
            os.kill(os.getpid(), 9)
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x + 0.1 * torch.randn(WIDTH), "y": (x.sum() > 0).long()}

def network():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*(block() for _ in range(4)), nn.Linear(WIDTH, 2))

class Loss:
    calls = 0
    def __call__(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        self.calls += type(batch["x"]) is torch.Tensor and model.training
        return loss * float("nan") if self.calls > int(os.environ.get("NAN_AFTER", 10**9)) else loss

def data():
    return bf.Data(train=DataLoader(Noisy(), batch_size=32, shuffle=True, num_workers=1, drop_last=True))

def job():
    return bf.Job(
        model=network,
        loss=Loss(),
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randint(2, (n,))},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=data,
        name="noisy",
    )
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "jobs.py").write_text(JOB)
        found = {
            "out_of_memory": out_of_memory(),
            "killed": killed(where),
            "damaged_saves": damaged(where),
            "others": others(where),
        }
    keep("train_faults.json", "python benchmarks/train/faults.py", found)
    print(json.dumps(found, indent=1))


def command(run_dir: str, *more: str, steps: int = STEPS) -> list[str]:
    return [
        *(sys.executable, "-m", "brimful", "train", "jobs:job", "--device", "cpu", "--global-batch-size", "32"),
        *("--steps", str(steps), "--save-every", str(SAVE_EVERY), "--run-dir", run_dir, *more),
    ]


def start(
    where: Path, run_dir: str, *more: str, steps: int = STEPS, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run_dir, *more, steps=steps),
        cwd=where,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=900)
    return process.returncode, out + err


def out_of_memory() -> dict[str, Any]:
    """Memory runs out at each op of a step; see tests/faults."""
    from tests.faults import test_out_of_memory_at_every_op as harness

    from brimful.settings import Precision, Settings

    torch.set_num_threads(1)
    whole = {
        "plain": harness.settings(),
        "recomputed": harness.settings(units=harness.RECOMPUTED),
        "fp16": harness.settings(precision=Precision.FP16),
        "bf16": harness.settings(precision=Precision.BF16),
    }
    plain = Settings(micro_batch_size=harness.BATCH)
    cases = {f"whole step, {name}": (harness.Net, how, "adamw foreach", 2) for name, how in whole.items()}
    cases |= {f"step by {name}": (harness.simple_net, plain, name, 2) for name in harness.OPTIMIZERS}
    rows = []
    for name, (net, how, optimizer, step) in cases.items():
        run = partial(harness.trained, net, how, harness.OPTIMIZERS[optimizer], step)
        expected, counted, _ = run()
        outcomes: Counter[str] = Counter()
        for number in range(len(counted.ops)):
            try:
                harness.assert_same(run(number)[0], expected)
                outcomes["bit for bit the undisturbed run"] += 1
            except Exception as error:
                outcomes[type(error).__name__] += 1
        rows.append({"case": name, "points": len(counted.ops), "outcomes": dict(outcomes)})
        print(rows[-1], flush=True)
    return {"points": sum(row["points"] for row in rows), "rows": rows}


def killed(where: Path) -> dict[str, Any]:
    """A run is killed and resumed again and again."""
    status, said = finish(start(where, "undisturbed"))
    assert status == 0, said
    chance = random.Random(1)
    kills, lost = 0, []
    while True:
        process = start(where, "killed", "--resume")
        begun = time.monotonic()  # the process takes some seconds to its first step
        wait = chance.uniform(1.0, 7.0)
        while process.poll() is None and time.monotonic() - begun < wait:
            time.sleep(0.01)
        if kills >= KILLS or process.poll() is not None:
            status, said = finish(process)
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        lost.append(steps_told(where / "killed") - newest_save(where / "killed"))
    assert status == 0, said
    same = load_file(where / "killed" / "weights.safetensors")
    expected = load_file(where / "undisturbed" / "weights.safetensors")
    return {
        "kills": kills,
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "steps_to_take_again_most": max(lost),
        "steps_to_take_again": lost,
        "weights_bit_for_bit": all(torch.equal(same[name], expected[name]) for name in expected),
        "losses_bit_for_bit": losses(where / "killed") == losses(where / "undisturbed"),
    }


def steps_told(run_dir: Path) -> int:
    return len(losses(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def losses(run_dir: Path) -> list[float]:
    whole = [line for line in (run_dir / "metrics.jsonl").read_text().split("\n")[:-1] if line]
    entries = [json.loads(line) for line in whole]
    return [entry["loss"] for entry in entries if entry["kind"] == "step"]


def newest_save(run_dir: Path) -> int:
    names = [path.name for path in (run_dir / "saves").glob("step-*")] if (run_dir / "saves").exists() else []
    return max((int(name[5:]) for name in names), default=0)


def damaged(where: Path) -> dict[str, Any]:
    """One bit of the newest save is turned, or its end cut off; is it refused?"""
    from brimful.trainer.storage.restore import newest_save as read

    chance = random.Random(2)
    outcomes: Counter[str] = Counter()
    saves = sorted((where / "undisturbed" / "saves").glob("step-*"))
    for _ in range(DAMAGES):
        path = chance.choice(sorted(saves[-1].iterdir()))
        content = path.read_bytes()
        place = chance.randrange(len(content))
        turned = bytearray(content)
        turned[place] ^= 1 << chance.randrange(8)
        path.write_bytes(turned if chance.random() < 0.5 else content[:place])
        reasons: list[str] = []
        found = read(where / "undisturbed", reasons.append)
        is_right = found is not None and found.path == saves[-2] and bool(reasons)
        outcomes["refused, the one before used" if is_right else f"taken: {path.name}"] += 1
        path.write_bytes(content)
    return {"damages": DAMAGES, "outcomes": dict(outcomes)}


def others(where: Path) -> dict[str, Any]:
    """A worker dies, a loss becomes NaN, SIGTERM comes: what is said, and that resuming ends as the undisturbed
    run."""
    expected = losses(where / "undisturbed")
    found = {}
    for name, environment in {"dead worker": {"DIES_AT": "300"}, "NaN": {"NAN_AFTER": "50"}}.items():
        run_dir = name.replace(" ", "-")
        status, said = finish(start(where, run_dir, **environment))
        told = said.strip().splitlines()[-4:]
        again, said = finish(start(where, run_dir, "--resume"))
        found[name] = {
            "status": status,
            "told": told,
            "resumed_status": again,
            "losses_bit_for_bit": losses(where / run_dir)[-1] == expected[-1],
        }
    process = start(where, "term")
    while process.poll() is None and steps_told(where / "term") < 40:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, said = finish(process)
    again, said = finish(start(where, "term", "--resume"))
    found["SIGTERM"] = {
        "status": status,
        "resumed_status": again,
        "losses_bit_for_bit": losses(where / "term") == expected,
    }
    return found


if __name__ == "__main__":
    main()
