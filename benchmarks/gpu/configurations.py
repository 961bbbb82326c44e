"""Which training steps are recorded: models × precisions × ways to train, a few GiB each.

In the order in which they are run: should the time not suffice, the first ones are already a spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from brimful.job import Job
from brimful.settings import Precision
from gpu import jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One job under one set of settings."""

    name: str
    make_job: Callable[..., Job]
    """Takes `toy`."""
    precision: Precision
    micro_batch_size: int
    gradient_accumulation_steps: int = 1
    recomputes: bool = False
    """Whether every unit is recomputed."""
    optimizer: str | None = None

    def job(self, *, toy: bool) -> Job:
        return self.make_job(toy=toy)

    def samples(self, *, toy: bool) -> int:
        """The micro-batch: small where the model is."""
        return 2 if toy else self.micro_batch_size


def _lora(make_job: Callable[..., Job], *, toy: bool) -> Job:
    return jobs.with_lora(make_job(toy=toy))


def _channels_last(make_job: Callable[..., Job], *, toy: bool) -> Job:
    return jobs.channels_last(make_job(toy=toy))


def _configurations() -> tuple[Configuration, ...]:
    fp32, tf32, bf16, fp16 = Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16
    gpt2, gpt2_medium = jobs.gpt2, partial(jobs.gpt2, jobs.GPT2_MEDIUM)
    llama, four_layers = jobs.llama, partial(jobs.llama, jobs.LLAMA_FOUR_LAYERS)
    vit, vit_large = jobs.vit, partial(jobs.vit, jobs.VIT_LARGE)
    resnet, nhwc_resnet = jobs.resnet, partial(_channels_last, jobs.resnet)
    make = Configuration

    def each(
        name: str, job: Callable[..., Job], precision: Precision, samples: int, **more: object
    ) -> Configuration:
        return make(name=name, make_job=job, precision=precision, micro_batch_size=samples, **more)

    return (
        each("gpt2-bf16", gpt2, bf16, 8),
        each("resnet50-fp32", resnet, fp32, 64),
        each("llama-bf16", four_layers, bf16, 2),
        each("vit-fp32", vit, fp32, 32),
        each("t5-fp32", jobs.t5, fp32, 8),
        each("unet-fp32", jobs.unet, fp32, 8),
        each("gpt2-bf16-recompute", gpt2, bf16, 8, recomputes=True),
        each("llama-bf16-lora", partial(_lora, llama), bf16, 2),
        each("vit-bf16", vit, bf16, 64),
        each("resnet50-bf16", resnet, bf16, 64),
        each("gpt2-fp16-accumulate", gpt2, fp16, 4, gradient_accumulation_steps=4),
        each("t5-bf16", jobs.t5, bf16, 16),
        each("unet-bf16", jobs.unet, bf16, 16),
        each("gpt2-fp32", gpt2, fp32, 4),
        each("resnet50-bf16-nhwc", nhwc_resnet, bf16, 64),
        each("llama-bf16-recompute", llama, bf16, 2, recomputes=True),
        each("vit-fp16-accumulate", vit, fp16, 32, gradient_accumulation_steps=2),
        each("resnet50-tf32", resnet, tf32, 64),
        each("t5-bf16-recompute", jobs.t5, bf16, 16, recomputes=True),
        each("unet-fp16-recompute", jobs.unet, fp16, 16, recomputes=True),
        each("llama-fp32", four_layers, fp32, 1),
        each("gpt2-medium-bf16", gpt2_medium, bf16, 4),
        each("resnet50-fp32-nhwc", nhwc_resnet, fp32, 64),
        each("vit-large-bf16-recompute", vit_large, bf16, 64, recomputes=True),
        each("llama-bf16-lora-recompute", partial(_lora, llama), bf16, 4, recomputes=True),
        each("gpt2-bf16-adafactor", gpt2, bf16, 8, optimizer="adafactor"),
        each("resnet50-fp16-recompute", resnet, fp16, 128, recomputes=True),
        each("llama-bf16-accumulate", four_layers, bf16, 1, gradient_accumulation_steps=4),
        each("unet-tf32-accumulate", jobs.unet, tf32, 4, gradient_accumulation_steps=4),
        each("resnet50-fp32-small-batch", resnet, fp32, 4),
    )


CONFIGURATIONS: dict[str, Configuration] = {each.name: each for each in _configurations()}
