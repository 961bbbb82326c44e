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

import brimful as bf
from helpers import exported
from helpers.command_line import brimful
from helpers.exported import (
    LEARNING_RATE,
    by_brimful,
    by_deepspeed,
    by_fully_shard,
    by_lightning,
    by_transformers,
    gpt2,
    texts,
)
from helpers.ranks import on_ranks

pytestmark = pytest.mark.slow  # processes that import these tools

ROUNDING = 1e-5
"""Relative: sums in another order."""
ROUNDING_BF16 = 2e-3
"""Relative; bfloat16 has 8 bits."""
SCRIPT = exported.__file__
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


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_transformers_trains_by_its_export(folder: Path, losses: list[float]) -> None:
    args, found = by_transformers(str(folder / "brimful-transformers.json"))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert args.optim == "adamw_torch_fused"
    assert args.activation_checkpointing
    assert found == pytest.approx(losses, rel=1e-3)  # its log rounds


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adagrad", "adam"])
def test_transformers_makes_the_optimizer_of_the_job(optimizer: str, tmp_path: Path) -> None:
    settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2)
    plan = bf.plan(exported.job(optimizer), "cpu", global_batch_size=8, micro_batch_size=4)
    plan.export(exported.job(optimizer), "transformers").save(tmp_path / "args.json")
    _args, found = by_transformers(str(tmp_path / "args.json"))
    model = gpt2()
    made = bf.optimizers.named_optimizer(optimizer, learning_rate=LEARNING_RATE)(model)
    step = bf.apply(settings, exported.job(optimizer), model, made)
    expected = [float(step(batch).loss) for batch in texts().split(8)]
    assert found == pytest.approx(expected, rel=1e-3)


def launched(*command: str, **variables: str) -> list[float]:
    """The losses that a script prints under a launcher, a module with its arguments."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("[")))


def test_accelerate_launches_by_its_export(folder: Path, losses: list[float]) -> None:
    file = folder / "brimful-accelerate.yaml"
    comment = "# environment: "
    said = [line for line in file.read_text().splitlines() if line.startswith(comment)]
    variables = dict(line.removeprefix(comment).split("=") for line in said)
    assert variables == {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    launcher = ("-m", "accelerate.commands.launch", "--config_file", str(file))
    assert launched(*launcher, SCRIPT, "accelerate", "2", **variables) == pytest.approx(losses, rel=ROUNDING)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_trains_by_its_export(folder: Path, losses: list[float]) -> None:
    assert by_lightning(str(folder / "mine.yaml")) == pytest.approx(losses, rel=ROUNDING)


def test_two_ranks_train_by_exports_for_transformers_and_lightning(tmp_path: Path, losses: list[float]) -> None:
    tools = ("transformers=t.json", "lightning=l.yaml")
    exports(tmp_path, *tools, world_size=2, parallelism="ddp", micro_batch_size=2)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    found = launched(*torchrun, SCRIPT, "transformers", str(tmp_path / "t.json"))
    assert found == pytest.approx(losses, rel=1e-3)  # its log rounds
    assert launched(SCRIPT, "lightning", str(tmp_path / "l.yaml")) == pytest.approx(losses, rel=ROUNDING)


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
@pytest.mark.parametrize(("parallelism", "precision"), [("zero2", "bf16"), ("zero3", "fp32")])
def test_deepspeed_divides_by_its_export(parallelism: str, precision: str, tmp_path: Path) -> None:
    exports(
        tmp_path, "deepspeed", world_size=2, parallelism=parallelism, precision=precision, micro_batch_size=2
    )
    alone = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4, precision=precision)
    expected = by_brimful(alone)
    for found in on_ranks(by_deepspeed, str(tmp_path / "brimful-deepspeed.json")):
        assert found == pytest.approx(expected, rel=ROUNDING_BF16 if precision == "bf16" else ROUNDING)


@pytest.mark.parametrize("precision", ["bf16"])
def test_fully_shard_divides_by_its_export(precision: str, tmp_path: Path) -> None:
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
    assert (args.use_fsdp, args.num_processes) == (True, 2)
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.transformer_cls_names_to_wrap == ["GPT2Block"]


def test_accelerate_reads_the_ranks_of_ddp(tmp_path: Path) -> None:
    """Read alone: it starts several ranks on GPUs only."""
    from accelerate.commands.launch import _validate_launch_command as read
    from accelerate.commands.launch import launch_command_parser

    exports(tmp_path, "accelerate=a.yaml", device="RTX 3090", world_size=2, parallelism="ddp")
    parser = launch_command_parser()
    args, *_others = read(parser.parse_args(["--config_file", str(tmp_path / "a.yaml"), "script.py"]))
    assert (args.multi_gpu, args.num_processes, args.use_cpu) == (True, 2, False)
