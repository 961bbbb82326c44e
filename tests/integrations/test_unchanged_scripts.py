"""`brimful run --budget`: a script that stays as it is trains inside a budget, or does not train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.command_line import brimful

TRAINER = """
import hashlib, sys, tempfile
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=128, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
texts = [{"input_ids": (ids := torch.randint(0, 64, (128,))), "labels": ids} for _ in range(8)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        optim="sgd",
    ),
    train_dataset=texts,
    eval_dataset=texts,
)
trainer.remove_callback(PrinterCallback)
try:
    trainer.train()
    trainer.train()
except Exception:
    print("went on without training")
loss = trainer.evaluate()["eval_loss"]
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print(hashlib.sha256(weights).hexdigest(), loss, torch.rand(1).item())
sys.exit(3)
"""

MODULE = """
import hashlib
import torch
import lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [[nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()] for _ in range(8)]
        self.net = nn.Sequential(*[nn.Sequential(*each) for each in blocks], nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        self.log("validation", self.training_step(batch, index))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Samples(lightning.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))

    def train_dataloader(self):
        return DataLoader(self.data, 256, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, 256)


torch.manual_seed(0)
module = Classifier()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, datamodule=Samples())
weights = b"".join(each.detach().numpy().tobytes() for each in module.parameters())
print(hashlib.sha256(weights).hexdigest(), trainer.callback_metrics["validation"], len(trainer.callbacks))
"""

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
net = nn.Sequential(*blocks, nn.Linear(64, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
samples = TensorDataset(torch.randn(2048, 64), torch.randint(0, 4, (2048,)))
loader = DataLoader(samples, 512, shuffle=True)
# before
for batch in loader:
    optimizer.zero_grad()
    x, y = batch
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
print(loss.item())
"""


def ran(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A start of the interpreter; `brimful` is a fork of one that has loaded torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def last_line(run: subprocess.CompletedProcess[str]) -> str:
    """What the script itself prints: libraries print on standard output when they are imported."""
    return run.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def trainer_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(TRAINER, encoding="utf-8")
    return path


def test_a_trainer_trains_to_the_same_weights_inside_the_budget(trainer_script: Path) -> None:
    """Batches of one sample are not divided, so the plan recomputes, which is exact."""
    alone = ran(trainer_script.parent, "train.py")
    planned = ran(
        trainer_script.parent, "-m", "brimful", "run", "--budget", "3.6MiB", "--output", "seen.json", "train.py"
    )
    assert last_line(planned) == last_line(alone)
    assert planned.returncode == alone.returncode == 3
    assert planned.stderr.count("GPT2LMHeadModel on cpu, global batch 2, budget 3.6 MiB") == 1, planned.stderr
    assert "does not fit" in planned.stderr  # the baseline
    assert "recomputed" in planned.stderr
    seen = json.loads((trainer_script.parent / "seen.json").read_text(encoding="utf-8"))
    assert seen["steps"] == 3
    assert seen["findings"] == []
    assert seen["peak_bytes"] <= 3.6 * 2**20


OWN_LOSS = """
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
"""


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_check_of_a_divided_batch_is_not_seen(is_measured: bool, tmp_path: Path) -> None:
    """The first step compares a few samples with their parts, beside what the script does.

    Where the rates of the machine are measured first, that steps an optimizer which is not the script's.
    """
    divided = TRAINER.replace("per_device_train_batch_size=1", "per_device_train_batch_size=8")
    if not is_measured:
        divided = divided.replace("trainer = Trainer(", OWN_LOSS + "trainer = Own(")
    assert divided != TRAINER
    (tmp_path / "train.py").write_text(divided, encoding="utf-8")
    run = brimful(
        tmp_path, "run", "--budget", "6MiB", "--output", "seen.json", "train.py", is_measured=is_measured
    )
    assert "no plan was applied" not in run.stderr
    assert re.search(r"plan +fp32, micro-batch [124] × ", run.stderr), run.stderr
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert seen["findings"] == []
    assert seen["peak_bytes"] <= 6 * 2**20


def test_batches_that_must_stay_whole_are_planned_by_the_lines_that_are_shown(tmp_path: Path) -> None:
    weighted = OWN_LOSS.replace("else outputs.loss", "else outputs.loss * inputs['labels'].float().mean()")
    script = TRAINER.replace("per_device_train_batch_size=1", "per_device_train_batch_size=8")
    script = script.replace("trainer = Trainer(", weighted + "trainer = Own(").replace(
        "    trainer.train()\n", "", 1
    )
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    refused = brimful(tmp_path, "run", "--budget", "6MiB", "train.py")
    assert "NOT the same training" in refused.stderr
    lines = refused.stderr.partition("before trainer.train() in place of --budget:\n")[2]
    lines = lines.replace("6MiB", "20MiB")  # whole batches do not fit 6 MiB
    written = script.replace(
        "try:\n", "".join(f"{line.strip()}\n" for line in lines.splitlines()[:2]) + "try:\n"
    )
    (tmp_path / "train.py").write_text(written, encoding="utf-8")
    planned = brimful(tmp_path, "train.py", is_script=True)
    assert planned.returncode == 3, planned.stderr
    assert "micro-batch 8" in planned.stderr + planned.stdout


def test_a_trainer_that_does_not_fit_does_not_train(trainer_script: Path) -> None:
    """Whatever errors of training the script catches."""
    refused = brimful(trainer_script.parent, "run", "--budget", "100KiB", "train.py")
    assert "InfeasibleError: no plan fits 100 KiB on cpu" in refused.stderr
    assert "would fit: a budget of" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "watched" not in refused.stderr
    assert "went on" not in refused.stdout
    assert refused.returncode == 1


def test_a_trainer_is_planned_for_a_gpu_that_is_not_here(trainer_script: Path) -> None:
    planned = brimful(trainer_script.parent, "run", "--device", "RTX 3090", "train.py")
    assert "GPT2LMHeadModel on RTX 3090, global batch 2, budget 22.4 GiB" in planned.stderr
    assert "baseline" in planned.stderr
    assert "watched" not in planned.stderr
    assert "went on" not in planned.stdout
    assert planned.returncode == 0


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_lightning_module_trains_to_the_same_weights_inside_the_budget(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(MODULE, encoding="utf-8")
    alone = ran(tmp_path, "fit.py")
    planned = ran(tmp_path, "-m", "brimful", "run", "--budget", "3.3MiB", "--output", "seen.json", "fit.py")
    assert last_line(planned) == last_line(alone)
    assert planned.returncode == alone.returncode == 0
    assert "Classifier on cpu, global batch 256, budget 3.3 MiB" in planned.stderr
    assert "plan            fp32, micro-batch 256" in planned.stderr
    assert "units recomputed" in planned.stderr
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert seen["peak_bytes"] <= 3.3 * 2**20  # without the copies by which a step could be undone
    refused = brimful(tmp_path, "run", "--budget", "1MiB", "fit.py")
    assert "InfeasibleError: no plan fits 1 MiB on cpu" in refused.stderr
    assert refused.stdout == ""
    assert refused.returncode == 1
    elsewhere = brimful(tmp_path, "run", "--device", "RTX 3090", "--budget", "4GiB", "fit.py")
    assert "Classifier on RTX 3090, global batch 256, budget 4 GiB" in elsewhere.stderr
    assert (elsewhere.stdout, elsewhere.returncode) == ("", 0)


def test_the_lines_for_a_loop_of_the_script_s_own_plan_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    alone = brimful(tmp_path, "loop.py", is_script=True)
    planned = brimful(tmp_path, "run", "--budget", "60%", "loop.py")
    assert planned.stdout == alone.stdout
    assert "no plan was applied, and the script runs outside of the budget of 60%" in planned.stderr
    assert "loop.py:18 steps an optimizer of its own" in planned.stderr
    elsewhere = brimful(tmp_path, "run", "--device", "RTX 3090", "loop.py")
    assert (
        "has stepped an optimizer of its own: what is around its steps cannot be captured" in elsewhere.stderr
    )
    assert (elsewhere.stdout, elsewhere.returncode) == ("", 2)
    assert "torch.optim.AdamW(parameters, lr=0.01)," in planned.stderr
    before, _, within = planned.stderr.partition("write before the loop:\n")[2].partition("  and in the loop")
    before = before.replace("...,", "nn.functional.cross_entropy(model(batch[0]), batch[1]),")
    forward = LOOP[LOOP.index("    optimizer.zero") : LOOP.index("print")]
    written = LOOP.replace("# before\n", "\n".join(line[4:] for line in before.splitlines()) + "\n")
    written = written.replace(forward, within.splitlines()[1] + "\n    print(step.settings.describe())\n")
    (tmp_path / "written.py").write_text(
        written.replace("loss.item()", "outcome.loss.item()"), encoding="utf-8"
    )
    done = brimful(tmp_path, "written.py", is_script=True)
    assert done.returncode == 0, done.stderr
    *settings, loss = done.stdout.splitlines()
    # Which of the two is faster depends on the machine's rates.
    assert "units recomputed" in settings[0] or "micro-batch 512," not in settings[0]
    assert float(loss) == pytest.approx(float(alone.stdout), rel=1e-4)


def test_nothing_is_imported_for_a_script_that_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(
        "import sys\nprint([name for name in ('transformers', 'lightning') if name in sys.modules])\n",
        encoding="utf-8",
    )
    run = ran(tmp_path, "-m", "brimful", "run", "--budget", "1GiB", "nothing.py")
    assert run.stdout == "[]\n"
    assert "no plan was applied: nothing was trained" in run.stderr
    refused = brimful(tmp_path, "run", "--budget", "1XB", "nothing.py")
    assert "'1XB' has the unit 'XB'" in refused.stderr
    assert (refused.stdout, refused.returncode) == ("", 2)
