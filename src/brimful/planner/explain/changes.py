"""Changes of what is computed, which are made only if they are asked for: what they change, and how to ask.

Start reading at `Change`; the functions below it have those that may help a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from brimful.memory import most_held_bytes
from brimful.options import parse_parallelisms
from brimful.planner.request import Request
from brimful.prediction.estimator import Capture
from brimful.settings import Parallelism, Precision
from brimful.trace import Category, Trace

LEAST_GAIN = 0.03
"""Smallest fraction of the step time that a suggestion to a plan gains: the median error of predicted steps
(`benchmarks/results/times_vision.json`, 3.1 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of what is computed, and how to ask for it."""

    name: str
    effect: str
    option: str
    flag: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Settings` with their values."""
    capture: Capture | None = None
    """Captures steps of the changed job; None if the job stays as it is."""
    variant: Mapping[str, str] = field(default_factory=dict)
    """Options of the model that change the job, as for `find_architecture`: "dtype", "lora", "quantize"."""
    splits_batch: bool = False
    """Whether it permits micro-batches where the request does not."""
    recomputes_all: bool = False
    """Whether it recomputes every unit."""
    takes_less: bool = True
    """Whether a step takes less memory, so that more may be kept."""
    gains_speed: bool = True
    """Whether a step is faster by more than what its memory permits."""
    floor_bytes: int | None = None
    """Bytes that every step of the changed job holds; None if its settings show it."""
    may_be_refused: bool = False
    """Whether the model may not take the samples; then that its step cannot be captured is not noted."""
    keeps_state: bool = False
    """Whether parameters, gradients and optimizer state take as much as before."""
    family: str | None = None
    """Of the changes of one family, the first with which a step fits is suggested."""

    @property
    def keeps_ranks(self) -> bool:
        """Whether the number of ranks stays."""
        return "world_size" not in self.settings


JobChanges = Callable[[Trace], Iterable[Change]]
"""The changes of a job that may help, given training without a plan."""


_PRECISIONS: Mapping[Precision, tuple[str, str]] = {
    Precision.BF16: ("bf16 autocast", "products have 8 significant bits; weights and updates stay float32"),
    Precision.FP16: (
        "fp16 autocast",
        "products have 11 significant bits and a scaled loss; updates stay float32",
    ),
    Precision.TF32: ("TF32 products", "products round their inputs to 11 significant bits"),
}
"""What each precision is called and changes. Source: torch.amp, torch.backends.cuda.matmul (torch 2.13)."""

_OPTIMIZERS: Mapping[str, str] = {
    "adamw8bit": "AdamW with its state in 8 bits, by blocks",
    "adafactor": "other updates, with second moments of rows and columns of each matrix",
    "sgd": "other updates, with momentum alone",
}
"""Optimizers with less state than Adam, and what they change."""

_ADAM_BYTES = 7.9
"""Bytes of state for each parameter from which an optimizer counts as Adam, which has 8."""


def precision_changes(request: Request) -> Iterator[Change]:
    """Autocast to the usual half precision of the device, and TF32."""
    if request.precisions != (Precision.FP32,):
        return
    supported = [each for each in _PRECISIONS if request.device.supports(each)]
    if Precision.BF16 in supported:
        supported.remove(Precision.FP16)
    if request.device.kind == "cuda" and Precision.TF32 in supported and not _is_faster_in_tf32(request):
        supported.remove(Precision.TF32)
    for precision in supported:
        name, effect = _PRECISIONS[precision]
        yield Change(
            name=name,
            effect=effect,
            option=f'precision="{precision}"',
            flag=f"--precision {precision}",
            settings={"precision": precision},
            takes_less=precision is not Precision.TF32,
            keeps_state=True,
        )


def _is_faster_in_tf32(request: Request) -> bool:
    in_fp32, in_tf32 = map(request.device.peak_flops_per_second, (Precision.FP32, Precision.TF32))
    return in_fp32 is None or in_tf32 is None or in_tf32 > in_fp32 * (1 + LEAST_GAIN)


def optimizer_changes(request: Request, baseline: Trace, *, takes_all: bool) -> Iterator[Change]:
    """Optimizers with less state in place of Adam, or only the one most like it."""
    state_bytes = most_held_bytes(baseline, Category.OPTIMIZER_STATE) + baseline.host_state_bytes
    is_adam = state_bytes >= _ADAM_BYTES * baseline.trainable_parameter_count
    if not is_adam or request.asked.allow_optimizers or request.world_size > 1:
        return
    for name, effect in _OPTIMIZERS.items():
        on_host = bool(request.asked.offload_optimizer)
        if name != "adamw8bit" or (request.device.kind == "cuda" and not on_host):  # bitsandbytes' is for GPUs
            yield Change(
                name=f"optimizer {name}",
                effect=effect,
                option=f'optimizer="{name}"',
                flag=f"--optimizer {name}",
                settings={"optimizer": name, "optimizer_implementation": None, "offload_optimizer": on_host},
                gains_speed=False,
            )
            if not takes_all:
                return


def batch_norm_split(baseline: Trace) -> Change:
    """Micro-batches where BatchNorm, or state that forwards update, couples the samples of a batch."""
    has_norms = bool(baseline.batch_norm_modules)
    return Change(
        name="micro-batches",
        effect=f"{'BatchNorm has statistics' if has_norms else 'forwards update their state'} of micro-batches",
        option="split_batch_norm=True",
        flag="--split-batch-norm",
        splits_batch=True,
        gains_speed=False,
    )


_NORMS = ", BatchNorm with statistics of its half"


def two_gpus(request: Request, baseline: Trace, parallelism: Parallelism) -> Iterator[Change]:
    """A second GPU, where half of the global batch can be a rank's part."""
    asked = request.asked
    is_one = request.device.kind == "cuda" and request.world_size == 1
    divides = request.global_batch_size % 2 == 0 and request.job.why_not_split is None
    if asked.micro_batch_size is not None:
        divides &= request.global_batch_size // 2 % asked.micro_batch_size == 0
    is_permitted = parallelism in parse_parallelisms(asked.parallelism, 2)
    is_permitted &= not (asked.offload_optimizer or asked.optimizer_in_backward)
    if is_one and divides and is_permitted:
        yield Change(
            name="two GPUs",
            effect=f"each computes half of the global batch{_NORMS if baseline.batch_norm_modules else ''}",
            option="world_size=2",
            flag="--world-size 2",
            settings={"world_size": 2, "parallelism": parallelism, "offload_optimizer": False},
        )
