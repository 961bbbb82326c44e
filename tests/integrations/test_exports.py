"""A plan's export is read by its tool, which then computes the losses that brimful computes by the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, SequentialSampler
from transformers import HfArgumentParser, Trainer, TrainingArguments

import brimful as bf
from helpers import exported
from helpers.command_line import brimful
from helpers.exported import (
    LEARNING_RATE,
    STEPS,
    by_brimful,
    by_deepspeed,
    by_fully_shard,
    gpt2,
    loss_of,
    texts,
)
from helpers.ranks import on_ranks

pytestmark = pytest.mark.slow  # processes that import these tools

ROUNDING = 1e-5
"""Relative: sums in another order."""
ROUNDING_BF16 = 2e-3
"""Relative; bfloat16 has 8 bits."""
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: brimful[deepspeed]"
)


def exports(folder: Path, *tools: str, **options: Any) -> tuple[bf.Plan, str]:
    """A plan for the small model, exported by the command line; the plan, and what standard error says."""
    asked = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    source = f"{Path(exported.__file__)}:job"
    done = brimful(
        folder,
        *("plan", source, "--global-batch-size=8", "--device=cpu", "--output=plan.json", *asked),
        *(f"--export={tool}" for tool in tools),
    )
    assert done.returncode == 0, done.stderr
    return bf.Plan.load(folder / "plan.json"), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of one plan: 4 micro-batches of 2 samples, everything recomputed."""
    made = tmp_path_factory.mktemp("exports")
    tools = ("transformers", "accelerate", "lightning=mine.yaml", "deepspeed")
    plan, said = exports(made, *tools, micro_batch_size=2, recompute="all")
    assert plan.settings.gradient_accumulation_steps == 4
    assert said.count("not expressed   5 of 5 units recomputed") == 3  # not of transformers
    return made


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return by_brimful(bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4))


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def by_transformers(file: Path, folder: Path) -> tuple[TrainingArguments, list[float]]:
    (args,) = HfArgumentParser(TrainingArguments).parse_json_file(file)
    args.output_dir = str(folder)
    args.report_to, args.save_strategy, args.disable_tqdm = [], "no", True
    args.learning_rate, args.lr_scheduler_type, args.max_grad_norm = LEARNING_RATE, "constant", 0.0
    args.max_steps, args.logging_steps = STEPS, 1
    labels = texts().index_fill(1, torch.tensor([0]), -100)  # not predicted; the Trainer divides by the others
    samples = [{"input_ids": text, "labels": label} for text, label in zip(texts(), labels, strict=True)]
    trainer = InOrder(model=gpt2(), args=args, train_dataset=samples)
    trainer.train()
    return args, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_transformers_trains_by_its_export(folder: Path, losses: list[float], tmp_path: Path) -> None:
    args, found = by_transformers(folder / "brimful-transformers.json", tmp_path)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert args.optim == "adamw_torch_fused"
    assert args.activation_checkpointing
    assert found == pytest.approx(losses, rel=1e-3)  # its log rounds


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adagrad", "adam"])
def test_transformers_makes_the_optimizer_of_the_job(optimizer: str, tmp_path: Path) -> None:
    settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2)
    plan = bf.plan(exported.job(optimizer), "cpu", global_batch_size=8, micro_batch_size=4)
    bf.export(exported.job(optimizer), plan, "transformers").save(tmp_path / "args.json")
    _args, found = by_transformers(tmp_path / "args.json", tmp_path)
    model = gpt2()
    made = bf.named_optimizer(optimizer, learning_rate=LEARNING_RATE)(model)
    step = bf.apply(settings, exported.job(optimizer), model, made)
    expected = [float(step(batch).loss) for batch in texts().split(8)]
    assert found == pytest.approx(expected, rel=1e-3)


def test_accelerate_launches_by_its_export(folder: Path, losses: list[float]) -> None:
    text = (folder / "brimful-accelerate.yaml").read_text()
    comment = "# environment: "
    said = [line.removeprefix(comment) for line in text.splitlines() if line.startswith(comment)]
    variables = dict(line.split("=") for line in said)
    assert variables == {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    done = subprocess.run(
        [*launch, str(folder / "brimful-accelerate.yaml"), exported.__file__, "2"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(losses, rel=ROUNDING)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_trains_by_its_export(folder: Path, losses: list[float], tmp_path: Path) -> None:
    import lightning

    options = yaml.safe_load((folder / "mine.yaml").read_text())
    found: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            found.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return exported.adamw(self.model)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(**options["trainer"], max_steps=STEPS, default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), DataLoader(texts(), batch_size=options["data"]["batch_size"]))
    means = [sum(found[step : step + 4]) / 4 for step in (0, 4)]
    assert means == pytest.approx(losses, rel=ROUNDING)


def test_a_plan_that_is_checked_is_exported(folder: Path) -> None:
    source = f"{Path(exported.__file__)}:job"
    done = brimful(folder, "plan", source, "--check=plan.json", "--export=transformers=again.json")
    assert done.returncode == 0, done.stderr
    assert (folder / "again.json").read_text() == (folder / "brimful-transformers.json").read_text()


def test_a_tool_that_cannot_train_by_the_plan_ends_with_bad_usage(folder: Path) -> None:
    source = f"{Path(exported.__file__)}:job"
    done = brimful(folder, "plan", source, "--check=plan.json", "--export=fsdp")
    assert done.returncode == 2
    assert "fully_shard is FSDP2" in done.stderr
    assert not (folder / "brimful-fsdp.json").exists()


@needs_deepspeed
def test_deepspeed_trains_by_its_export(folder: Path, losses: list[float]) -> None:
    (found,) = on_ranks(by_deepspeed, str(folder / "brimful-deepspeed.json"), count=1)
    assert found == pytest.approx(losses, rel=ROUNDING)


@needs_deepspeed
@pytest.mark.parametrize(("stage", "precision"), [("zero1", "fp32"), ("zero2", "bf16"), ("zero3", "fp32")])
def test_deepspeed_shards_by_its_export(stage: str, precision: str, tmp_path: Path) -> None:
    exports(tmp_path, "deepspeed", world_size=2, parallelism=stage, precision=precision, micro_batch_size=2)
    alone = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4, precision=precision)
    expected = by_brimful(alone)
    for found in on_ranks(by_deepspeed, str(tmp_path / "brimful-deepspeed.json")):
        assert found == pytest.approx(expected, rel=ROUNDING_BF16 if precision == "bf16" else ROUNDING)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fully_shard_shards_by_its_export(precision: str, tmp_path: Path) -> None:
    exports(tmp_path, "fsdp=f.json", world_size=2, parallelism="fsdp2", precision=precision, micro_batch_size=2)
    alone = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4, precision=precision)
    expected = by_brimful(alone)
    for found in on_ranks(by_fully_shard, str(tmp_path / "f.json")):
        assert found == pytest.approx(expected, rel=ROUNDING_BF16 if precision == "bf16" else ROUNDING)


def test_accelerate_reads_the_plugin_of_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read alone: Accelerate has no FSDP on a CPU."""
    from accelerate.commands.launch import _validate_launch_command as read
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    exports(tmp_path, "accelerate=a.yaml", device="RTX 3090", world_size=2, parallelism="fsdp2")
    parser = launch_command_parser()
    args, *_others = read(parser.parse_args(["--config_file", str(tmp_path / "a.yaml"), "script.py"]))
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.transformer_cls_names_to_wrap == ["GPT2Block"]
