"""LoRA over frozen, possibly quantised weights, in recipes on texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.errors import UnknownNameError, UsageError
from brimful.models.adapters import QUANTIZATIONS, LoraOptions, quantise_linear_layers
from brimful.recipes import language_model, save_pretrained, text_classification

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6",  # peft's calls of transformers
    "ignore:.*start from random weights",  # new heads
)

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pretrained models, as transformers saves them, and texts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder / "llama")
    transformers.DistilBertModel(
        transformers.DistilBertConfig(vocab_size=264, dim=64, n_layers=2, n_heads=2, hidden_dim=128)
    ).save_pretrained(folder / "distilbert")
    (folder / "book.txt").write_text("to be or not to be " * 60)
    rows = [f'"a {"good" if n % 2 else "bad"} film {n}",{n % 2}' for n in range(48)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]))
    return folder


def job_of(models: Path, task: str, **options: Any) -> bf.Job:
    if task == "language-model":
        return language_model(
            models / "book.txt", model=models / "llama", tokenizer="bytes", sequence_length=16, **options
        )
    return text_classification(
        models / "reviews.csv", model=models / "distilbert", tokenizer="bytes", sequence_length=16, **options
    )


def train(job: bf.Job, run: Path, steps: int, **options: Any) -> list[float]:
    settings = bf.Settings(micro_batch_size=8, gradient_accumulation_steps=2)
    result, _ = bf.fit(job, settings, device="cpu", run_dir=run, steps=steps, show_progress=False, **options)
    return list(result.losses)


def test_options_are_read_and_written() -> None:
    options = LoraOptions.parse("r=16, alpha=32,dropout=0.05,targets=q_proj+v_proj")
    assert options == LoraOptions(r=16, alpha=32, dropout=0.05, targets=("q_proj", "v_proj"))
    assert LoraOptions.parse(str(options)) == options
    assert LoraOptions.parse("") == LoraOptions()


@pytest.mark.parametrize(
    "text",
    ["16", "rank=16", "r=0", "r=1.5", "r=", "r=4,r=8", "dropout=1", "alpha=-1", "alpha=inf", "alpha=nan"],
)
def test_options_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--lora"):
        LoraOptions.parse(text)


@pytest.mark.parametrize("task", ["language-model", "text-classification"])
def test_only_adapters_and_a_head_are_trained(models: Path, task: str) -> None:
    job = job_of(models, task, lora="r=4", quantize="nf4")
    assert callable(job.model)
    model = job.model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    heads = ("modules_to_save.default",)  # DistilBERT's "pre_classifier" is new too
    assert all("lora_" in name or any(head in name for head in heads) for name in trained)
    assert any("pre_classifier.modules_to_save" in name for name in trained) == (task == "text-classification")
    quantised = {name for name, layer in model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}
    assert quantised
    assert not any("classifier" in name or "lm_head" in name for name in quantised)


@pytest.mark.sweep
@pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
@pytest.mark.parametrize("quantize", list(QUANTIZATIONS))
@pytest.mark.parametrize("task", ["language-model", "text-classification"])
def test_predictions_are_the_same_without_the_library(
    models: Path, task: str, quantize: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted() -> tuple[object, ...]:
        job = job_of(models, task, lora="r=4,dropout=0.1", quantize=quantize)
        result = bf.estimate(job, device, micro_batch_size=8, precision="bf16")
        return (
            result.predicted_peak_allocated_bytes,
            result.predicted_device_interval_bytes,
            result.predicted_step_seconds,
            result.parameter_count,
            result.trainable_parameter_count,
        )

    with_it = predicted()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert predicted() == with_it
    job = job_of(models, task, lora="r=4", quantize=quantize)
    estimate = bf.estimate(job, device, micro_batch_size=8)
    if (quantize, device) != ("int8", "cpu"):  # which runs ops of torch alone
        assert any("bitsandbytes is not installed" in reason for reason in estimate.uncertain)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_layers_that_predict_refuse_real_inputs(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    quantise_linear_layers(model, quantize)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        model.to_empty(device="cpu")(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_training_without_the_library_says_what_to_install(
    models: Path, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    job = job_of(models, "language-model", lora="r=4", quantize=quantize)
    with pytest.raises(UsageError, match=f"--quantize {quantize} install bitsandbytes: pip install"):
        train(job, tmp_path / "run", 1)


@pytest.mark.sweep
@pytest.mark.parametrize("quantize", [None, "nf4-dq", "int8"])
@pytest.mark.parametrize("task", ["language-model", "text-classification"])
def test_a_resumed_run_is_the_uninterrupted_one(
    models: Path, task: str, quantize: str | None, tmp_path: Path
) -> None:
    job = job_of(models, task, lora="r=4", quantize=quantize)
    whole = train(job, tmp_path / "whole", 4)
    train(job, tmp_path / "parts", 2)
    torch.manual_seed(5)
    assert train(job, tmp_path / "parts", 4, resume=True) == whole


def test_resuming_restores_the_scales_of_weights_that_were_built_otherwise(
    models: Path, tmp_path: Path
) -> None:
    """The weights of a model that is resumed are not loaded again, so that its scales are of random weights."""
    job = job_of(models, "language-model", lora="r=4", quantize="nf4-dq")
    train(job, tmp_path / "run", 2)
    assert callable(job.model)
    model, loaded = job.model(), job.model()
    assert job.weights is not None
    job.weights(model)
    bf.trainer.load_weights(loaded, tmp_path / "run")

    def scales(of: Any) -> list[Tensor]:
        layers = [layer for layer in of.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]
        assert all(layer.quant_state is layer.weight.quant_state for layer in layers)
        return [
            tensor
            for layer in layers
            for tensor in (layer.quant_state.absmax, layer.quant_state.offset, layer.quant_state.state2.absmax)
        ]

    assert all(map(torch.equal, scales(loaded), scales(model)))
    assert not all(map(torch.equal, scales(job.model()), scales(model)))


@pytest.mark.parametrize("quantize", [None, "nf4-dq", "int8"])
@pytest.mark.parametrize("task", ["language-model", "text-classification"])
def test_adapters_are_loaded_by_peft_and_merged_weights_by_transformers(
    models: Path, task: str, quantize: str | None, tmp_path: Path
) -> None:
    train(job_of(models, task, lora="r=4,alpha=16", quantize=quantize), tmp_path / "run", 2)
    adapters = save_pretrained(tmp_path / "run")
    merged = save_pretrained(tmp_path / "run", tmp_path / "merged", merge=True)
    classes = (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification)
    made = classes[task == "text-classification"]
    base = made.from_pretrained(models / ("llama" if task == "language-model" else "distilbert"))
    tokens = torch.randint(3, 264, (2, 16))
    with torch.no_grad():
        before = base.eval()(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, adapters).eval()(tokens).logits
        whole = made.from_pretrained(merged).eval()(tokens).logits
    torch.testing.assert_close(whole, adapted, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(before, adapted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantised_layers_compute_what_the_others_do_up_to_their_rounding(
    family: str, quantization: str
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES if family == "llama" else {"n_embd": 64}))
    if family == "gpt2":  # its linear layers have transposed weights
        config.n_layer, config.n_head, config.vocab_size = 2, 2, 264
        config.bos_token_id = config.eos_token_id = 1
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(3, 264, (2, 16))
    with torch.no_grad():
        expected = model(tokens).logits
        quantise_linear_layers(model, quantization)
        found = model.train()(tokens).logits  # not packed for evaluation
    layers = [name for name, each in model.named_modules() if type(each).__module__.startswith("bitsandbytes")]
    assert len(layers) == (14 if family == "llama" else 8)
    assert 0 < (found - expected).norm() / expected.norm() < (0.02 if quantization == "int8" else 0.2)


def test_what_cannot_be_adapted_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"leaves nothing to train\. Add --lora"):
        job_of(models, "language-model", quantize="nf4")
    with pytest.raises(UnknownNameError, match="nf4"):
        job_of(models, "language-model", lora="r=4", quantize="nf")
    job = job_of(models, "language-model", lora="targets=query")
    assert callable(job.model)
    with pytest.raises(UsageError, match="The linear layers are down_proj, gate_proj, k_proj"):
        job.model()
    train(job_of(models, "language-model"), tmp_path / "run", 2)
    with pytest.raises(UsageError, match="no adapters to merge"):
        save_pretrained(tmp_path / "run", merge=True)
    with pytest.raises(UsageError, match="is not the run of a recipe"):
        save_pretrained(tmp_path / "nothing")


def test_the_peak_of_adapters_over_quantised_weights_is_as_planned(models: Path) -> None:
    job = job_of(models, "language-model", lora="r=4", quantize="nf4")
    predicted = bf.estimate(job, "cpu", micro_batch_size=8).predicted_peak_allocated_bytes
    measured = bf.measure(job, bf.Settings(micro_batch_size=8), device="cpu").measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=1e-3)


def test_modules_outside_of_linear_layers_stay(models: Path) -> None:
    job = job_of(models, "language-model", lora="r=4", quantize="int8")
    assert callable(job.model)
    assert any(isinstance(layer, nn.Embedding) for layer in job.model().modules())
