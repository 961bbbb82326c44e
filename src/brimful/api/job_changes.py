"""Changes of a job that a plan may suggest: another type of its weights, adapters over frozen ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec

from torch import nn

from brimful.capture.cache import CachedCapture
from brimful.devices import Device
from brimful.job import Job
from brimful.memory import most_held_bytes
from brimful.models.variants import with_adapters, with_dtype
from brimful.planner import Change
from brimful.prediction.estimator import Capture
from brimful.settings import Settings
from brimful.trace import Category, Trace

RANK = "r=16"
"""Adapters that are suggested. Source of the rank: peft's documentation of LoRA (0.21), its usual example."""

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
        if isinstance(self._job.model, nn.Module):  # it would be changed
            return
        parameters_bytes = most_held_bytes(baseline, Category.PARAMETERS)
        of_update = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        yield Change(
            name="weights in bf16",
            effect="weights, gradients and optimizer state have 8 significant bits: small updates are lost",
            option='dtype="bf16"',
            flag="--dtype bf16",
            capture=_Lazy(lambda: CachedCapture(with_dtype(self._job, "bf16"), self._device, like=self._like)),
            floor_bytes=sum(most_held_bytes(baseline, each) for each in of_update) // 2,
        )
        if not _may_take_adapters(baseline):
            return
        for name, dtype, quantize, fraction in (
            ("LoRA", None, None, 1.0),
            ("LoRA over weights in bf16", "bf16", None, 0.5),
            ("QLoRA", "bf16", "nf4", _NF4_FRACTION),
        ):
            option = f'lora="{RANK}"' + (f', dtype="{dtype}"' if dtype else "")
            flag = f"--lora {RANK}" + (f" --dtype {dtype}" if dtype else "")
            if quantize is not None:
                option, flag = f'{option}, quantize="{quantize}"', f"{flag} --quantize {quantize}"
            yield Change(
                name=name,
                effect="trains small adapters over frozen weights, for a model that is pretrained",
                option=option,
                flag=flag,
                capture=_Lazy(partial(self._adapted, dtype, quantize)),
                floor_bytes=int(parameters_bytes * fraction),
                family="adapters",
                gains_speed=False,
            )

    def _adapted(self, dtype: str | None, quantize: str | None) -> CachedCapture:
        job = self._job if dtype is None else with_dtype(self._job, dtype)
        return CachedCapture(with_adapters(job, RANK, quantize), self._device)


class _Lazy:
    """Captures that are made on first use."""

    def __init__(self, make: Callable[[], Capture]) -> None:
        self._capture = cache(make)

    def __call__(self, settings: Settings, steps: int = 1) -> Trace:
        return self._capture()(settings, steps)


def _may_take_adapters(baseline: Trace) -> bool:
    """Whether a model may be a text model of transformers; building it shows whether it is."""
    has_embedding = any(class_name.endswith("Embedding") for _, class_name in baseline.module_classes)
    return "transformers" in sys.modules and find_spec("peft") is not None and has_embedding
