"""The snippets of docs/howto/weights.md run as pasted, on runs of each ready task."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import brimful as bf
from brimful import recipes
from brimful.job import Job
from brimful.recipes import image_classification, language_model, text_classification
from brimful.trainer.storage.weights import read_tensors

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "weights.md"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "very"]


def snippet(heading: str) -> str:
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def train(job: Job, run: str) -> None:
    bf.fit(job, bf.Settings(micro_batch_size=4), run_dir=run, steps=2, show_progress=False)


def save_pretrained(directory: str, config: Any, make: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    make(config).save_pretrained(directory)


def test_a_job_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_job.py").write_text(
        "import brimful as bf, torch\n"
        "x = torch.randn(8, 4)\n"
        "job = bf.Job(model=lambda: torch.nn.Linear(4, 1), loss=lambda model, x: model(x).square().mean(),\n"
        "             batch=x, data=lambda: bf.Data(train=x))\n"
    )
    monkeypatch.syspath_prepend(".")
    from my_job import job

    train(job, "runs/a")
    names: dict[str, Any] = {}
    exec(snippet("Your own job"), names)
    saved = read_tensors("runs/a/weights.safetensors")
    assert torch.equal(names["model"].weight, saved["weight"])


@pytest.mark.slow
def test_images() -> None:
    noise = np.random.default_rng(0)
    for folder in (Path(part, name) for part in ("train", "val") for name in ("blue", "red")):
        Path("photos", folder).mkdir(parents=True)
        for number in range(3):
            pixels = noise.integers(0, 255, (48, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(Path("photos", folder, f"{number}.png"))
    job = image_classification("photos", model="resnet18", image_size=40, workers=0)
    train(job, "runs/photos")
    validated = next(iter(job.data().validation))
    shutil.copy(
        "photos/val/blue/0.png", "photo.jpg"
    )  # the first, so that what the snippet sees can be compared
    names: dict[str, Any] = {}
    exec(snippet("Images"), names)
    torch.testing.assert_close(names["pixels"], validated["images"][0])


@pytest.mark.slow
def test_texts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    save_pretrained("bert", config, transformers.BertModel)
    rows = "".join(f"a very {word} film,{word}\n" for word in ("good", "bad") * 8)
    Path("reviews.csv").write_text(f"text,label\n{rows}")
    with pytest.warns(UserWarning, match="start from random"):
        train(text_classification("reviews.csv", model="bert", sequence_length=16), "runs/reviews")
    names: dict[str, Any] = {}
    exec(snippet("Text classification"), names)
    assert str(names["classify"]("a very good film")) in capsys.readouterr().out
    saved = read_tensors("runs/reviews/best.safetensors")
    assert torch.equal(names["classify"].model.classifier.weight, saved["classifier.weight"])
    assert names["classify"].model.config.id2label == {0: "bad", 1: "good"}


def test_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    save_pretrained("llama", config, transformers.LlamaForCausalLM)
    Path("book.txt").write_text("a very good film a very bad film " * 40)
    train(language_model("book.txt", model="llama", sequence_length=8), "runs/book")
    names: dict[str, Any] = {}
    exec(snippet("Language models"), names)
    assert "a very" in capsys.readouterr().out
    saved = read_tensors("runs/book/best.safetensors")
    assert saved.keys() == names["model"].state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in names["model"].state_dict().items())


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")  # of peft's calls
def test_adapters() -> None:
    pytest.importorskip("peft")
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    save_pretrained("llama", config, transformers.LlamaForCausalLM)
    Path("book.txt").write_text("a very good film a very bad film " * 40)
    train(language_model("book.txt", model="llama", sequence_length=8, lora="r=2"), "runs/adapted")
    names: dict[str, Any] = {}
    exec(snippet("Adapters"), names)
    tokens = torch.tensor([[4, 6, 7, 8]])
    with torch.no_grad():
        adapted, merged = (names[name].eval()(tokens).logits for name in ("adapted", "merged"))
    torch.testing.assert_close(adapted, merged)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")  # of peft's calls
def test_adapters_of_classifiers(capsys: pytest.CaptureFixture[str]) -> None:
    """Over a model whose files have no pooler."""
    pytest.importorskip("peft")
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    save_pretrained("bert", config, transformers.BertForMaskedLM)
    rows = "".join(f"a very {word} film,{word}\n" for word in ("good", "bad", "very") * 8)
    Path("reviews.csv").write_text(f"text,label\n{rows}")
    job = text_classification("reviews.csv", model="bert", sequence_length=16, lora="r=2")
    with pytest.warns(UserWarning, match="start from random"):
        train(job, "runs/adapted-reviews")
    names: dict[str, Any] = {}
    exec(snippet("Adapters of classifiers"), names)
    assert capsys.readouterr().out.splitlines()[-1] in names["classes"]
    merged = recipes.save_pretrained("runs/adapted-reviews", "merged", merge=True)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(merged).eval()
    torch.testing.assert_close(names["model"](**names["tokens"]).logits, whole(**names["tokens"]).logits)
