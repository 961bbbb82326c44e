"""Memory of text generation with a job's model, on a device that need not be in this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from brimful.api.estimates import allocator_of, capacity_bytes_of
from brimful.arguments import checks_arguments
from brimful.batches import make_batch
from brimful.capture import fake_model
from brimful.capture.generation import GenerationCapture, check_generates
from brimful.errors import UsageError
from brimful.execution.random_state import undisturbed
from brimful.job import Batch, Job
from brimful.memory import CAPTURED_FORWARDS, DEFAULT_ALLOCATOR, AllocatorSettings, GrowingForwards
from brimful.models.checks import check_range
from brimful.options import PrecisionLike, parse_precision
from brimful.prediction import Generation, GenerationEstimate, predict_generation
from brimful.prediction.estimator import MOST_SAMPLES, ScaledTraces
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.settings import Precision, Settings
from brimful.utils.status import busy


@undisturbed()
@busy("estimating")
@checks_arguments
def estimate_generation(
    job: Job,
    device: DeviceLike = "auto",
    *,
    new_tokens: int,
    num_beams: int = 1,
    prompt_tokens: int | None = None,
    micro_batch_size: int = 1,
    precision: PrecisionLike = Precision.FP32,
    budget: str | float | None = None,
    allocator: str | AllocatorSettings = DEFAULT_ALLOCATOR,
) -> GenerationEstimate:
    """Predict the peak memory of `model.generate` of transformers, without running it.

    It is `model.generate(input_ids, max_new_tokens=new_tokens, num_beams=num_beams, do_sample=False)` in
    evaluation mode, without gradients or an optimizer, under autocast if the precision asks for it. Prompts
    have no padding, and no token ends them early.

    Args:
        job: Its model is a causal language model or an encoder-decoder of transformers, and its batch has
            `input_ids`.
        device: As for `brimful.estimate`.
        new_tokens: Tokens that are generated for each sample.
        num_beams: Beams of each sample; 1 is greedy.
        prompt_tokens: Tokens of each prompt; None takes those of the job's batch, or fewer where the model's
            positions would not do.
        micro_batch_size: Samples that are generated for at once.
        precision: "fp32", "tf32", "fp16" or "bf16".
        budget: Size that it must fit, such as "11GiB", instead of the device's capacity.
        allocator: Settings of PyTorch's CUDA allocator, as in PYTORCH_ALLOC_CONF: "expandable_segments:True".

    Returns:
        Peak memory of each phase, the cache, whether it fits, and the largest batch that does.

    Raises:
        UsageError: An argument is invalid, the model does not generate, or has too few positions.
        CaptureError: The generation cannot be run on fake tensors.
    """
    for name, count in (("new_tokens", new_tokens), ("num_beams", num_beams), ("prompt_tokens", prompt_tokens)):
        if count is not None:
            check_range("a generation", name, count, 1)
    check_range("a generation", "micro_batch_size", micro_batch_size, 1, MOST_SAMPLES)
    target = resolve_device(device)
    capacity_bytes = capacity_bytes_of(job, device, target, budget)
    settings = Settings(micro_batch_size=micro_batch_size, precision=parse_precision(precision))
    target.check_precision(settings.precision)
    model = fake_model(job)
    check_generates(model, job.name)
    prompt, notes = _prompt(job, model, prompt_tokens, new_tokens)
    capture = GenerationCapture(
        job=_with_prompts(job, prompt),
        device=target,
        new_tokens=new_tokens,
        num_beams=num_beams,
        forwards=min(CAPTURED_FORWARDS, new_tokens),
    )
    forwards_of = _scaled(capture, settings)
    if new_tokens > CAPTURED_FORWARDS and _fills_window(model, prompt, new_tokens):
        at_end = _with_prompts(job, prompt + new_tokens - CAPTURED_FORWARDS)
        forwards_of = _until(forwards_of, _scaled(replace(capture, job=at_end, cache_bytes={}), settings))
    if new_tokens > CAPTURED_FORWARDS and not forwards_of(micro_batch_size).is_steady:
        forwards_of = _scaled(replace(capture, forwards=new_tokens, cache_bytes={}), settings)
    generation = Generation(
        forwards_of=forwards_of,
        new_tokens=new_tokens,
        device=target,
        capacity_bytes=target.capacity_bytes if capacity_bytes is None else capacity_bytes,
        allocator=allocator_of(allocator),
    )
    return predict_generation(
        generation,
        job=job.name,
        prompt_tokens=prompt,
        num_beams=num_beams,
        micro_batch_size=micro_batch_size,
        precision=settings.precision,
        notes=notes,
    )


def _scaled(capture: GenerationCapture, settings: Settings) -> Callable[[int], GrowingForwards]:
    """The forwards for any micro-batch size, from captures at two."""
    traces = ScaledTraces(capture)

    def forwards(size: int) -> GrowingForwards:
        trace = traces.at(replace(settings, micro_batch_size=size))
        return GrowingForwards(trace=trace, cache_bytes=capture.cache_bytes_at(size))

    return cache(forwards)


def _until(
    first: Callable[[int], GrowingForwards], end: Callable[[int], GrowingForwards]
) -> Callable[[int], GrowingForwards]:
    """The first forwards, whose storages grow to their sizes in the last ones at most."""
    return cache(lambda size: replace(first(size), end=end(size)))


def _with_prompts(job: Job, tokens: int) -> Job:
    """The job's model with prompts of a length, repeated where the job's own are shorter."""

    def prompts(samples: int) -> Batch:
        ids: Tensor = make_batch(job, samples)["input_ids"]
        return {"input_ids": ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]}

    return Job(model=job.model, loss=_no_loss, batch=prompts, name=job.name)


def _no_loss(_model: nn.Module, _batch: Batch) -> Tensor:
    raise AssertionError("a generation has no loss")


def _prompt(job: Job, model: Any, asked: int | None, new_tokens: int) -> tuple[int, tuple[str, ...]]:
    """Tokens of a prompt that the model's positions permit, and a note if they are fewer than the batch has."""
    own = _own_prompt(job)
    prompt = own if asked is None else asked
    most = getattr(_config_of_text(model), "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return prompt, ()
    read = new_tokens - 1  # no step reads the last token
    if getattr(model.config, "is_encoder_decoder", False):
        if prompt > most or 1 + read > most:
            raise UsageError(
                f"{job.name!r} has {most:,} positions (max_position_embeddings) in its encoder and in its "
                f"decoder, and is asked for {prompt:,} tokens of prompt and {new_tokens:,} new ones. Ask for "
                f"at most {most:,} of each: prompt_tokens (--seq-len), new_tokens (--new-tokens)."
            )
        return prompt, ()
    if asked is None and prompt + read > most > read:
        prompt = most - read
        return prompt, (
            f"The prompt has {prompt:,} tokens, not the {own:,} of the batch, which with {new_tokens:,} new "
            f"ones are more than the model's {most:,} positions. prompt_tokens (--seq-len) sets them.",
        )
    if prompt + read > most:
        shorter = f"a prompt of at most {most - read:,}: --seq-len {most - read}" if most > read else ""
        fewer = f"at most {most - prompt + 1:,} new tokens" if prompt <= most else ""
        raise UsageError(
            f"{job.name!r} has {most:,} positions (max_position_embeddings), and a prompt of {prompt:,} tokens "
            f"with {new_tokens:,} new ones takes {prompt + read:,}. Ask for "
            f"{' or for '.join(filter(None, (shorter, fewer))) or f'at most {most:,} tokens in all'}."
        )
    return prompt, ()


def _own_prompt(job: Job) -> int:
    """Tokens of `input_ids` in the job's batch."""
    batch = make_batch(job, 1)
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise UsageError(
            f"the batch of {job.name!r} has no input_ids of shape (samples, tokens), and a generation starts "
            "from them. Give Job(batch=…) that returns a dict with them. Prompts of images or sound are not "
            "predicted."
        )
    return int(ids.shape[1])


def _config_of_text(model: Any) -> Any:
    """The configuration of the part of a model that reads and writes tokens."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _fills_window(model: Any, prompt: int, new_tokens: int) -> bool:
    """Whether the cache of some layers stops growing during the generation."""
    config = _config_of_text(model)
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(isinstance(size, int) and prompt < size <= prompt + new_tokens for size in sizes)
