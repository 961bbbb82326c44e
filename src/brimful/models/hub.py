"""Models by the name they are published under: of transformers, timm and diffusers, with random weights.

A name is one of `known_models()`, a local directory or `config.json`, `timm/NAME`, or the id of a model on the
Hugging Face Hub, of which only `config.json` is read: from the local cache, or from the network where there is
one. The libraries' own code builds the model from it; code that a repository brings is never run. What is
trained follows from the class of the model: `_KINDS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.codec import parse_json, read_regular_file
from brimful.errors import UsageError, nearest_names
from brimful.job import Batch, Job
from brimful.models.checks import check_range, checked_size
from brimful.models.huggingface import attention, import_transformers, own_loss, set_causal_loss
from brimful.models.resized import resized
from brimful.utils.files import is_directory, is_file

# B samples, T tokens, C channels, H height, W width, M mel bins

_CONFIG_BYTES = 4 << 20
"""Largest `config.json` that is read. A choice: the largest on the Hub have some 100 KB, lists of labels."""

_PARTS_OF_PIPELINES = ("unet", "transformer")
"""Folders of the network that is trained in a pipeline of diffusers."""

_USUAL_TOKENS = {"causal": 2048, "other": 512}
"""Default tokens of a sample, where a model has as many positions."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model whose configuration is in the package."""

    name: str
    """Its id on the Hub."""
    parameter_count: int | None
    """As published; None if it is not on record."""
    config: Mapping[str, Any]
    """As in its `config.json`, where it differs from the defaults of its class."""

    @property
    def architecture(self) -> str:
        """The class of the model."""
        return str(
            self.config["_class_name"] if "_class_name" in self.config else self.config["architectures"][0]
        )


@cache
def known_models() -> Mapping[str, PublishedModel]:
    """Models whose configuration is in the package, by id."""
    table = json.loads(files("brimful.data").joinpath("models.json").read_text(encoding="utf-8"))
    return {
        name: PublishedModel(name, config.pop("parameters", None), config) for name, config in table.items()
    }


def known_model(name: str) -> PublishedModel | None:
    """The known model with an id, or whose id ends in a name, in any case; None if there is none."""
    wanted = name.lower()
    for each in known_models().values():
        if wanted in (each.name.lower(), each.name.rpartition("/")[2].lower()):
            return each
    return None


def hub_job(name: str) -> Callable[..., Job] | None:
    """What makes the job of a model from its options; None if the name is not that of one.

    UsageError if it is, and its configuration cannot be read, is of no kind that is known here, or its library
    is not installed.
    """
    if name.startswith("timm/"):
        return _timm_job(name)
    path = Path(name)
    if (known := known_model(name)) is not None:
        if is_file(path / "config.json"):
            raise UsageError(
                f"{name!r} is both a known model and a directory here. Write ./{name} for the directory, or "
                "begin elsewhere for the model."
            )
        return _job_of_config(name, dict(known.config))
    if is_file(path) and path.suffix == ".json":
        return _job_of_config(path.resolve().parent.name, _read(path))
    if is_directory(path):
        return _job_of_directory(path.resolve().name, path)
    return _job_of_config(name, _read(_from_hub(name))) if _may_be_id(name) else None


def _may_be_id(name: str) -> bool:
    """Whether a name has the form of an id on the Hub and is not a path, of which no network is asked."""
    has_form = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
    return has_form and not is_directory(Path(name).parent) and not _has_ending_of_files(name)


def is_path(name: str) -> bool:
    """Whether a name has folders, or an ending of files, which no model's name has."""
    return "/" in name or "\\" in name or _has_ending_of_files(name)


def _has_ending_of_files(name: str) -> bool:
    return Path(name).suffix.lower() in _OF_FILES


_OF_FILES = frozenset(
    (
        *(".py", ".json", ".yaml", ".yml", ".toml", ".txt", ".md", ".csv", ".ipynb", ".cfg"),
        *(".ini", ".log", ".pickle", ".pkl", ".sh"),
        *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".onnx", ".gguf"),
    )
)


def _from_hub(name: str) -> Path:
    """The file `config.json` of an id, in the cache of the Hub's library, which downloads it if it can.

    A pipeline of diffusers has none of its own: that of the network that is trained.
    """
    library = _library_of_hub(name)
    missing, not_cached = library.errors.EntryNotFoundError, library.errors.LocalEntryNotFoundError
    failure: Exception | None = None
    for file in ("config.json", *(f"{part}/config.json" for part in _PARTS_OF_PIPELINES)):
        try:
            return Path(library.hf_hub_download(name, file))
        except not_cached as error:  # without a network, it is not in the cache
            failure = error
        except missing as error:  # the repository has no such file
            failure = failure or error
        except Exception as error:  # the library has errors of several packages
            failure = error
            break
    reason = str(failure).strip().splitlines() or [type(failure).__name__]
    raise UsageError(
        f"config.json of {name} is neither in the local cache of the Hugging Face Hub nor could it be "
        f"downloaded: {reason[0]} Where there is a network: hf download {name} config.json, of a pipeline of "
        "diffusers unet/config.json or transformer/config.json; then give that file in place of the name. "
        f"{_nearest(name)}`brimful models` lists those that are known without it."
    ) from failure


def hub_directory(name: str) -> Path | None:
    """The directory of a model on the Hub with its weights and tokenizer; None if the name is not that of one.

    It is in the cache of the Hub's library, which downloads it if it can; code and pickles are not. UsageError
    if it cannot be had.
    """
    if not _may_be_id(name):
        return None
    library = _library_of_hub(name)
    try:
        return Path(library.snapshot_download(name, allow_patterns=_WEIGHTS_AND_TOKENIZER))
    except Exception as error:  # the library has errors of several packages
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"the weights and the tokenizer of {name} are neither in the local cache of the Hugging Face Hub "
            f"nor could they be downloaded: {reason[0]} Where there is a network: hf download {name}; then "
            f"give that directory in place of the name. {_nearest(name)}".rstrip()
        ) from error


_WEIGHTS_AND_TOKENIZER = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def _library_of_hub(name: str) -> Any:
    try:
        import huggingface_hub.errors  # which the package alone does not import
    except ImportError as error:
        raise UsageError(
            f"{name} may be a model of the Hugging Face Hub, whose library is not installed: pip install "
            "transformers. Or give its config.json, or a directory that has one."
        ) from error
    return huggingface_hub


def _nearest(name: str) -> str:
    """The names in the package that are like a name, as a sentence; nothing if none is, or it is one."""
    near = [] if known_model(name) else nearest_names(name, known_models(), likeness=0.6)
    return f"Nearest: {', '.join(near)}. " if near else ""


def _read(path: Path) -> dict[str, Any]:
    where = f"the configuration {path}"
    content = read_regular_file(path, what="configuration", limit_bytes=_CONFIG_BYTES)
    document = parse_json(content, where=where)
    if not isinstance(document, dict):
        raise UsageError(f"{where} is not a JSON object, as config.json of a model is.")
    return document


def _job_of_directory(name: str, path: Path) -> Callable[..., Job]:
    for folder in (path, *(path / part for part in _PARTS_OF_PIPELINES)):
        if is_file(folder / "config.json"):
            return _job_of_config(name, _read(folder / "config.json"))
    raise UsageError(
        f"the directory {name} has no config.json, nor has {' or '.join(_PARTS_OF_PIPELINES)} in it. Give a "
        "directory that transformers or diffusers saved, or one of config.json's."
    )


def _job_of_config(name: str, config: dict[str, Any]) -> Callable[..., Job]:
    if "_class_name" in config:
        from brimful.models.diffusion import diffusion_job

        return diffusion_job(name, config)
    if config.get("quantization_config"):
        raise UsageError(
            f"the weights of {name} are quantised (quantization_config in its config.json), which cannot be "
            "predicted from it. Give the model before that, with --lora r=16 --quantize nf4."
        )
    listed_ones = config.get("architectures")
    architectures = listed_ones if isinstance(listed_ones, list) else []
    kinds = [(kind, str(each)) for each in architectures for kind in _KINDS if str(each).endswith(kind)]
    if not kinds or not isinstance(config.get("model_type"), str):
        named = ", ".join(map(str, architectures)) or "no architecture"
        raise UsageError(
            f"the configuration of {name} names {named}, "
            f"and a job is known for {', '.join(_KINDS)}. Give a brimful.Job with its loss and batch: "
            "path/to/file.py:NAME. What brimful itself has written is shown by brimful report FILE."
        )
    kind, architecture = kinds[0]
    return _KINDS[kind](name, architecture, config)


def _built(
    name: str,
    architecture: str,
    config: Mapping[str, Any],
    *,
    tokens: int | None = None,
    decoder: str | None = None,
    **changes: Any,
) -> Callable[[], nn.Module]:
    """Builds a model of transformers from its configuration, with `changes` that are not None.

    `decoder` is the part of the configuration whose model is causal, where the whole is not.
    """

    def build() -> nn.Module:
        transformers = import_transformers(name)
        given = {key: value for key, value in config.items() if key not in ("architectures", "auto_map")}
        given |= {key: value for key, value in changes.items() if value is not None}
        made = transformers.AutoConfig.for_model(**{**given, "use_cache": False})
        window = getattr(made, "sliding_window", None)
        is_causal = _is_causal(architecture)
        sees_all = window is None or (tokens is not None and tokens <= window)
        kind = getattr(transformers, architecture, None)
        if kind is None:
            raise UsageError(
                f"{name} is a {architecture}, which transformers {transformers.__version__} does not have. "
                "Its own code is not run. Install a release of transformers that has it."
            )
        takes_others = getattr(kind, "_supports_attention_backend", False) and getattr(
            kind, "_supports_sdpa", False
        )
        try:
            made._attn_implementation = attention(causal=is_causal and sees_all and takes_others)
            if decoder is not None:
                getattr(made, decoder)._attn_implementation = attention(causal=True)
            model: nn.Module = kind(made)
        except ValueError:  # the model has no such attention
            made._attn_implementation = "eager"
            model = kind(made)
        if is_causal:
            set_causal_loss(model)
        return model

    return build


def _is_causal(architecture: str) -> bool:
    return architecture.endswith(("ForCausalLM", "GPT2LMHeadModel"))


def _full_config(name: str, config: Mapping[str, Any]) -> Any:
    """The configuration with the defaults of its class."""
    given = {key: value for key, value in config.items() if key not in ("architectures", "auto_map")}
    transformers = import_transformers(name)
    if given["model_type"] not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{name} has the model_type {given['model_type']!r}, which transformers {transformers.__version__} "
            "does not have. Its own code is not run. Install a release of transformers that has it, or give a "
            "brimful.Job with its loss and batch: path/to/file.py:NAME."
        )
    try:
        return transformers.AutoConfig.for_model(**given)
    except Exception as error:  # the library checks each field, with errors of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"transformers cannot read the configuration of {name}: {reason[0]}") from error


def _size(name: str, config: Any, key: str, default: int | None = None) -> int:
    """A size in a configuration; UsageError if it is none."""
    return checked_size(name, key, getattr(config, key, default))


def _positions(config: Any, default: int) -> int:
    """The most tokens of a sample: the positions of the model; `default` if there is no limit."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return max(default, 2**20)
    # positions of RoBERTa's kind are counted from behind the padding token
    return most - 2 if getattr(config, "model_type", "") in ("roberta", "xlm-roberta") else most


def _of_tokens(kind: str) -> Callable[[str, str, dict[str, Any]], Callable[..., Job]]:
    """A maker of jobs on sequences of tokens: "causal", "masked" or "classes"."""

    def maker(name: str, architecture: str, config: dict[str, Any]) -> Callable[..., Job]:
        def make(
            *,
            sequence_length: int | None = None,
            num_hidden_layers: int | None = None,
            hidden_size: int | None = None,
            num_labels: int | None = None,
        ) -> Job:
            full = _full_config(name, config)
            usual = _USUAL_TOKENS["causal" if kind == "causal" else "other"]
            most = _positions(full, usual)
            tokens = min(usual, most) if sequence_length is None else sequence_length
            check_range(name, "sequence_length", tokens, 2, most)
            resizing = resized(name, full, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size)
            words = _size(name, full, "vocab_size")
            padding = full.pad_token_id if isinstance(full.pad_token_id, int) else 0
            first = min(max(padding, 0) + 1, words - 1) if kind != "causal" else 0
            labels = num_labels or max(_size(name, full, "num_labels"), 2)  # of one, the loss is always 0
            build = _built(
                name,
                architecture,
                config,
                tokens=tokens,
                **resizing,
                num_labels=labels if kind == "classes" else None,
                problem_type="single_label_classification" if kind == "classes" else None,
                pad_token_id=padding if kind == "classes" else None,
            )

            def samples(count: int) -> Batch:
                ids = torch.randint(first, words, (count, tokens))  # (B, T)
                of_classes = torch.randint(0, labels, (count,)) if kind == "classes" else ids.clone()
                return {"input_ids": ids, "labels": of_classes}

            return Job(
                model=build,
                loss=own_loss,
                batch=samples,
                count=_COUNTS[kind],
                counted="tokens" if kind != "classes" else "counted",
                name=name,
            )

        return make

    return maker


def _count_next_tokens(batch: Batch) -> Tensor:
    counted: Tensor = (batch["labels"][:, 1:] != -100).sum()  # F.cross_entropy's ignore_index
    return counted


def _count_tokens(batch: Batch) -> Tensor:
    counted: Tensor = (batch["labels"] != -100).sum()
    return counted


_COUNTS: Mapping[str, Callable[[Batch], Tensor] | None] = {
    "causal": _count_next_tokens,
    "masked": _count_tokens,
    "classes": None,
}
"""What the loss of each kind is a mean over."""


def _sequence_to_sequence(name: str, architecture: str, config: dict[str, Any]) -> Callable[..., Job]:
    def make(*, sequence_length: int | None = None, target_length: int | None = None) -> Job:
        full = _full_config(name, config)
        is_speech = full.model_type == "whisper"
        reads_text = isinstance(getattr(full, "vocab_size", None), int) and not hasattr(full, "vision_config")
        hears = any(hasattr(full, each) for each in ("num_mel_bins", "input_feat_per_channel"))
        if not getattr(full, "is_encoder_decoder", False) or not (is_speech or (reads_text and not hears)):
            raise UsageError(
                f"{name} is a {architecture}, whose inputs are not known here: a job is known for encoders and "
                "decoders of text, for Whisper and LLaVA. Give a brimful.Job with its loss and a batch of its "
                "processor: path/to/file.py:NAME. --lora, --quantize and --dtype go with it."
            )
        most = (
            _size(name, full, "max_target_positions") if is_speech else _positions(full, _USUAL_TOKENS["other"])
        )
        if is_speech and sequence_length is not None:
            raise UsageError(f"{name} hears 30 seconds; its option is target_length, tokens of the text.")
        tokens = min(_USUAL_TOKENS["other"], most) if sequence_length is None else sequence_length
        targets = min(tokens, most) if target_length is None else target_length
        check_range(name, "target_length", targets, 2, most)
        check_range(name, "sequence_length", tokens, 2, None if is_speech else most)

        words = _size(name, full, "vocab_size")
        bins, frames = 0, 0
        if is_speech:
            bins, frames = _size(name, full, "num_mel_bins"), 2 * _size(name, full, "max_source_positions")
        first = min(4, words - 1)  # behind special tokens

        def samples(count: int) -> Batch:
            labels = torch.randint(first, words, (count, targets))  # (B, T)
            if is_speech:
                return {"input_features": torch.randn(count, bins, frames), "labels": labels}  # (B, M, frames)
            return {"input_ids": torch.randint(first, words, (count, tokens)), "labels": labels}

        build = _built(name, architecture, config)
        return Job(model=build, loss=own_loss, batch=samples, count=_count_tokens, counted="tokens", name=name)

    return make


def _image_in_text(name: str, architecture: str, config: dict[str, Any]) -> Callable[..., Job]:
    """A maker of jobs on texts with an image in each, whose encoder is frozen.

    Source: Liu et al. 2023, Visual Instruction Tuning, section 4.2, stage 2.
    """

    def make(*, sequence_length: int | None = None) -> Job:
        full = _full_config(name, config)
        pixels, channels = _size(name, full.vision_config, "image_size"), 3
        patches = (pixels // _size(name, full.vision_config, "patch_size")) ** 2
        places = patches + (1 if full.vision_feature_select_strategy == "full" else 0)
        words, image = _size(name, full.text_config, "vocab_size"), _size(name, full, "image_token_index")
        most = _positions(full.text_config, _USUAL_TOKENS["causal"])
        tokens = min(_USUAL_TOKENS["causal"], most) if sequence_length is None else sequence_length
        check_range(name, "sequence_length", tokens, places + 2, most)
        of_image = slice(1, 1 + places)  # behind the first token

        def build() -> nn.Module:
            model: Any = _built(name, architecture, config, decoder="text_config")()
            model.model.vision_tower.requires_grad_(False)
            made: nn.Module = model
            return made

        def samples(count: int) -> Batch:
            ids = torch.randint(0, words - 1, (count, tokens))  # (B, T)
            ids += ids >= image
            ids[:, of_image] = image
            labels = ids.clone()
            labels[:, of_image] = -100  # F.cross_entropy's ignore_index
            images = torch.randn(count, channels, pixels, pixels)  # (B, C, H, W)
            return {"input_ids": ids, "pixel_values": images, "labels": labels}

        return Job(
            model=build,
            loss=own_loss,
            batch=samples,
            count=_count_next_tokens,
            counted="tokens",
            name=name,
        )

    return make


def _image_classification(name: str, architecture: str, config: dict[str, Any]) -> Callable[..., Job]:
    def make(
        *,
        image_size: int | None = None,
        num_hidden_layers: int | None = None,
        hidden_size: int | None = None,
        num_classes: int | None = None,
    ) -> Job:
        full = _full_config(name, config)
        resizing = resized(name, full, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size)
        pixels = image_size or _size(name, full, "image_size", 224)
        check_range(name, "image_size", pixels, 32)
        classes = num_classes or _size(name, full, "num_labels")
        has_size = hasattr(full, "image_size")
        sized = pixels if has_size else None
        build = _built(name, architecture, config, num_labels=classes, image_size=sized, **resizing)
        channels = _size(name, full, "num_channels", 3)

        def samples(count: int) -> Batch:
            images = torch.randn(count, channels, pixels, pixels)  # (B, C, H, W)
            return {"pixel_values": images, "labels": torch.randint(0, classes, (count,))}

        return Job(model=build, loss=own_loss, batch=samples, name=name)

    return make


def _image_and_text(name: str, architecture: str, config: dict[str, Any]) -> Callable[..., Job]:
    def make() -> Job:
        full = _full_config(name, config)
        text, vision = getattr(full, "text_config", None), getattr(full, "vision_config", None)
        tokens, pixels = _size(name, text, "max_position_embeddings"), _size(name, vision, "image_size")
        words, channels = _size(name, text, "vocab_size"), _size(name, vision, "num_channels")

        def samples(count: int) -> Batch:
            return {
                "input_ids": torch.randint(1, max(words - 1, 2), (count, tokens)),
                "pixel_values": torch.randn(count, channels, pixels, pixels),
            }

        def embed(model: Any, batch: Batch) -> tuple[Tensor, ...]:
            out = model(**batch)
            scales = (model.logit_scale, *([model.logit_bias] if hasattr(model, "logit_bias") else []))
            return (out.image_embeds, out.text_embeds, *(each.squeeze() for each in scales))

        return Job(
            model=_built(name, architecture, config),
            loss=_of_pairs if architecture == "SiglipModel" else _contrastive,
            embed=embed,
            batch=samples,
            name=name,
        )

    return make


def _contrastive(embeddings: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The loss of CLIP: each image among all texts, and each text among all images (Radford et al. 2021)."""
    images, texts, logit_scale = embeddings
    logits = logit_scale.exp() * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T  # (B, B)
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def _of_pairs(embeddings: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The loss of SigLIP: each pair of an image and a text by itself (Zhai et al. 2023)."""
    images, texts, logit_scale, logit_bias = embeddings
    logits = logit_scale.exp() * F.normalize(texts, dim=-1) @ F.normalize(images, dim=-1).T + logit_bias
    are_pairs = 2 * torch.eye(len(logits), device=logits.device) - 1  # (B, B)
    return -F.logsigmoid(are_pairs * logits).sum(-1).mean()


_Maker = Callable[[str, str, dict[str, Any]], Callable[..., Job]]

_KINDS: Mapping[str, _Maker] = {
    "ForCausalLM": _of_tokens("causal"),
    "GPT2LMHeadModel": _of_tokens("causal"),
    "ForMaskedLM": _of_tokens("masked"),
    "ForSequenceClassification": _of_tokens("classes"),
    "LlavaForConditionalGeneration": _image_in_text,
    "ForConditionalGeneration": _sequence_to_sequence,
    "ForImageClassification": _image_classification,
    "CLIPModel": _image_and_text,
    "SiglipModel": _image_and_text,
}
"""By how the name of a class ends: what makes jobs of it."""


def _timm_job(name: str) -> Callable[..., Job]:
    def make(*, image_size: int | None = None, num_classes: int = 1000) -> Job:
        try:
            import timm
        except ImportError as error:
            raise UsageError(f"{name} is built with timm, which is not installed: pip install timm.") from error
        model = name.removeprefix("timm/")
        check_range(name, "num_classes", num_classes, 1)
        if image_size is not None:
            check_range(name, "image_size", image_size, 1)
        architecture, _, tag = model.partition(".")
        published = timm.list_pretrained(f"{architecture}.*") if tag else []
        if not timm.is_model(architecture) or (tag and model not in published):
            near = published or get_close_matches(architecture, timm.list_models(), n=5, cutoff=0)
            raise UsageError(f"timm {timm.__version__} has no model {model!r}. Near: {', '.join(near[:5])}.")
        _, height, width = timm.get_pretrained_cfg(model).input_size
        pixels = (height, width) if image_size is None else (image_size, image_size)

        def build() -> nn.Module:
            sized: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
            try:
                made: nn.Module = timm.create_model(model, pretrained=False, num_classes=num_classes, **sized)
            except TypeError:  # convolutional networks take any size
                made = timm.create_model(model, pretrained=False, num_classes=num_classes)
            return made

        def samples(count: int) -> Batch:
            labels = torch.randint(0, num_classes, (count,))
            return {"images": torch.randn(count, 3, *pixels), "labels": labels}

        return Job(model=build, loss=_cross_entropy, batch=samples, name=name)

    return make


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def matching(word: str) -> Iterator[PublishedModel]:
    """The known models whose id or class has a word in it, in any case."""
    for each in known_models().values():
        if word.lower() in f"{each.name} {each.architecture}".lower():
            yield each
