"""Two ranks under torchrun: one is killed, or runs out of memory, and the launch after it goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from brimful.results import StopReason
from helpers.alike_on_ranks import NAN_STEP, done_alike
from helpers.ranks import on_ranks

pytestmark = pytest.mark.slow  # launches processes that import torch

JOB = """
    import os, signal, time
    from pathlib import Path

    import torch
    import torch.nn.functional as F
    from torch import nn

    import brimful as bf

    WHAT, AT = os.environ.get("FAULT", ""), 11
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    samples = {"x": x, "y": x[:, :4].argmax(1)}

    class Fault:  # a number that a loss holds and compares is state, for which a batch stays whole
        calls = 0

    def loader():
        from torch.utils.data import DataLoader, TensorDataset

        def collate(items):
            time.sleep(0.2 * (os.environ["RANK"] == "1"))  # rank 0 waits in a step, rank 1 for its worker
            return {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items])}

        return DataLoader(
            TensorDataset(samples["x"].repeat(50, 1), samples["y"].repeat(50)),
            batch_size=16, num_workers=1, collate_fn=collate,
        )

    def fault():
        Fault.calls += torch.is_grad_enabled()
        if WHAT == "workers":
            Path(__file__).with_name(f"step-{Fault.calls}").touch()
            return
        marker = Path(__file__).with_name("fault-was")
        if WHAT and os.environ.get("RANK") == "1" and Fault.calls == AT and not marker.exists():
            marker.touch()
            if WHAT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if WHAT == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.blocks(x))

    def loss(model, batch):
        fault()
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def killed_while_saving():
        # the second rank ends in the midst of its part of the third save
        from brimful.trainer.storage import saves

        write, written = saves.write_tensors, []

        def write_a_half(tensors, path, metadata):
            written.append(path)
            write(tensors, path, metadata)
            if os.environ.get("RANK") == "1" and len(written) == 3 and not marker.exists():
                marker.touch()
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        marker = Path(__file__).with_name("fault-was")
        saves.write_tensors = write_a_half

    if WHAT == "kill while saving":
        WHAT = ""
        killed_while_saving()

    def job():
        return bf.Job(
            name="net",
            model=Net,
            loss=loss,
            batch=samples,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            data=lambda: bf.Data(train=loader() if WHAT == "workers" else samples),
        )
"""


def launched(
    folder: Path, name: str, fault: str = "", *, restarts: int = 1, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A run of 16 steps on two ranks, launched again if it fails."""
    options = {f"--{option.replace('_', '-')}": value for option, value in options.items()}
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    (folder / "fault-was").unlink(missing_ok=True)
    how = {"--global-batch-size": 16, "--micro-batch-size": 8, "--recompute": "none", "--epochs": 4} | options
    how |= {"--device": "cpu", "--run-dir": name, "--save-every": 3}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--max-restarts", str(restarts), "-m", "brimful", "train", "job.py:job", "--resume",
         *(str(word) for pair in how.items() for word in pair)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    done = launched(folder, "whole")
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_save(whole: Path, tmp_path: Path) -> None:
    killed = launched(tmp_path, "killed", "kill")
    assert killed.returncode == 0, killed.stderr
    assert (tmp_path / "fault-was").exists()
    assert "resumed after step 9" in killed.stderr
    assert losses(tmp_path / "killed") == losses(whole)
    expected, resumed = (load_file(run / "weights.safetensors") for run in (whole, tmp_path / "killed"))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_a_rank_that_is_killed_while_it_writes_its_part_costs_that_save(whole: Path, tmp_path: Path) -> None:
    """Under FSDP2 each rank writes its own, beside the training; of step 6 there is half a file of one."""
    killed = launched(tmp_path, "killed", "kill while saving", parallelism="fsdp2")
    assert killed.returncode == 0, killed.stderr
    assert (tmp_path / "fault-was").exists()
    assert "resumed after step 4" in killed.stderr
    assert losses(tmp_path / "killed") == pytest.approx(losses(whole), rel=1e-5)
    assert {path.name for path in (tmp_path / "killed" / "saves").iterdir()} == {
        "step-000000015",
        "step-000000016",
    }


def test_memory_that_runs_out_on_one_rank_lowers_the_plan_of_all(whole: Path, tmp_path: Path) -> None:
    lowered = launched(tmp_path, "lowered", "out of memory")
    assert lowered.returncode == 0, lowered.stderr
    assert "memory ran out on rank 1 of 2 in step 11" in lowered.stderr
    assert "resumes from its last save" in lowered.stderr
    lines = (tmp_path / "lowered" / "metrics.jsonl").read_text().splitlines()
    (recovery,) = (line for line in map(json.loads, lines) if line["kind"] == "recovery")
    assert recovery["during"] == "step on rank 1"
    assert recovery["before"] != recovery["after"]
    assert losses(tmp_path / "lowered") == pytest.approx(losses(whole), rel=1e-5)
    settings = json.loads((tmp_path / "lowered" / "result.json").read_text())["settings"]
    assert (settings["ranks"], settings["micro_batch_size"] * settings["gradient_accumulation_steps"]) == (2, 8)


def test_sigterm_ends_both_ranks_after_the_same_step_and_saves(whole: Path, tmp_path: Path) -> None:
    """Sent by one rank to itself alone, in the midst of a step: the other must not wait for it for ever."""
    ended = launched(tmp_path, "ended", "terminate", restarts=0)
    assert ended.returncode != 0
    assert max(losses(tmp_path / "ended")) == 11
    again = launched(tmp_path, "ended")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "ended") == losses(whole)


def started_with_workers(folder: Path, rank: int, port: int, *, steps: int) -> subprocess.Popen[str]:
    """A rank in a session of its own, which its DataLoader's worker is in too."""
    return subprocess.Popen(
        [sys.executable, "-m", "brimful", "train", "job.py:job", "--global-batch-size", "16",
         "--micro-batch-size", "8", "--recompute", "none", "--steps", str(steps), "--device", "cpu",
         "--run-dir", "ended", "--resume"],
        cwd=folder, text=True, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "FAULT": "workers", "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
             "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    )  # fmt: skip


def test_sigterm_ends_ranks_after_the_same_step_although_their_workers_get_it_too(tmp_path: Path) -> None:
    """As torchrun sends it, to each rank's group of processes: one misses its worker, and one waits for it."""
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [started_with_workers(tmp_path, rank, port, steps=150) for rank in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "step-15").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGTERM)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [143, 143], errors
    last = max(losses(tmp_path / "ended"))
    assert 0 < last < 150
    assert (tmp_path / "ended" / "saves" / f"step-{last:09d}").exists()


def test_ranks_do_alike_whatever_happens_on_one(tmp_path: Path) -> None:
    """A NaN in one's share, the certificate that the first makes, BatchNorm's statistics, patience."""
    ranks = on_ranks(done_alike, str(tmp_path))
    for parallelism in ("ddp", "fsdp2"):
        first, second = (rank[parallelism] for rank in ranks)
        assert first["nan"] == second["nan"]
        assert f"nan in step {NAN_STEP}" in first["nan"]
        assert (tmp_path / parallelism / "saves" / f"step-{NAN_STEP - 1:09d}").exists()
        assert torch.isfinite(load_file(tmp_path / parallelism / "weights.safetensors")["head.bias"]).all()
        assert first["refused"] == second["refused"]
        assert "Nothing was trained" in first["refused"]
        assert first["certified"]
        assert first["losses"] == second["losses"]
        assert first["patient"] == second["patient"] == (StopReason.NOT_IMPROVING, 3)
        assert all(torch.equal(*pair) for pair in zip(first["buffers"], second["buffers"], strict=True))
