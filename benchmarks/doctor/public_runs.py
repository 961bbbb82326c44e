"""Public training scripts under `brimful run`: what it finds, whether results stay, the seconds it adds.

    python benchmarks/doctor/public_runs.py CHECKOUTS --packages DIR          # all
    python benchmarks/doctor/public_runs.py CHECKOUTS --packages DIR NAME ... # some, not kept

CHECKOUTS is a folder of clones, each named OWNER+NAME; DIR has torchvision and gymnasium, installed with
`pip install --no-deps --target DIR`. Each script runs unchanged on one thread, by itself and watched, in turn,
twice each. Data that a script would download is made here: random digits in MNIST's format, random text.
`site/sitecustomize.py` fixes the seeds of both and takes a digest of all parameters after each optimizer step.
Each finding was read beside the script's code; `JUDGED` has those that are not true.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import commit_at, keep  # beside this folder

COMMAND = "python benchmarks/doctor/public_runs.py CHECKOUTS --packages DIR"
MOST_SECONDS = 300
TURNS = 2


def _mnist(folder: Path) -> None:
    """MNIST's files, with random digits, where scripts look for them."""
    random = np.random.default_rng(0)
    for name, count in (("train", 1280), ("t10k", 256)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for kind, magic, content in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            head = np.array([magic, *content.shape], dtype=">i4").tobytes()
            for place in ("data", "../data", "../../data", "files", "mnist"):
                raw = folder / place / "MNIST" / "raw"
                raw.mkdir(parents=True, exist_ok=True)
                (raw / f"{name}-{kind}-ubyte").write_bytes(head + content.tobytes())


def _tokens(folder: Path) -> None:
    """Random tokens in nanoGPT's format."""
    data = folder / "data" / "shakespeare_char"
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 50, 20_000, dtype=np.uint16).tofile(data / f"{name}.bin")


def _words(folder: Path) -> None:
    """The validation text as training text: the repository has no other."""
    data = folder / "data" / "wikitext-2"
    lines = (data / "valid.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("train", "valid", "test"):
        (data / f"{name}.txt").write_text("".join(lines[:60]), encoding="utf-8")


def _pictures(folder: Path) -> None:
    """Random pictures of four classes, and a small U-Net's configuration."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 4)):
        for kind in range(4):
            place = folder / "pictures" / split / f"class{kind}"
            place.mkdir(parents=True)
            for number in range(count):
                values = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(values).save(place / f"{number}.png")
    blocks = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
    blocks |= {"up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    sizes = {"sample_size": 32, "layers_per_block": 1, "block_out_channels": [32, 64], "norm_num_groups": 8}
    unet = {"_class_name": "UNet2DModel", **sizes, **blocks}
    (folder / "unet.json").write_text(json.dumps(unet))


def _small_llama(folder: Path) -> None:
    """A Llama with random weights over bytes, texts, and pairs of better and worse answers."""
    bytes_ = {each: place for place, each in enumerate(["<s>", "</s>", *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(bytes_, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder / "llama")
    config = transformers.LlamaConfig(
        vocab_size=len(bytes_), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    texts = [{"text": f"line {number} " * 8} for number in range(64)]
    pairs = [
        {"prompt": f"line {number}", "chosen": " good" * 4, "rejected": " bad" * 5} for number in range(64)
    ]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _nothing(_folder: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Run:
    """A public script and the arguments that make it short."""

    repository: str
    script: str
    arguments: str = ""
    prepare: Callable[[Path], None] = _nothing

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.script}"


TIMM, DIFFUSERS = "huggingface/pytorch-image-models", "huggingface/diffusers"
TRL, OF_LLAMA = (
    "huggingface/trl",
    "--model_name_or_path llama --max_steps 6 --per_device_train_batch_size 4 --output_dir made "
    "--report_to none --use_cpu",
)
EXAMPLES, CPU = "pytorch/examples", "--epochs 1"
BASICS, MIDDLE = "tutorials/01-basics", "tutorials/02-intermediate"
RUNS = (
    Run(
        "karpathy/nanoGPT",
        "train.py",
        "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --block_size=64 "
        "--batch_size=8 --n_layer=4 --n_embd=128 --n_head=4 --max_iters=10 --eval_interval=5 --log_interval=1",
        _tokens,
    ),
    Run("karpathy/makemore", "makemore.py", "--max-steps 12 --num-workers 0"),
    Run("karpathy/minGPT", "projects/adder/adder.py", "--trainer.max_iters=10 --trainer.num_workers=0"),
    Run(EXAMPLES, "mnist/main.py", "--epochs 1 --no-accel", _mnist),
    Run(EXAMPLES, "vae/main.py", "--epochs 1 --no-accel", _mnist),
    Run(EXAMPLES, "mnist_rnn/main.py", "--epochs 1", _mnist),
    Run(EXAMPLES, "siamese_network/main.py", "--epochs 1 --no-accel", _mnist),
    Run(EXAMPLES, "mnist_forward_forward/main.py", "--epochs 10 --train_size 500 --test_size 100", _mnist),
    Run(EXAMPLES, "dcgan/main.py", "--dataset fake --niter 1 --dry-run --workers 0 --imageSize 64"),
    Run(EXAMPLES, "word_language_model/main.py", "--epochs 1 --emsize 64 --nhid 64 --batch_size 8", _words),
    Run(
        EXAMPLES,
        "word_language_model/main.py",
        "--epochs 1 --emsize 64 --nhid 64 --batch_size 8 --model Transformer",
        _words,
    ),
    Run(EXAMPLES, "regression/main.py"),
    Run("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/301_regression.py"),
    Run("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/302_classification.py"),
    Run("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/306_optimizer.py"),
    Run("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/403_RNN_regressor.py"),
    Run("jcjohnson/pytorch-examples", "nn/two_layer_net_optim.py"),
    Run("jcjohnson/pytorch-examples", "nn/dynamic_net.py"),
    Run("yunjey/pytorch-tutorial", f"{BASICS}/logistic_regression/main.py", "", _mnist),
    Run("yunjey/pytorch-tutorial", f"{BASICS}/feedforward_neural_network/main.py", "", _mnist),
    Run("yunjey/pytorch-tutorial", f"{MIDDLE}/convolutional_neural_network/main.py", "", _mnist),
    Run("yunjey/pytorch-tutorial", f"{MIDDLE}/bidirectional_recurrent_neural_network/main.py", "", _mnist),
    Run("Lightning-AI/pytorch-lightning", "examples/pytorch/bug_report/bug_report_model.py"),
    Run("Lightning-AI/pytorch-lightning", "examples/fabric/image_classifier/train_torch.py", CPU, _mnist),
    Run(
        TIMM,
        "train.py",
        "--data-dir pictures --model resnet18 --num-classes 4 --img-size 64 --epochs 1 -b 8 --workers 1 "
        "--device cpu",
        _pictures,
    ),
    Run(
        DIFFUSERS,
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir pictures/train --model_config_name_or_path unet.json --resolution 32 "
        "--train_batch_size 4 --num_epochs 1 --output_dir made --ddpm_num_steps 10 "
        "--ddpm_num_inference_steps 2 --eval_batch_size 2 --use_ema",
        _pictures,
    ),
    Run(TRL, "trl/scripts/sft.py", f"--dataset_name texts {OF_LLAMA}", _small_llama),
    Run(TRL, "trl/scripts/sft.py", f"--dataset_name texts --use_peft {OF_LLAMA}", _small_llama),
    Run(TRL, "trl/scripts/dpo.py", f"--dataset_name pairs {OF_LLAMA}", _small_llama),
    Run(TRL, "trl/scripts/reward.py", f"--dataset_name pairs {OF_LLAMA}", _small_llama),
    Run("huggingface/accelerate", "src/accelerate/test_utils/scripts/test_script.py"),
    Run("vwxyzjn/cleanrl", "cleanrl/ppo.py", "--total-timesteps 1024 --num-envs 2 --no-cuda"),
)

JUDGED: dict[tuple[str, str], str] = {}
"""Findings that are not true, by script and check, and why."""


def ran(run: Run, checkouts: Path, packages: Path) -> dict[str, Any]:
    """A script's row."""
    row: dict[str, Any] = {"script": run.name, "arguments": run.arguments}
    row["commit"] = commit_at(checkouts / run.repository.replace("/", "+"))
    plain, watched = [], []
    for _turn in range(TURNS):
        plain.append(_once(run, checkouts, packages, watch=False))
        watched.append(_once(run, checkouts, packages, watch=True))
    if any(each["status"] for each in plain):
        return row | {"runs": False, "why": plain[0]["error"]}
    seconds = [statistics.median(each["seconds"] for each in turns) for turns in (plain, watched)]
    seen = watched[0]["seen"] or {}
    findings = [
        {key: each[key] for key in ("check", "line", "what", "size_bytes", "seconds")}
        | {"why_not_true": JUDGED.get((run.name, each["check"]))}
        for each in seen.get("findings", ())
    ]
    return row | {
        "runs": True,
        "results_repeat": plain[0]["digest"] == plain[-1]["digest"],
        "results_equal": {each["digest"] for each in (*plain, *watched)} == {plain[0]["digest"]},
        "status_equal": all(each["status"] == 0 for each in watched),
        "optimizer_steps": int(plain[0]["digest"].split()[0]),
        "recorded_steps": seen.get("steps"),
        "peak_bytes": seen.get("peak_bytes"),
        "seconds": round(seconds[0], 2),
        "seconds_added": round(seconds[1] - seconds[0], 2),
        "error": seen.get("error", watched[0]["error"]),
        "compiled": seen.get("compiled"),
        "findings": findings,
    }


def _once(run: Run, checkouts: Path, packages: Path, *, watch: bool) -> dict[str, Any]:
    """Run a script in a fresh copy of its checkout."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            checkouts / run.repository.replace("/", "+"),
            copy,
            ignore=shutil.ignore_patterns(".git"),
            symlinks=True,
        )
        script = copy / run.script
        place = copy if run.repository == "karpathy/nanoGPT" else script.parent
        run.prepare(place)
        digest, seen = Path(folder) / "digest", Path(folder) / "seen.json"
        watching = ["-m", "brimful", "run", "--output", str(seen)] if watch else []
        paths = [Path(__file__).parent / "site", Path(__file__).parents[2] / "src", copy, packages]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "RESULTS_DIGEST": str(digest),
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "Agg",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(folder) / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        began = time.perf_counter()
        try:
            name = script.name if place == script.parent else run.script
            done = subprocess.run(
                [sys.executable, *watching, name, *run.arguments.split()],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {
                "status": -1,
                "error": f"took more than {MOST_SECONDS} s",
                "seconds": 0.0,
                "digest": "0",
                "seen": None,
            }
        seconds = time.perf_counter() - began
        return {
            "status": done.returncode,
            "error": done.stderr.strip().splitlines()[-1:],
            "seconds": seconds,
            "digest": digest.read_text() if digest.exists() else "0",
            "seen": json.loads(seen.read_text()) if seen.exists() else None,
        }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran_rows = [row for row in rows if row["runs"]]
    findings = [each for row in ran_rows for each in row["findings"]]
    return {
        "scripts": len(ran_rows),
        "repositories": len({row["script"].split("/")[1] for row in ran_rows}),
        "results_equal": sum(row["results_equal"] for row in ran_rows),
        "results_that_do_not_repeat": sum(not row["results_repeat"] for row in ran_rows),
        "status_equal": sum(row["status_equal"] for row in ran_rows),
        "median_seconds_added": statistics.median(row["seconds_added"] for row in ran_rows),
        "most_seconds_added": max(row["seconds_added"] for row in ran_rows),
        "findings": len(findings),
        "findings_not_true": sum(each["why_not_true"] is not None for each in findings),
        "scripts_without_findings": sum(not row["findings"] for row in ran_rows),
    }


def main() -> None:
    """Run all or some, print a line for each, keep all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    rows = []
    for run in RUNS:
        if asked.names and not any(name in run.name for name in asked.names):
            continue
        row = ran(run, asked.checkouts.resolve(), asked.packages.resolve())
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = summary_of(rows)
    print(json.dumps(summary, indent=1))
    if not asked.names:
        keep("public_runs.json", COMMAND, {"summary": summary, "rows": rows}, "transformers", "lightning")


if __name__ == "__main__":
    main()
