"""Models by the name they are published under, with the libraries' own code, offline."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful as bf
from brimful.cli.models import models_text
from brimful.errors import UnknownNameError, UsageError
from brimful.models.hub import hub_job, known_model, known_models

transformers = pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "use_cache": True,  # as in most files of the Hub
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
    },
    "RobertaForMaskedLM": {
        "model_type": "roberta",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 34,
        "pad_token_id": 1,
    },
    "BertForSequenceClassification": {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "num_labels": 3,
    },
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 100,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "WhisperForConditionalGeneration": {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 100,
        "max_source_positions": 50,
        "max_target_positions": 20,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 50,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "max_position_embeddings": 256,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "ViTForImageClassification": {
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    },
    **{
        kind: {
            "model_type": model_type,
            "projection_dim": 32,
            "text_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "vocab_size": 100,
                "max_position_embeddings": 16,
                "eos_token_id": 99,
                "bos_token_id": 98,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "image_size": 32,
                "patch_size": 8,
            },
        }
        for kind, model_type in (("CLIPModel", "clip"), ("SiglipModel", "siglip"))
    },
}


@pytest.fixture
def configuration(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": [request.param], **SMALL[request.param]}))
    return file


@pytest.mark.parametrize("configuration", SMALL, indirect=True)
def test_a_local_configuration_is_estimated_and_measured_as_any_job(configuration: Path) -> None:
    """From its file and from its directory, the same; and a real step takes what is predicted."""
    of_file, of_directory = (bf.find_architecture(str(path)) for path in (configuration, configuration.parent))
    predicted = [
        bf.estimate(job, "cpu", micro_batch_size=4).predicted_peak_allocated_bytes
        for job in (of_file, of_directory)
    ]
    assert predicted[0] == predicted[1]
    measured = bf.measure(of_file, bf.Settings(micro_batch_size=4), "cpu")
    assert measured.measured_peak_allocated_bytes == pytest.approx(predicted[0], rel=0.01)


@pytest.mark.parametrize("configuration", ["CLIPModel", "SiglipModel"], indirect=True)
def test_the_loss_of_images_and_texts_is_that_of_the_library(configuration: Path) -> None:
    job = bf.find_architecture(str(configuration))
    assert callable(job.model)
    assert callable(job.batch)
    assert job.embed is not None
    model, batch = job.model(), job.batch(5)
    own: torch.Tensor = model(**batch, return_loss=True).loss
    torch.testing.assert_close(job.loss(job.embed(model, batch)), own)


@pytest.mark.parametrize("configuration", ["LlamaForCausalLM"], indirect=True)
def test_options_change_the_model_and_its_batch(configuration: Path) -> None:
    job = bf.find_architecture(
        str(configuration), sequence_length=16, num_hidden_layers=1, dtype="bf16", lora="r=4"
    )
    assert callable(job.model)
    assert callable(job.batch)
    assert job.batch(3)["input_ids"].shape == (3, 16)
    names = dict(job.model().named_parameters())
    assert any("lora_A" in name for name in names)
    assert not any("layers.1." in name for name in names)
    with pytest.raises(UsageError, match="sequence_length"):
        bf.find_architecture(str(configuration), sequence_length=65)


@pytest.mark.parametrize(
    "configuration",
    ["LlamaForCausalLM", "RobertaForMaskedLM", "ViTForImageClassification"],
    indirect=True,
)
def test_a_wider_model_keeps_the_size_of_a_head_and_its_proportions(configuration: Path) -> None:
    config = json.loads(configuration.read_text())
    wider = bf.find_architecture(str(configuration), hidden_size=2 * config["hidden_size"], num_hidden_layers=3)
    assert callable(wider.model)
    made = wider.model().config
    assert made.num_hidden_layers == 3
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if name in config:
            assert getattr(made, name) == 2 * config[name]
    with pytest.raises(UsageError, match="a multiple of"):
        bf.find_architecture(str(configuration), hidden_size=config["hidden_size"] + 1)


def test_a_width_that_is_not_one_number_is_refused() -> None:
    for name, option in {
        "deepseek-ai/DeepSeek-V2-Lite": "hidden_size",
        "microsoft/swin-tiny-patch4-window7-224": "num_hidden_layers",
    }.items():
        with pytest.raises(UsageError, match=f"takes no {option}"):
            bf.find_architecture(name, **{option: 512})


def test_known_names_have_the_published_number_of_parameters() -> None:
    """All of them: benchmarks/models_by_name.py."""
    for name in ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "google/gemma-3-270m"):
        published = known_models()[name].parameter_count
        job = bf.find_architecture(name)
        assert bf.estimate(job, "H100 SXM", micro_batch_size=1).parameter_count == published


@pytest.mark.parametrize("configuration", ["LlavaForConditionalGeneration"], indirect=True)
def test_the_image_encoder_of_llava_is_frozen_and_its_tokens_are_not_predicted(configuration: Path) -> None:
    for lora in (None, "r=2"):
        job = bf.find_architecture(str(configuration), lora=lora)
        assert callable(job.model)
        trained = [name for name, each in job.model().named_parameters() if each.requires_grad]
        assert trained
        assert not any("vision_tower" in name for name in trained)
    by_name = bf.find_architecture(str(configuration), lora="r=2,targets=q_proj")
    assert callable(by_name.model)
    assert any("vision_tower" in name and "lora" in name for name, _ in by_name.model().named_parameters())
    assert callable(job.batch)
    batch = job.batch(3)
    is_image = batch["input_ids"] == 50
    assert is_image.sum(1).tolist() == [16] * 3  # patches of 8 in 32 pixels
    assert torch.equal(is_image, batch["labels"] == -100)
    with pytest.raises(UsageError, match="sequence_length"):
        bf.find_architecture(str(configuration), sequence_length=17)


def test_a_name_is_known_by_its_last_part_in_any_case() -> None:
    assert known_model("qwen2.5-0.5b") is known_models()["Qwen/Qwen2.5-0.5B"]
    assert len(known_models()) >= 100
    assert known_model("no such model") is None
    assert hub_job("resnet9000") is None
    with pytest.raises(UnknownNameError, match=r"Nearest: Qwen3-8B.*brimful models"):
        bf.find_architecture("qwen3-9b")


def test_the_list_of_models_shows_parameters_in_three_digits() -> None:
    shown = models_text("gemma-3-")
    assert re.search(r"gemma-3-270m +268M  ", shown)
    assert re.search(r"gemma-3-1b-pt +1B  ", shown)  # of 999,885,952


def test_a_directory_with_the_name_of_a_known_model_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], **SMALL["LlamaForCausalLM"]}
    (tmp_path / "qwen3-8b" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"Write \./qwen3-8b for the directory"):
        bf.find_architecture("qwen3-8b")
    assert bf.estimate(bf.find_architecture("./qwen3-8b"), "cpu", micro_batch_size=1).parameter_count < 1e6


@pytest.mark.parametrize("configuration", SMALL, indirect=True)
def test_any_class_is_predicted_in_bf16_and_with_adapters_that_all_train(configuration: Path) -> None:
    half = bf.find_architecture(str(configuration), dtype="bf16")
    assert bf.estimate(half, "cpu", micro_batch_size=2).parameter_count > 0
    job = bf.find_architecture(str(configuration), lora="r=2")
    adapted = bf.estimate(job, "cpu", micro_batch_size=2)
    assert 0 < adapted.trainable_parameter_count < adapted.parameter_count
    assert callable(job.model)
    assert callable(job.batch)
    model, batch = job.model(), job.batch(2)
    loss: Any = job.loss(model, batch) if job.embed is None else job.loss(job.embed(model, batch))
    loss.backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "--quantize nf4"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "whose inputs are not known here"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SMALL["LlamaForCausalLM"], **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        bf.find_architecture(str(tmp_path))


def test_the_loss_of_gpt2_is_named_where_its_class_does_not_name_it(tmp_path: Path) -> None:
    """Transformers warns on each start where it has to guess."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 32}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bf.find_architecture(str(tmp_path)).model().loss_type == "ForCausalLM"


@pytest.mark.parametrize("path", ["examples/digits.yaml", "models/net.pt", "here/model"])
def test_paths_are_not_asked_of_the_network(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no file or directory"):
        bf.find_architecture(path)


def test_without_a_network_the_error_says_which_file_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"hf download no-such/model-at-all config\.json(?!.*Nearest)"):
        bf.find_architecture("no-such/model-at-all")
    with pytest.raises(UsageError, match=r"Nearest: Qwen/Qwen2\.5-0\.5B, "):
        bf.find_architecture("qwen/Qwen2.5-0.5Bx")
    with pytest.raises(UsageError, match=r"there is no file or directory '/no/such/place'"):
        bf.find_architecture("/no/such/place")


def test_the_first_question_of_a_process_may_be_for_a_model_of_the_hub() -> None:
    code = "import brimful as bf; bf.find_architecture('no-such/model-at-all')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "UsageError: config.json of no-such/model-at-all" in run.stderr


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    """`auto_map` names a module beside the configuration; the library's own class is taken."""
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')")
    config = {"architectures": ["LlamaForCausalLM"], **SMALL["LlamaForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bf.estimate(bf.find_architecture(str(tmp_path)), "cpu", micro_batch_size=1).parameter_count > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "JSON"),
        ('{"model_type": "bert"}', "names no architecture"),
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "a job is known for"),
        (
            '{"model_type": "no-such", "architectures": ["NoSuchForCausalLM"]}',
            "does not have. Its own code is not run",
        ),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "x"}',
            "cannot read the configuration",
        ),
        ('{"_class_name": "AutoencoderKL"}', "UNet2DConditionModel"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(bf.BrimfulError, match=message):
        bf.find_architecture(str(file))


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        bf.find_architecture(str(tmp_path))


UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
}
SMALL_PIPELINES: dict[str, dict[str, Any]] = {
    "Stable Diffusion": UNET,
    "SDXL": {
        **UNET,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + 10,
    },
    "FLUX": {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 8,
        "axes_dims_rope": [2, 2, 4],
        "guidance_embeds": True,
    },
}


@pytest.fixture
def pipeline(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of a pipeline of diffusers."""
    config = SMALL_PIPELINES[request.param]
    part = tmp_path / ("transformer" if request.param == "FLUX" else "unet")
    part.mkdir()
    (part / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("pipeline", SMALL_PIPELINES, indirect=True)
@pytest.mark.parametrize("lora", [None, "r=2"])
def test_a_pipeline_of_diffusers_is_its_denoising_network(pipeline: Path, lora: str | None) -> None:
    """With adapters, the layers that diffusers' examples adapt are trained, and no other."""
    diffusers = pytest.importorskip("diffusers")
    job = bf.find_architecture(str(pipeline), image_size=64, lora=lora)
    predicted = bf.estimate(job, "cpu", micro_batch_size=2)
    measured = bf.measure(job, bf.Settings(micro_batch_size=2), "cpu")
    assert measured.measured_peak_allocated_bytes == pytest.approx(
        predicted.predicted_peak_allocated_bytes, rel=0.01
    )
    assert callable(job.model)
    trained = [name for name, each in job.model().named_parameters() if each.requires_grad]
    if lora is None:
        assert predicted.trainable_parameter_count == predicted.parameter_count
    else:
        layers = {"to_q", "to_k", "to_v", "to_out.0"}
        if isinstance(job.model(), diffusers.FluxTransformer2DModel):
            layers |= {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
            layers |= {f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("net.0.proj", "net.2")}
        assert {re.sub(r".*attn\w*\.|.*_blocks\.\d+\.|\.default\.weight", "", name) for name in trained} == {
            f"{layer}.lora_{half}" for layer in layers for half in "AB"
        }
    with pytest.raises(UsageError, match="a multiple of"):
        bf.find_architecture(str(pipeline), image_size=100)


@pytest.mark.parametrize("pipeline", ["SDXL"], indirect=True)
def test_adapters_of_diffusers_are_not_quantised_and_have_targets(pipeline: Path) -> None:
    pytest.importorskip("diffusers")
    for options, message in (
        ({"lora": "r=2", "quantize": "nf4"}, "models of transformers with --quantize"),
        ({"lora": "r=2,targets=q_proj"}, "The linear layers are .*to_q"),
    ):
        with pytest.raises(UsageError, match=message):
            bf.estimate(bf.find_architecture(str(pipeline), **options), "cpu", micro_batch_size=1)


@pytest.mark.parametrize("pipeline", ["FLUX"], indirect=True)
def test_the_loss_of_flux_is_that_of_the_examples_of_diffusers(pipeline: Path) -> None:
    """Of the pipeline's own packing and places, on latents that are not square patches of noise."""
    diffusers = pytest.importorskip("diffusers")
    job = bf.find_architecture(str(pipeline), image_size=64)
    assert callable(job.model)
    assert callable(job.batch)
    model, batch = job.model(), job.batch(2)
    own = diffusers.FluxPipeline
    latents = torch.randn(2, 4, 8, 8)  # (B, C, H, W), of images of 64 pixels
    batch["hidden_states"] = own._pack_latents(latents, 2, 4, 8, 8)
    target = torch.randn(2, 4, 8, 8)
    batch["flow"] = own._pack_latents(target, 2, 4, 8, 8)
    text = batch["encoder_hidden_states"]
    predicted = model(
        hidden_states=batch["hidden_states"],
        timestep=batch["timestep"],
        guidance=batch["guidance"],
        pooled_projections=batch["pooled_projections"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=own._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
        return_dict=False,
    )[0]
    unpacked = own._unpack_latents(predicted, height=64, width=64, vae_scale_factor=8)
    torch.testing.assert_close(job.loss(model, batch), ((unpacked - target) ** 2).mean())


def test_a_pipeline_of_the_hub_is_read_where_its_network_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no config.json of its own."""
    from huggingface_hub.errors import EntryNotFoundError

    def download(_name: str, file: str) -> str:
        if file != "unet/config.json":
            raise EntryNotFoundError(file)
        (tmp_path / "config.json").write_text(json.dumps(UNET))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert callable(bf.find_architecture("someone/pipeline").batch)


def test_the_reason_of_a_failed_download_is_not_that_another_file_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    def download(_name: str, file: str) -> str:
        raise EntryNotFoundError(file) if file == "config.json" else PermissionError("access is restricted")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(UsageError, match="downloaded: access is restricted"):
        bf.find_architecture("someone/pipeline")


def test_timm_builds_its_own(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    job = bf.find_architecture("timm/resnet18", image_size=64, num_classes=7)
    assert bf.estimate(job, "cpu", micro_batch_size=2).parameter_count > 11_000_000
    for name, options, message in (
        ("timm/resnet18x", {}, "no model 'resnet18x'. Near: resnet18"),
        ("timm/resnet18.no_such_weights", {}, r"no model .*Near: resnet18\."),
        ("timm/resnet18", {"num_classes": 0}, "num_classes"),
        ("timm/resnet18", {"image_size": 0}, "image_size"),
    ):
        with pytest.raises(UsageError, match=message):
            bf.find_architecture(name, **options)
