"""`brimful run`, as a user types it: the script's own output, status and results, and what was seen of it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

import pytest

from helpers.command_line import brimful

SCRIPT = """
import hashlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    pass


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    rows = Rows(torch.randn(320, 16), torch.randint(0, 4, (320,)))
    loader = DataLoader(rows, 32, shuffle=True, num_workers=1)
    total = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        total = total + loss
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    print(hashlib.sha256(weights).hexdigest(), float(total), sys.argv[1:], __name__)
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


if __name__ == "__main__":
    main()
"""


def ran(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A start of the interpreter; `brimful` is a fork of one that has loaded torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def test_a_script_prints_computes_and_exits_as_it_does_alone(folder: Path) -> None:
    alone = ran(folder, "train.py", "3", "--device=cpu")
    watched = ran(folder, "-m", "brimful", "run", "train.py", "3", "--device=cpu")
    assert watched.stdout == alone.stdout
    assert "['3', '--device=cpu'] __main__" in watched.stdout
    assert watched.returncode == alone.returncode == 3
    assert "watched 3 optimizer steps on cpu" in watched.stderr
    assert "train.py:24: total keeps the graphs of earlier steps" in watched.stderr


TRAINER = """
import json
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (48, 16))]
options = TrainingArguments(
    "out", max_steps=12, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)


def accuracy(predicted):
    logits, labels = predicted
    return {"right": float((logits.argmax(-1) == labels).mean()), "logits": float(np.abs(logits).sum())}


trainer = Trainer(
    GPT2LMHeadModel(config), options, train_dataset=rows[:32], eval_dataset=rows[32:], compute_metrics=accuracy
)
ended = trainer.train()
trainer.save_model()
seen = [*trainer.state.log_history, ended.metrics, trainer.evaluate(), {"loss": ended.training_loss}]
timed = ("runtime", "per_second")
kept = [{key: value for key, value in each.items() if not key.endswith(timed)} for each in seen]
Path("results.json").write_text(json.dumps(kept))
"""


@pytest.mark.slow
def test_a_trainer_with_evaluations_trains_as_it_does_alone(tmp_path: Path) -> None:
    """Bit for bit: losses, metrics but for times, and saved weights."""

    def results(name: str, *command: str) -> tuple[str, bytes, str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(TRAINER, encoding="utf-8")
        done = ran(folder, *command, "train.py")
        assert done.returncode == 0, done.stderr
        weights = (folder / "out" / "model.safetensors").read_bytes()
        return (folder / "results.json").read_text(encoding="utf-8"), weights, done.stderr

    logged, weights, _ = results("alone")
    logged_watched, weights_watched, report = results("watched", "-m", "brimful", "run")
    assert "watched 3 optimizer steps on cpu" in report
    assert logged.count("eval_right") == 7
    assert logged_watched == logged
    assert weights_watched == weights


def test_a_module_runs_as_python_runs_it(folder: Path) -> None:
    alone = ran(folder, "-m", "train", "0")
    watched = brimful(folder, "run", "-m", "train", "0")
    assert watched.stdout == alone.stdout
    assert watched.returncode == alone.returncode == 0


def test_what_was_seen_is_written_as_json(folder: Path) -> None:
    brimful(folder, "run", "--steps", "4", "--output", "seen.json", "train.py")
    seen = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    assert (seen["script"], seen["steps"]) == ("train.py", 4)
    parameters_bytes = (16 * 64 + 64 + 64 * 4 + 4) * 4
    assert seen["categories"]["parameters"] == parameters_bytes
    assert {each["check"] for each in seen["findings"]} >= {"history-kept"}
    assert sum(seen["categories"].values()) == seen["peak_bytes"]


def test_memory_over_the_recorded_steps_is_written_for_other_viewers(folder: Path) -> None:
    """For both, with the peak of the report."""
    asked = ("--output=seen.json", "--timeline=steps.pickle", "--timeline=steps.json")
    brimful(folder, "run", *asked, "train.py")
    peak_bytes = json.loads((folder / "seen.json").read_text(encoding="utf-8"))["peak_bytes"]
    events = json.loads((folder / "steps.json").read_text(encoding="utf-8"))["traceEvents"]
    assert max(sum(each["args"].values()) for each in events if each["ph"] == "C") == peak_bytes
    (entries,) = pickle.loads((folder / "steps.pickle").read_bytes())["device_traces"]
    change = {"alloc": 1, "free_completed": -1}
    levels = accumulate(change.get(each["action"], 0) * each["size"] for each in entries)
    assert max(levels) == peak_bytes
    lines = {frame["filename"] for each in entries for frame in each["frames"]}
    assert any(line.endswith("train.py") for line in lines)


def test_a_timeline_of_another_kind_is_refused_before_the_script_starts(folder: Path) -> None:
    refused = brimful(folder, "run", "--timeline=steps.png", "train.py")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "--timeline steps.png: end the name in .pickle or in .json" in refused.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("run", "--output", "none/seen.json", "train.py"), "there is no folder"),
        (("run", "--bugdet", "1GiB", "train.py"), "run has no option --bugdet"),
        (("train.py",), "To watch a script: brimful run train.py"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_script_starts(
    folder: Path, command: tuple[str, ...], message: str
) -> None:
    refused = brimful(folder, *command)
    assert message in refused.stderr
    assert refused.stdout == ""
    assert refused.returncode == 2


def test_an_error_of_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def main():\n    raise ValueError('no')\n\n\nmain()\n", encoding="utf-8"
    )
    alone = ran(tmp_path, str(tmp_path / "broken.py"))
    watched = brimful(tmp_path, "run", str(tmp_path / "broken.py"))
    assert watched.returncode == alone.returncode == 1
    assert watched.stderr.startswith(alone.stderr)
    assert watched.stderr == alone.stderr


def test_memory_that_runs_out_after_the_recorded_steps_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
kept = torch.ones(1 << 20)
torch.empty(1 << 60)
"""
    )
    run = ran(tmp_path, "-m", "brimful", "run", "train.py")
    assert run.returncode == 1
    assert "other tensors: kept (train.py:8)" in run.stderr
    assert "watched 3 optimizer steps" in run.stderr


def test_an_error_of_a_recorded_op_shows_the_frames_of_the_script(tmp_path: Path) -> None:
    text = "import torch\ntry:\n    torch.ones(2, 2) @ torch.ones(3, 3)\nexcept Exception as error:\n    raise"
    (tmp_path / "train.py").write_text(f"{text} ValueError('no') from error\n")
    alone, watched = (ran(tmp_path, *command, "train.py") for command in ((), ("-m", "brimful", "run")))
    assert watched.stderr.startswith(alone.stderr)


def test_a_script_finds_its_file_its_folder_and_its_error_hook(tmp_path: Path) -> None:
    """Though it changes the directory, and forks."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("NAME = 'beside'\n", encoding="utf-8")
    (tmp_path / "sub" / "script.py").write_text(
        "import os, sys\nfrom pathlib import Path\nimport beside\n"
        "os.chdir('/')\nprint(Path(__file__).exists(), beside.NAME, sys.argv, flush=True)\n"
        "if os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
        "sys.excepthook = lambda *error: print('hook', error[1])\nraise ValueError('no')\n",
        encoding="utf-8",
    )
    alone = ran(tmp_path, "sub/script.py", "a")
    watched = brimful(tmp_path, "run", "--output", "seen.json", "sub/script.py", "a")
    assert watched.stdout == alone.stdout
    assert "True beside ['sub/script.py', 'a']" in watched.stdout
    assert watched.returncode == alone.returncode == 1
    assert watched.stderr.count("for a page") == 1
    assert (tmp_path / "seen.json").exists()


def test_a_folder_is_found_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "beside.py").write_text("NAME = 'beside'\n", encoding="utf-8")
    (tmp_path / "app" / "__main__.py").write_text(
        "import os, sys\nos.chdir('/')\nimport beside\nprint(beside.NAME, sys.argv)\n", encoding="utf-8"
    )
    watched = brimful(tmp_path, "run", "app", "a")
    assert watched.stdout == "beside ['app', 'a']\n", watched.stderr


def test_a_graph_of_many_ops_is_freed(tmp_path: Path) -> None:
    """Torch frees nodes that Python has seen by recursion, which 8 MiB of stack end at about 34,000."""
    (tmp_path / "deep.py").write_text(
        "import torch\nx = torch.ones(1, requires_grad=True)\nfor _ in range(50_000):\n    x = -x\n"
        "x.backward()\ndel x\nprint('done')\n",
        encoding="utf-8",
    )
    watched = brimful(tmp_path, "run", "deep.py")
    assert (watched.returncode, watched.stdout) == (0, "done\n"), watched.stderr[-500:]
    assert "watched" in watched.stderr


RANKS = [{"RANK": "1", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "1"}]


@pytest.mark.parametrize("variables", RANKS, ids=["torchrun", "mpirun"])
def test_of_several_ranks_the_first_shows_its_report_and_others_where_they_fail(
    folder: Path, variables: dict[str, str]
) -> None:
    text = SCRIPT.replace("import hashlib, sys", "import hashlib, sys\nimport brimful as bf")
    text = text.replace("    for x, y in loader:", "    for x, y in loader:\n      with bf.watch():")
    text = text.replace("    sys.exit(", "    if len(sys.argv) > 2: raise KeyError('mine')\n    sys.exit(")
    (folder / "watches.py").write_text(text, encoding="utf-8")
    (folder / "train.py").write_text(text.replace("with bf.watch():", "if True:"), encoding="utf-8")
    first = {name: "0" if value == "1" else value for name, value in variables.items()}
    command = ("run", "--output", "seen.json")
    assert "watched" not in brimful(folder, *command, "train.py", **variables).stderr
    assert "watched" not in brimful(folder, "watches.py", is_script=True, **variables).stderr
    assert not (folder / "seen.json").exists()
    failed = brimful(folder, *command, "train.py", "0", "fails", **variables)
    assert ("watched 3" in failed.stderr, failed.returncode) == (True, 1)
    assert not (folder / "seen.json").exists()  # which the first rank writes
    assert "watched 3" in brimful(folder, *command, "train.py", **first).stderr
    assert (folder / "seen.json").exists()


def test_tasks_of_srun_that_do_not_connect_are_runs_of_their_own(folder: Path) -> None:
    """Each has its report and its files; of tasks that connect, also for a while, the first alone has them."""
    command, variables = ("run", "--output=seen.json", "--timeline=steps.json"), {"SLURM_PROCID": "1"}
    alone = brimful(folder, *command, "train.py", **variables)
    assert "task 1 of srun, a run of its own: watched 3" in alone.stderr
    assert "for a page: brimful report" in alone.stderr
    written = {each.name for each in folder.glob("*.json")}
    assert written == {"seen.1.json", "steps.1.json"}
    connect = "import torch.distributed as dist; dist.init_process_group('gloo', init_method='file://{OWN}'"
    text = SCRIPT.replace(
        "    torch.manual_seed", f"    {connect}, rank=0, world_size=1)\n    torch.manual_seed"
    )
    text = text.replace("num_workers=1", "num_workers=0")  # a fork beside threads may wait for ever
    text = text.replace("    weights =", "    dist.destroy_process_group()\n    weights =")
    (folder / "train.py").write_text(text.replace("{OWN}", f"{folder}/store"), encoding="utf-8")
    connected = ran(folder, "-m", "brimful", *command, "train.py", **variables)
    assert connected.returncode == 0
    assert "watched" not in connected.stderr
    assert {each.name for each in folder.glob("*.json")} == written


def test_an_error_of_the_report_leaves_the_exit_status(folder: Path) -> None:
    """A module of the script's folder breaks what the report calls, after the script."""
    (folder / "breaking.py").write_text(
        "import sys, train\nimport brimful.doctor.text as text\ntext.predict_memory = None\ntrain.main()\n",
        encoding="utf-8",
    )
    watched = brimful(folder, "run", "breaking.py", "3")
    assert watched.returncode == 3
    assert "an error of brimful's own, please report it" in watched.stderr


def test_a_script_that_is_killed_leaves_what_was_seen(folder: Path) -> None:
    text = SCRIPT.replace(
        "        total = total", "        if total: __import__('os')._exit(7)\n        total = total"
    )
    (folder / "train.py").write_text(text, encoding="utf-8")
    watched = brimful(folder, "run", "--output=seen.json", "train.py")
    assert (watched.returncode, watched.stderr) == (7, "")
    seen = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    assert (seen["script"], seen["steps"]) == ("train.py", 2)
    assert seen["peak_bytes"] > seen["categories"]["parameters"] > 0


def test_there_is_no_such_script(tmp_path: Path) -> None:
    watched = brimful(tmp_path, "run", "none.py")
    assert watched.returncode == 2
    assert "there is no file none.py" in watched.stderr
    watched = brimful(tmp_path, "run", "-m", "none/train.py")
    assert watched.returncode == 2
    assert "Write -m none.train, or the path without -m" in watched.stderr


@pytest.mark.parametrize("name", ["none", "package.none", "package"])
def test_a_module_that_is_not_there_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("", encoding="utf-8")
    alone = ran(tmp_path, "-m", name)
    watched = brimful(tmp_path, "run", "-m", name)
    assert watched.returncode == alone.returncode == 1
    (line,) = watched.stderr.splitlines()
    assert (
        line == f"{alone.stderr.partition(': ')[2].strip()} (looked in {tmp_path} and among installed packages)"
    )


def test_a_module_that_imports_what_is_not_there_has_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import nowhere\n", encoding="utf-8")
    watched = brimful(tmp_path, "run", "-m", "train")
    assert watched.returncode == 1
    assert watched.stderr.startswith("Traceback")
    assert 'train.py", line 1' in watched.stderr


def test_ctrl_c_ends_the_script_and_shows_what_was_seen(folder: Path) -> None:
    """Its threads end first, and may still write a file."""
    text = SCRIPT.replace(
        "    weights =",
        "    import threading, time\n"
        "    threading.Thread(target=lambda: (time.sleep(3), print('saved'))).start()\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n    weights =",
    )
    (folder / "train.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "brimful", "run", "train.py"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (-signal.SIGINT, "saved\n")
    assert "KeyboardInterrupt" in errors
    assert "watched 3 optimizer steps" in errors
