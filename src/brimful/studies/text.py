"""Studies of Transformers: what single techniques do for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from brimful.devices import CudaContext, Device, find_device, with_context
from brimful.prediction import Estimate
from brimful.results import Published
from brimful.studies.jobs import NORMED, digits_job, gpt2_job, text_job, topics_job, wide_mlp
from brimful.studies.published_loops import (
    checkpoint_attention_and_gelu,
    checkpoint_layers,
    composite_gelu,
    text_recipe,
    tweets_recipe,
)
from brimful.studies.study import Case, Figure, Study
from brimful.trace import Category
from brimful.utils.quantities import GIB, MIB

SMALL_BATCH = 32
"""Samples per optimizer step at the small scale."""
FP16_NOTE = "Rows in fp16 run in bf16 at the small scale, on the CPU."

SINGLE_GPU = (
    '"Efficient Training on a Single GPU", Transformers 4.25: '
    "https://huggingface.co/docs/transformers/v4.25.1/en/perf_train_gpu_one"
)


def on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with bf16 for fp16, and fp32 for tf32, which are for GPUs."""
    precision = options.get("precision", "fp32")
    return {**options, "precision": {"fp16": "bf16", "tf32": "fp32"}.get(precision, precision)}


def _small(options: Mapping[str, Any], batch: int = 4) -> dict[str, Any]:
    """The options at the small scale: micro-batches enlarged in proportion."""
    return on_cpu({**options, "micro_batch_size": options["micro_batch_size"] * SMALL_BATCH // batch})


def _v100_of_article(name: str) -> Device:
    context = CudaContext(
        context_bytes=1341 * MIB,
        low_bytes=1341 * MIB,
        high_bytes=1341 * MIB,
        source=f"1343 MiB after a tensor of one element in {SINGLE_GPU}, less 2 of torch",
        is_measured=False,
    )
    return with_context(find_device(name), context)


def bert_large() -> Study:
    """One technique after another."""
    checkpointed: dict[str, Any] = {"micro_batch_size": 1, "recompute": "all"}
    half = checkpointed | {"precision": "fp16"}
    rows: tuple[tuple[str, dict[str, Any], int, float], ...] = (
        ("batch 4", {"micro_batch_size": 4}, 14949, 8.86),
        ("1 × 4 accumulation", {"micro_batch_size": 1}, 8681, 7.75),
        ("1 × 4, checkpointing", checkpointed, 6775, 5.99),
        ("batch 4, fp16", {"micro_batch_size": 4, "precision": "fp16"}, 13939, 18.64),
        ("1 × 4, checkpointing, fp16", half, 7275, 10.09),
        ("batch 4, Adafactor", {"micro_batch_size": 4, "optimizer": "adafactor"}, 12295, 7.96),
        ("1 × 4, checkpointing, fp16, Adafactor", half | {"optimizer": "adafactor"}, 4847, 9.06),
        ("batch 4, 8-bit Adam", {"micro_batch_size": 4, "optimizer": "adamw8bit"}, 13085, 9.15),
        ("1 × 4, checkpointing, fp16, 8-bit Adam", half | {"optimizer": "adamw8bit"}, 5363, 10.35),
    )
    then = {"adafactor": "Adafactor", "adamw8bit": "8-bit Adam", None: "transformers AdamW"}
    cases = []
    for label, given, mib, speed in rows:
        options = given | {"gradient_accumulation_steps": 4 // given["micro_batch_size"]}
        recipe = text_recipe(
            "bert-large",
            512,
            optimizer=then[given.get("optimizer")],
            prepare=checkpoint_layers if "recompute" in given else None,
            fp16="precision" in given,
            accumulation=options["gradient_accumulation_steps"],
            max_gradient_norm=1.0,
        )
        is_small = options.get("optimizer") != "adamw8bit"  # bitsandbytes' is for GPUs
        cases.append(
            Case(
                label=label,
                job=partial(text_job, "bert-large"),
                options=options,
                as_published=recipe,
                loop_batch=given["micro_batch_size"],
                published=Published(peak_device_bytes=mib * MIB, samples_per_second=speed),
                small_job=topics_job if is_small else None,
                small_options=_small(options),
            )
        )
    return Study(
        name="bert-large",
        title="BERT-large, 512 tokens, 4 samples a step, one technique after another",
        source=SINGLE_GPU,
        device="V100 16GB SXM2",
        find_published_device=_v100_of_article,
        cases=tuple(cases),
        epochs=3,
        conclusion=(
            "Take half precision first: published, it alone doubles the speed; accumulate and checkpoint until "
            "the batch fits, and change the optimizer last."
        ),
        notes=(FP16_NOTE,),
    )


def xlm_r() -> Study:
    """A model that fits and one that does not."""
    base: dict[str, Any] = {"micro_batch_size": 8}
    half = base | {"precision": "fp16"}
    rows: tuple[tuple[str, str, dict[str, Any], float | None, float | None], ...] = (
        ("base, batch 8", "base", base, 12.28, 70),
        ("base, batch 8, fp16", "base", half, 10.95, 50),
        ("base, batch 16, fp16", "base", half | {"micro_batch_size": 16}, 16.96, 40),
        ("large, batch 8", "large", base, None, None),
        ("large, batch 8, fp16", "large", half, 23.5, 100),
        ("large, batch 8, fp16, checkpointing", "large", half | {"recompute": "all"}, 11.8, 110),
    )
    cases = []
    for label, size, options, gib, minutes in rows:
        recipe = text_recipe(
            f"xlm-roberta-{size}",
            512,
            optimizer="torch AdamW",
            prepare=checkpoint_layers if "recompute" in options else None,
            fp16="precision" in options,
        )
        cases.append(
            Case(
                label=label,
                job=partial(text_job, f"xlm-roberta-{size}"),
                options=options,
                as_published=recipe,
                loop_batch=options["micro_batch_size"],
                published=Published(
                    peak_device_bytes=None if gib is None else int(gib * GIB),
                    is_out_of_memory=gib is None,
                    relative_speed=None if minutes is None else 70 / minutes,
                ),
                small_job=partial(topics_job, 2 if size == "base" else 4),
                small_options=_small(options, batch=8),
            )
        )
    return Study(
        name="xlm-r",
        title="XLM-RoBERTa base and large, text classification",
        source='"Training large models with your GPU", 2021',
        device="Quadro RTX 6000",
        find_published_device=partial(find_device, torch_version="1.8"),
        cases=tuple(cases),
        epochs=3,
        conclusion=(
            "Take half precision first: published, it makes the base model 1.4 times faster and leaves room "
            "for twice the batch; checkpoint only what does not fit then."
        ),
        notes=(
            "The sequence length and the optimizer are not published: 512 tokens, torch's AdamW.",
            FP16_NOTE,
        ),
    )


def bert_checkpointing() -> Study:
    """Checkpointing within the layers of BERT, and of whole layers."""
    within = checkpoint_attention_and_gelu
    rows: tuple[tuple[str, int, Callable[[Any], None], int, float, float], ...] = (
        ("batch 24", 24, composite_gelu, 10972, 1.0, 0.7997),
        ("batch 24, checkpointing", 24, within, 3944, 1625 / 2210, 0.7997),
        ("batch 132, checkpointing", 132, within, 10212, 1625 / 1880, 0.7946),
    )
    options: dict[Callable[[Any], None], dict[str, Any]] = {composite_gelu: {}, within: {"recompute": "all"}}
    cases = [
        Case(
            label=f"{label} (RTX 2080 Ti)",
            group="within layers",
            job=partial(text_job, "bert-base", sequence_length=256),
            options={"micro_batch_size": batch} | options[prepare],
            as_published=text_recipe("bert-base", 256, prepare=prepare),
            loop_batch=batch,
            published=Published(peak_device_bytes=mib * MIB, relative_speed=speed, accuracy=accuracy),
            small_job=topics_job,
            small_options={"micro_batch_size": min(batch, 64)} | options[prepare],
        )
        for label, batch, prepare, mib, speed, accuracy in rows
    ]
    for name in ("V100 16GB SXM2", "T4"):
        for label, checkpointing, speed in (
            ("tweets", None, 1.0),
            ("tweets, layers", checkpoint_layers, 1 / 1.25),
        ):
            cases.append(
                Case(
                    label=f"{label} ({name.split()[0]})",
                    group=name,
                    device=name,
                    job=partial(text_job, "bert-base", sequence_length=128),
                    options={"micro_batch_size": 64} | ({"recompute": "all"} if checkpointing else {}),
                    as_published=tweets_recipe(prepare=checkpointing),
                    loop_batch=64,
                    published=Published(relative_speed=speed),
                )
            )
    return Study(
        name="bert-checkpointing",
        title="BERT-base: checkpointing attention and GELU, or whole layers",
        source=(
            '"Explore Gradient-Checkpointing in PyTorch", 2019: '
            "https://qywu.github.io/2019/05/22/explore-gradient-checkpointing.html; tweets: "
            "https://github.com/ResidentMario/pytorch-training-performance-guide"
        ),
        device="RTX 2080 Ti",
        find_published_device=partial(find_device, torch_version="1.6"),
        cases=tuple(cases),
        epochs=3,
        conclusion=(
            "Checkpointing buys batch size, not accuracy: published, 36 % more time for 64 % less memory, at "
            "the same accuracy; larger batches win part of the time back."
        ),
        notes=(
            "The GPU, the sequence length and what of each layer is checkpointed are not published for the "
            "first three rows: a card of 11 GB; 256 tokens, the longest of 128, 256 and 512 that could fit "
            "there; attention with its output layer, and GELU by separate ops as in pytorch-pretrained-bert.",
            "The rows of tweets are published as about 60 % less memory and 25 % more time. Today's rows "
            "checkpoint whole layers.",
        ),
    )


def optimizers() -> Study:
    """Bytes of optimizer state."""
    rows: tuple[tuple[str, str, float | None, float], ...] = (
        ("AdamW", "adamw", 8, 1e-3),
        ("8-bit AdamW", "adamw8bit", 2, 1e-3),
        ("Adafactor", "adafactor", None, 1e-2),
        ("SGD with momentum", "sgd", 4, 3e-2),
        ("RMSprop", "rmsprop", None, 1e-3),
        ("Adagrad", "adagrad", None, 1e-2),
        ("Muon", "muon", None, 1e-2),
    )
    return Study(
        name="optimizers",
        title="BERT-large, 512 tokens, 4 samples a step, one optimizer after another",
        source=SINGLE_GPU,
        device="V100 16GB SXM2",
        cases=tuple(
            Case(
                label=label,
                job=partial(text_job, "bert-large"),
                options={"micro_batch_size": 4, "precision": "fp16", "optimizer": name},
                figures=(_bytes_per_parameter("optimizer state", Category.OPTIMIZER_STATE, published),),
                small_job=None
                if name == "adamw8bit"
                else partial(NORMED, optimizer=name, learning_rate=learning_rate),
                small_options={"micro_batch_size": SMALL_BATCH},
            )
            for label, name, published, learning_rate in rows
        ),
        epochs=3,
        conclusion=(
            "Keep AdamW where it fits; 8-bit AdamW saves three quarters of its state, Adafactor nearly all; "
            "both change the updates, so compare the loss over some hundred steps."
        ),
        notes=("At the small scale each optimizer has a learning rate of its own, usual for it, not tuned.",),
    )


def _bytes_per_parameter(name: str, category: Category, published: float | None = None) -> Figure:
    return Figure(
        name=name,
        unit="bytes per parameter",
        of=lambda predicted: dict(predicted.breakdown)[category] / predicted.parameter_count,
        published=published,
    )


def _context_bytes(predicted: Estimate) -> int:
    return predicted.predicted_peak_device_bytes - predicted.predicted_peak_reserved_bytes


def _context_and_weights(predicted: Estimate) -> float:
    return _context_bytes(predicted) + dict(predicted.breakdown)[Category.PARAMETERS]


def anatomy() -> Study:
    """What a step holds."""
    rows: tuple[tuple[str, str, tuple[float, float, float]], ...] = (
        ("fp32", "fp32", (4, 4, 8)),
        ("fp16 autocast", "fp16", (6, 4, 8)),
    )
    return Study(
        name="anatomy",
        title="BERT-large, 512 tokens, 1 sample, AdamW: what a step holds at its peak",
        source=SINGLE_GPU,
        device="V100 16GB SXM2",
        find_published_device=_v100_of_article,
        cases=tuple(
            Case(
                label=label,
                job=partial(text_job, "bert-large"),
                options={"micro_batch_size": 1, "precision": precision},
                as_published=text_recipe("bert-large", 512, fp16=precision == "fp16"),
                figures=(
                    *(
                        _bytes_per_parameter(str(category).replace("_", " "), category, published)
                        for category, published in zip(
                            (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE),
                            bytes_each,
                            strict=True,
                        )
                    ),
                    Figure(
                        name="context and weights",
                        unit="bytes",
                        of=_context_and_weights,
                        published=2631 * MIB,
                    ),
                ),
                small_job=topics_job,
                small_options=on_cpu({"micro_batch_size": SMALL_BATCH, "precision": precision}),
            )
            for label, precision, bytes_each in rows
        ),
        epochs=3,
        conclusion=(
            "Weights, gradients and AdamW's state take 16 bytes a parameter before the first sample: if those "
            "do not fit, change the optimizer or shard; if they do, the rest are activations: checkpoint."
        ),
        notes=(
            "The article counts 6 bytes a parameter for the weights of autocast; its copies in fp16 live in "
            "forward and backward only, and are temporaries here.",
            "The article's CUDA context is of torch 1.10, which loaded all kernels at once; it is an input "
            "here, not a prediction.",
        ),
    )


def dtypes() -> Study:
    """Precisions."""
    rows: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("fp32", {}, {}),
        ("tf32", {"precision": "tf32"}, {}),
        ("fp16 autocast", {"precision": "fp16"}, {}),
        ("bf16 autocast", {"precision": "bf16"}, {}),
        ("weights in bf16", {}, {"dtype": "bf16"}),
    )
    return Study(
        name="dtypes",
        title="BERT-large, 512 tokens, 16 samples a step, one precision after another",
        source=SINGLE_GPU,
        device="A100 40GB SXM",
        cases=tuple(
            Case(
                label=label,
                job=partial(text_job, "bert-large", **of_model),
                options={"micro_batch_size": 16} | options,
                small_job=None if of_model else topics_job,
                small_options=on_cpu(options | {"micro_batch_size": SMALL_BATCH}),
            )
            for label, options, of_model in rows
        ),
        epochs=3,
        conclusion=(
            "On Ampere and later take bf16 autocast: the range of fp32, no loss scaling; tf32 is one flag and "
            "changes nothing else; weights in bf16 halve weights, gradients and state, and lose small updates."
        ),
        notes=(
            "The guide has no figures of one model in all of these.",
            "At the small scale fp16 runs in bf16 and tf32 in fp32, on the CPU.",
        ),
    )


def sizes() -> Study:
    """Sizes in multiples of 8 and 64."""
    return Study(
        name="sizes",
        title="GPT-2, 1024 tokens, bf16: sizes that are multiples of 8 and 64, and others",
        source=SINGLE_GPU,
        device="A100 40GB SXM",
        cases=tuple(_sized_cases()),
        epochs=3,
        conclusion=(
            "Round the vocabulary up to a multiple of 64: the step gets faster although the model gets larger; "
            "what rounding up a hidden size adds costs no time; batches of samples with many tokens need none."
        ),
        notes=(
            "The guide recommends multiples of 8 for fp16, and of 64 on an A100, without figures.",
            "At the small scale both rows are a network of digits, whose hidden layers are 63 and 64 wide.",
        ),
    )


def _sized_cases() -> Iterator[Case]:
    for vocabulary, small_width in ((50257, 63), (50304, 64)):
        yield Case(
            label=f"vocabulary {vocabulary}",
            group="vocabulary",
            job=partial(gpt2_job, vocabulary),
            options={"micro_batch_size": 8, "precision": "bf16"},
            small_job=partial(digits_job, partial(wide_mlp, small_width)),
            small_options={"micro_batch_size": SMALL_BATCH},
        )
    for batch in (7, 8):
        yield Case(
            label=f"batch {batch}, vocabulary 50304",
            group="batch",
            job=partial(gpt2_job, 50304),
            options={"micro_batch_size": batch, "precision": "bf16"},
        )
    for width in (1000, 1024):
        yield Case(
            label=f"width {width}, 8 heads",
            group="width",
            job=partial(gpt2_job, 50304, width),
            options={"micro_batch_size": 8, "precision": "bf16"},
        )


def compilation() -> Study:
    """What `torch.compile` gains, and each of its stages."""
    full: dict[str, Any] = {"micro_batch_size": 16, "precision": "bf16"}
    stages: tuple[tuple[str, dict[str, Any]], ...] = (
        ("dynamo alone (backend eager)", {"backend": "eager"}),
        ("and autograd traced (aot_eager)", {"backend": "aot_eager"}),
        ("inductor, max-autotune", {"mode": "max-autotune-no-cudagraphs"}),
    )
    return Study(
        name="compile",
        title="GPT-2, 1024 tokens, 16 samples in bf16: torch.compile, whole and by block",
        source=(
            '"TorchTitan: One-stop PyTorch native solution for production ready LLM pre-training": '
            "arXiv 2410.06511"
        ),
        device="A100 80GB SXM",
        cases=(
            *(
                Case(
                    label=label,
                    job=partial(text_job, "gpt2", sequence_length=1024),
                    options=full | {"compile": compiles},
                    small_job=topics_job,
                    small_options={"micro_batch_size": SMALL_BATCH, "compile": compiles},
                )
                for label, compiles in (("eager", "none"), ("blocks", "units"), ("whole model", "model"))
            ),
            *(
                Case(
                    label=label,
                    small_job=partial(topics_job, **stage),
                    small_options={"micro_batch_size": SMALL_BATCH},
                )
                for label, stage in stages
            ),
        ),
        epochs=2,
        conclusion=(
            "Compile the blocks of a model with alike blocks: they share one compilation and gain most of what "
            "the whole model does; for runs of minutes compiling takes longer than it saves."
        ),
        notes=(
            "The article reports Llama 3.1 8B on 8 H100s: 5,762 tokens/s become 6,667, and 82.4 GiB 77.0, with "
            "recomputation in each block.",
            "At the small scale time includes compiling; a step does not. What torch.compile's backends eager "
            "and aot_eager run are eager kernels: they show where the gain arises.",
        ),
    )


TEXT = (bert_large, xlm_r, bert_checkpointing, optimizers, anatomy, dtypes, sizes, compilation)
