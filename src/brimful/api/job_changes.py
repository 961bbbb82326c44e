"""Changes of a job that a plan may suggest: smaller samples, another type of weights, adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec

from torch import nn

from brimful.batches import with_smaller_samples
from brimful.capture import fake_model
from brimful.capture.cache import CachedCapture
from brimful.devices import Device
from brimful.job import Job
from brimful.memory import most_held_bytes
from brimful.models.variants import (
    is_of_architecture,
    is_of_transformers,
    with_adapters,
    with_dtype,
)
from brimful.planner import Change
from brimful.prediction.estimator import Capture
from brimful.settings import Precision, Settings
from brimful.trace import Category, Trace

RANK = "r=16"
"""Adapters that are suggested. Source of the rank: peft's documentation of LoRA (0.21), its usual example."""

PREFIX_OF_ADAPTED = "base_model.model."
"""What paths of modules begin with in a model with adapters. Source: peft.PeftModel (0.21)."""

_HALF_BYTES = 3
"""Bytes of a parameter above which most are float32."""

_NF4_FRACTION = 0.14
"""Bytes of 4-bit weights relative to float32, with a scale of 4 bytes for 64; other layers take more."""


class JobChanges:
    """The changes of a job on a device; what captures the changed jobs is made when it is needed.

    `like` has captures of the job as it is.
    """

    def __init__(self, job: Job, device: Device, like: CachedCapture) -> None:
        self._job, self._device, self._like = job, device, like

    def __call__(self, baseline: Trace) -> Iterator[Change]:
        """The changes that may help, given training without a plan."""
        yield from self._with_smaller_samples()
        is_adapted = any(class_name.startswith("Peft") for _, class_name in baseline.module_classes)
        if isinstance(self._job.model, nn.Module) or is_adapted:  # a module would be changed
            return
        parameters_bytes = most_held_bytes(baseline, Category.PARAMETERS)
        if self._has_bf16 and parameters_bytes > _HALF_BYTES * baseline.parameter_count:
            yield self._in_bf16(baseline)
        yield from self._with_adapters(baseline, parameters_bytes)

    @property
    def _has_bf16(self) -> bool:
        return self._device.supports(Precision.BF16)

    def _with_smaller_samples(self) -> Iterator[Change]:
        smaller = None if self._job.loop is not None else with_smaller_samples(self._job)
        if smaller is None:
            return
        is_text = len(smaller.after) == 1
        size = str(smaller.after[0]) if is_text or len({*smaller.after}) == 1 else ""
        shown, before = ("×".join(map(str, sizes)) for sizes in (smaller.after, smaller.before))
        what = f"{shown} {'tokens' if is_text else 'pixels'} a sample"
        keyword, flag = ("sequence_length", "--seq-len") if is_text else ("image_size", "--image-size")
        has_option = bool(size) and is_of_architecture(self._job)
        by_hand = f"{what} in Job(batch=…)"
        yield Change(
            name="shorter sequences" if is_text else "smaller images",
            effect=f"{what} in place of {before}: a step sees {'fewer tokens' if is_text else 'less detail'}",
            option=f"find_architecture(…, {keyword}={size})" if has_option else by_hand,
            flag=f"{flag} {size}" if has_option else by_hand,
            capture=_Lazy(lambda: CachedCapture(smaller.job, self._device, like=self._like)),
            may_be_refused=True,
            keeps_state=True,
        )

    def _in_bf16(self, baseline: Trace) -> Change:
        of_update = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        return Change(
            name="weights in bf16",
            effect="weights, gradients and optimizer state have 8 significant bits: small updates are lost",
            option='find_architecture(…, dtype="bf16"), or model.to(torch.bfloat16) in Job(model=…)',
            flag="--dtype bf16",
            variant={"dtype": "bf16"},
            capture=_Lazy(lambda: CachedCapture(with_dtype(self._job, "bf16"), self._device, like=self._like)),
            floor_bytes=sum(most_held_bytes(baseline, each) for each in of_update) // 2,
        )

    def _with_adapters(self, baseline: Trace, parameters_bytes: int) -> Iterator[Change]:
        if not self._takes_adapters(baseline):
            return
        for name, dtype, quantize, fraction in (
            ("LoRA", None, None, 1.0),
            ("LoRA over weights in bf16", "bf16", None, 0.5),
            ("QLoRA", "bf16", "nf4", _NF4_FRACTION),
        ):
            if dtype == "bf16" and not self._has_bf16:
                continue
            given = {"lora": RANK, "dtype": dtype, "quantize": quantize}
            named = {name: value for name, value in given.items() if value is not None}
            option = ", ".join(f'{name}="{value}"' for name, value in named.items())
            flag = " ".join(f"--{name} {value}" for name, value in named.items())
            yield Change(
                name=name,
                effect="trains small adapters over frozen weights, for a model that is pretrained",
                option=f"find_architecture(…, {option}), or peft.get_peft_model in Job(model=…)",
                flag=flag,
                variant=named,
                capture=_Lazy(partial(self._adapted, dtype, quantize)),
                floor_bytes=int(parameters_bytes * fraction),
                family="adapters",
                gains_speed=False,
            )

    def _takes_adapters(self, baseline: Trace) -> bool:
        """Whether the model is a text model of transformers, and peft can adapt it."""
        has_embedding = any(class_name.endswith("Embedding") for _, class_name in baseline.module_classes)
        is_loaded = "transformers" in sys.modules and find_spec("peft") is not None
        return has_embedding and is_loaded and is_of_transformers(fake_model(self._job))

    def _adapted(self, dtype: str | None, quantize: str | None) -> CachedCapture:
        job = self._job if dtype is None else with_dtype(self._job, dtype)
        return CachedCapture(
            with_adapters(job, RANK, quantize), self._device, like=self._like, prefix=PREFIX_OF_ADAPTED
        )


class _Lazy:
    """Captures that are made on first use."""

    def __init__(self, make: Callable[[], Capture]) -> None:
        self._capture = cache(make)

    def __call__(self, settings: Settings, steps: int = 1) -> Trace:
        return self._capture()(settings, steps)
