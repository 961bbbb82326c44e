"""`brimful train TASK FILES`: from files to weights, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.command_line import brimful

pytest.importorskip("transformers")


def steps_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    import transformers

    for name, architecture in (("bert", transformers.BertConfig), ("llama", transformers.LlamaConfig)):
        config = architecture(
            vocab_size=264,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
        config.save_pretrained(tmp_path / name)
    return str(tmp_path)


def test_texts_are_classified_and_the_run_goes_on(tmp_path: Path, model: str) -> None:
    rows = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} {n}", "label": n % 2}) for n in range(48)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(rows))
    command = (
        "text-classification", "reviews.jsonl", "--model", "bert", "--tokenizer", "bytes", "--seq-len", "16",
        "--device", "cpu", "--global-batch-size", "8", "--epochs", "2",
    )  # fmt: skip
    whole = brimful(tmp_path, "train", *command, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stderr
    assert "accuracy" in whole.stdout
    assert json.loads((tmp_path / "whole" / "job.json").read_text())["classes"] == ["0", "1"]
    begun = brimful(tmp_path, "train", *command, "--run-dir", "parts", "--steps", "3")
    assert begun.returncode == 0, begun.stderr
    resumed = brimful(tmp_path, "train", *command, "--run-dir", "parts", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    other = brimful(tmp_path, "train", *command, "--run-dir", "parts", "--resume", "--balance-classes")
    assert other.returncode == 1
    assert "files or flags have changed" in other.stderr
    faster = brimful(tmp_path, "train", *command, "--run-dir", "parts", "--resume", "--learning-rate", "1")
    assert faster.returncode == 1
    assert "learning rates" in faster.stderr


def test_asking_for_another_adam_does_not_change_the_rate(tmp_path: Path, model: str) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be " * 40)
    done = brimful(
        tmp_path, "train", "language-model", "one.txt", "--model", "llama", "--tokenizer", "bytes",
        "--seq-len", "32", "--device", "cpu", "--steps", "1", "--global-batch-size", "4", "--optimizer", "adam",
        "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "llama from random weights" in done.stdout
    (save,) = (tmp_path / "run" / "saves").iterdir()
    state = torch.load(save / "state.pt", weights_only=True)
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [3e-4]


def test_a_task_is_planned_for_a_gpu_that_is_not_here(tmp_path: Path, model: str) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be " * 40)
    asked = "train language-model one.txt --model llama --tokenizer bytes --seq-len 32 --plan-only"
    planned = brimful(tmp_path, *asked.split(), "--device", "RTX 3090", "--budget", "4GiB", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["device"], plan["settings"]["micro_batch_size"]) == ("RTX 3090", 32)
    assert not (tmp_path / "runs").exists()
    assert not any("learning rate" in note for note in plan["notes"])
    contradicted = brimful(tmp_path, *asked.split(), "--resume", "--run-dir", "runs")
    assert contradicted.returncode == 2
    assert "--plan-only searches for a plan" in contradicted.stderr
    for followed in (("--live",), ("--live-port", "8888")):
        nothing = brimful(tmp_path, *asked.split(), *followed)
        assert nothing.returncode == 2
        assert "--plan-only trains nothing that the page of --live could follow" in nothing.stderr
        assert "live page" not in nothing.stderr
    (tmp_path / "plan.json").write_text(planned.stdout)
    assert brimful(tmp_path, "report", "plan.json").returncode == 0


def test_another_global_batch_leaves_the_learning_rate_and_says_what_scaling_gives(
    tmp_path: Path, model: str
) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be " * 40)
    asked = "train language-model one.txt --model llama --tokenizer bytes --seq-len 32 --plan-only --json"
    where = ("--device", "RTX 3090", "--budget", "4GiB", "--global-batch-size", "128")
    planned = brimful(tmp_path, *asked.split(), *where)
    assert planned.returncode == 0, planned.stderr
    (note,) = (note for note in json.loads(planned.stdout)["notes"] if "learning rate" in note)
    assert "stays at 0.0003, which the recipe has for global batches of 32; this one is of 128" in note
    assert "square root of the batch it would be 0.0006, scaled linearly 0.0012" in note
    for rate_of_another in (("--learning-rate", "1e-3"), ("--optimizer", "sgd")):
        chosen = brimful(tmp_path, *asked.split(), *where, *rate_of_another)
        assert chosen.returncode == 0, chosen.stderr
        assert not any("learning rate" in note for note in json.loads(chosen.stdout)["notes"])


def test_images_are_classified_with_every_flag(tmp_path: Path) -> None:
    for name, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40, 40), colour).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "red" / "broken.png").write_bytes(b"?")
    done = brimful(
        tmp_path, "train", "images", "photos", "--model", "resnet18", "--image-size", "33", "--no-augment",
        "--balance-classes", "--bad-samples", "skip", "--validation-fraction", "0.3", "--workers", "0",
        "--device", "cpu", "--global-batch-size", "8", "--steps", "1", "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: 1 of 13 samples" in done.stderr
    assert (
        "photos-resnet18: 8 training images, 4 validation images, 2 classes; resnet18 from random"
        in done.stdout
    )
    assert json.loads((tmp_path / "run" / "job.json").read_text())["classes"] == ["blue", "red"]


def test_a_recipe_suggests_only_what_it_has_flags_for(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / "pets" / name / f"{number}.png")
    asked = (
        "train", "images", "pets", "--model", "resnet18", "--image-size", "64", "--plan-only",
        "--global-batch-size", "256", "--device", "RTX 3090", "--memory-format", "preserve",
    )  # fmt: skip
    found = brimful(tmp_path, *asked, "--budget", "862MiB", "--json")
    assert found.returncode == 0, found.stderr
    flags = [each["flag"] for each in json.loads(found.stdout)["suggestions"]]
    assert flags == ["torchrun --nproc-per-node 2", "--precision bf16"]
    nothing = brimful(tmp_path, *asked, "--budget", "700MiB")
    assert nothing.returncode == 1
    assert "would fit: --precision bf16: " in nothing.stderr
    assert "--dtype" not in nothing.stderr
    assert "--world-size" not in nothing.stderr


def test_bad_rows_end_the_command_or_are_left_out(tmp_path: Path, model: str) -> None:
    rows = ["text,label"] + [f"text {n},{n % 2}" for n in range(24)] + [",1"]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    command = (
        "text-classification", "rows.csv", "--model", "bert", "--tokenizer", "bytes", "--seq-len", "16",
        "--device", "cpu", "--steps", "1", "--run-dir", "run",
    )  # fmt: skip
    refused = brimful(tmp_path, "train", *command)
    assert refused.returncode == 1
    assert "rows.csv:26: 'text': empty" in refused.stderr
    assert "--bad-samples skip" in refused.stderr
    skipped = brimful(tmp_path, "train", *command, "--bad-samples", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "warning: 1 of 25 samples" in skipped.stderr


def test_a_language_model_is_trained_on_several_files(tmp_path: Path, model: str) -> None:
    (tmp_path / "one.txt").write_text("to be or not to be " * 40)
    (tmp_path / "two.md").write_text("that is the question " * 40)
    done = brimful(
        tmp_path, "train", "language-model", "one.txt", "two.md", "--model", "llama", "--tokenizer", "bytes",
        "--seq-len", "32", "--device", "cpu", "--global-batch-size", "4", "--budget", "90%", "--run-dir", "run",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stopped_because"] == "finished"
    assert (tmp_path / "run" / "best.safetensors").exists()


def test_a_task_without_its_files_says_what_is_missing(tmp_path: Path) -> None:
    done = brimful(tmp_path, "train", "images", "nowhere")
    assert done.returncode == 2
    assert "no folder nowhere" in done.stderr
    done = brimful(tmp_path, "train", "image", "nowhere")
    assert done.returncode == 2
    assert "Meant is perhaps 'images'" in done.stderr
    done = brimful(tmp_path, "train", "token-classification", "news.conll", "--model", "bert")
    assert done.returncode == 2
    assert "examples/named_entities.py trains it with a plan in Transformers' Trainer" in done.stderr


def test_images_are_trained_in_the_faster_format_unless_told_otherwise(tmp_path: Path) -> None:
    """On a GPU in half precision that is channels_last."""
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / "pets" / name / f"{number}.png")
    asked = (
        "train", "images", "pets", "--model", "resnet18", "--image-size", "224", "--plan-only", "--json",
        "--global-batch-size", "64",
        "--device", "RTX 3090", "--precision", "bf16",
    )  # fmt: skip
    formats = []
    for others in ((), ("--memory-format", "preserve")):
        done = brimful(tmp_path, *asked, *others)
        assert done.returncode == 0, done.stderr
        formats.append(json.loads(done.stdout)["settings"].get("memory_format"))
    assert formats == ["channels_last", None]


def test_adapters_over_quantised_weights_are_trained_and_merged(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "one.txt").write_text("to be or not to be " * 40)
    command = (
        "train", "language-model", "one.txt", "--model", "llama", "--tokenizer", "bytes", "--seq-len", "32",
        "--device", "cpu", "--steps", "2", "--global-batch-size", "4",
    )  # fmt: skip
    done = brimful(
        tmp_path, *command, "--lora", "r=4", "--quantize", "nf4", "--merge-adapters", "--run-dir", "run"
    )
    assert done.returncode == 0, done.stderr
    assert "LoRA r=4,alpha=8,dropout=0 over nf4" in done.stdout
    assert peft.PeftConfig.from_pretrained(tmp_path / "run" / "pretrained").r == 4
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged")
    assert all(parameter.isfinite().all() for parameter in merged.parameters())
    whole = brimful(tmp_path, *command, "--merge-adapters")
    assert whole.returncode == 2
    assert "--merge-adapters needs --lora" in whole.stderr
