"""What is asked of a plan: the job, the device, the options, and what follows from them.

Start reading at `Request`; `Request.bases` has the settings that a search starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from brimful.devices import Device
from brimful.errors import UsageError
from brimful.options import (
    PlanOptions,
    keeps_own_checkpointing,
    parse_compiles,
    parse_memory_formats,
    parse_parallelisms,
    parse_precision,
    parse_recompute,
    prefers_simplest,
)
from brimful.settings import (
    Action,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    check_fsdp2_alone,
    fp16_is_divided,
)
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTraits:
    """Properties of a job that the planner needs in addition to its captures."""

    name: str
    why_not_split: str | None = None
    """Why the job's batches cannot be split; None if they can. Then each rank's part is one micro-batch."""
    weighs_by_count: bool = False
    """Whether the job defines what its loss averages over."""
    brings_own_loop: bool = False
    """Whether the job has its own training loop, which a plan does not use."""
    has_default_optimizer: bool = False
    """Whether the job has the optimizer of one that does not choose any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the planner."""

    job: JobTraits
    device: Device
    budget_bytes: int
    """Bytes permitted to each rank on its device, including the CUDA context."""
    global_batch_size: int
    limit_bytes: int | None = None
    """What must not be exceeded: without a budget, what the device has free; None is the budget."""
    world_size: int = 1
    """Number of ranks, which divide the global batch evenly."""
    num_nodes: int = 1
    """Number of machines among which the ranks are divided."""
    asked: PlanOptions = field(default_factory=PlanOptions)
    """The options; what they ask of the host and of implementations is in the fields below."""
    implementations: Mapping[str | None, OptimizerImplementation | None] = field(default_factory=dict)
    """The implementation of each optimizer in every candidate; without one it is the optimizer's own, as in the
    baseline."""
    offload_host_bytes: int = 0
    """Host memory that offloaded units and an offloaded optimizer may take; with 0, no plan offloads."""

    def __post_init__(self) -> None:
        pinned = self.asked.micro_batch_size
        if self.asked.optimizer_in_backward and pinned not in (None, self.global_batch_size):
            raise UsageError(
                f"micro_batch_size is {pinned}, and optimizer_in_backward takes the global "
                f"batch of {self.global_batch_size} at once. Set only one of the two."
            )
        if self.job.why_not_split is not None:
            self._check_whole(self.job.why_not_split)
        self._check_division()
        if self.precisions == (Precision.FP16,) and Parallelism.DDP not in self.parallelisms:
            raise fp16_is_divided(self.parallelisms[0])
        check_fsdp2_alone(self.asked, self.parallelisms)
        if not 0 < self.asked.max_exceedance <= 1:
            raise UsageError(
                f"max_exceedance is {self.asked.max_exceedance!r}; a probability is above 0 and at most 1. "
                "0.01 is 1 %."
            )
        prefers_simplest(self.asked.effort)  # these raise if a name is unknown, or names contradict
        parse_recompute(self.asked.recompute)
        if Compile.NONE not in self.compiles:
            replace(self.baseline_settings(), compile=self.compiles[0])
        self.bases()

    def _check_division(self) -> None:
        """Check that ranks divide the global batch evenly; UsageError if not."""
        if self.global_batch_size % self.world_size:
            nearest = max(round(self.global_batch_size / self.world_size), 1) * self.world_size
            raise UsageError(
                f"the global batch size {self.global_batch_size} cannot be divided evenly among "
                f"{self.world_size} ranks. Nearest that can: {nearest}."
            )

    def _check_whole(self, why_not_split: str) -> None:
        """Check that nothing asks for parts of a batch that cannot be split."""
        asked = f"Parts of each batch for {self.world_size} ranks" if self.world_size > 1 else ""
        if self.asked.micro_batch_size not in (None, self.rank_batch_size):
            asked = f"Micro-batches of {self.asked.micro_batch_size} of {self.global_batch_size} samples"
        if asked:
            raise UsageError(f"{asked} cannot be formed: {why_not_split}")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Permitted precisions; the first is that of the baseline."""
        if self.asked.precision == "auto":
            return tuple(each for each in Precision if self.device.supports(each))
        return tuple(parse_precision(name.strip()) for name in self.asked.precision.split(","))

    @property
    def optimizers(self) -> tuple[str | None, ...]:
        """Permitted optimizers by name, of which None is the job's own; the first is that of the baseline."""
        return tuple(dict.fromkeys((self.asked.optimizer, *self.asked.allow_optimizers)))

    @property
    def parallelisms(self) -> tuple[Parallelism, ...]:
        """Permitted ways to train on the ranks; the first is that of the baseline."""
        return parse_parallelisms(self.asked.parallelism, self.world_size)

    @property
    def memory_formats(self) -> tuple[MemoryFormat | None, ...]:
        """Permitted memory formats, of which None leaves the layout as it is, as the baseline does."""
        return parse_memory_formats(self.asked.memory_format)

    @property
    def compiles(self) -> tuple[Compile, ...]:
        """What `torch.compile` may compile; `bases` compile nothing."""
        return parse_compiles(self.asked.compile)

    @property
    def recompute(self) -> Action | None:
        """The action for all units; None lets the plan choose for each."""
        return parse_recompute(self.asked.recompute)

    @property
    def prefers_simplest(self) -> bool:
        """Whether the simplest is chosen among plans whose times cannot be distinguished, not the fastest."""
        return prefers_simplest(self.asked.effort)

    @property
    def rank_batch_size(self) -> int:
        """Samples of the global batch that each rank computes."""
        return self.global_batch_size // self.world_size

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Divisors of a rank's part of the global batch, largest first, or the one size that is pinned.

        A pinned size that is not a divisor raises UsageError.
        """
        is_whole = self.asked.optimizer_in_backward or self.job.why_not_split is not None
        pinned = self.rank_batch_size if is_whole else self.asked.micro_batch_size
        if pinned is None:
            return _divisors(self.rank_batch_size)
        if self.rank_batch_size % pinned:
            near = min(_divisors(self.rank_batch_size), key=lambda size: abs(size - pinned))
            is_global = self.world_size == 1
            whose = "the global batch size" if is_global else "a rank's part of the global batch,"
            raise UsageError(
                f"micro_batch_size {pinned} does not divide {whose} {self.rank_batch_size}. "
                f"Nearest that does: {near}."
            )
        return (pinned,)

    def baseline_settings(self) -> Settings:
        """Training without a plan: the whole global batch at once, everything kept."""
        parallelism = self.parallelisms[0]
        return Settings(
            micro_batch_size=self.rank_batch_size,
            precision=self.precisions[0],
            optimizer=self.asked.optimizer,
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            parallelism=parallelism,
            param_dtype=self.asked.param_dtype if parallelism is Parallelism.FSDP2 else None,
        )

    def bases(self) -> tuple[Settings, ...]:
        """What may be chosen for the whole of a step, each with the whole batch at once and everything kept."""
        asked = self.asked
        return tuple(
            Settings(
                micro_batch_size=self.rank_batch_size,
                precision=precision,
                optimizer=optimizer,
                optimizer_implementation=self.implementations.get(optimizer),
                optimizer_in_backward=asked.optimizer_in_backward,
                offload_optimizer=bool(asked.offload_optimizer),
                prefetch_inputs=asked.prefetch_inputs,
                own_checkpointing=keeps_own_checkpointing(asked.own_checkpointing),
                memory_format=memory_format,
                world_size=self.world_size,
                num_nodes=self.num_nodes,
                parallelism=parallelism,
                **sharding,
            )
            for parallelism in self.parallelisms
            for sharding in self._shardings(parallelism)
            for optimizer in self.optimizers
            for precision in self.precisions
            if precision is not Precision.FP16 or self._may_take_fp16(parallelism)
            for memory_format in self._memory_formats(parallelism)
        )

    def _shardings(self, parallelism: Parallelism) -> tuple[dict[str, Any], ...]:
        """Settings of FSDP2, each decided, what takes less memory first; none under another way to train."""
        if parallelism is not Parallelism.FSDP2:
            return ({},)
        pinned = self.asked.reshard_after_forward
        common = {"param_dtype": self.asked.param_dtype, "offload_parameters": self.asked.offload_parameters}
        return tuple(
            {"reshard_after_forward": each, **common}
            for each in ((True, False) if pinned is None else (pinned,))
        )

    def _may_take_fp16(self, parallelism: Parallelism) -> bool:
        """Whether fp16, one of several precisions perhaps, can be combined with what is asked."""
        is_choice = len(self.precisions) > 1
        return parallelism is Parallelism.DDP and not (self.asked.optimizer_in_backward and is_choice)

    def _memory_formats(self, parallelism: Parallelism) -> tuple[MemoryFormat | None, ...]:
        """The memory formats to try: where a choice is left, only those that ranks can take."""
        is_sharded = self.world_size > 1 and parallelism is not Parallelism.DDP
        return self.memory_formats[:1] if is_sharded else self.memory_formats

    @property
    def may_offload_optimizer(self) -> bool:
        """Whether a plan may put the optimizer on the host, where several ranks would share its processors."""
        is_apart = self.device.kind == "cuda" and self.world_size == 1 and not self.asked.optimizer_in_backward
        return is_apart and self.asked.offload_optimizer is None and self.offload_host_bytes > 0

    @property
    def reserved_budget_bytes(self) -> int:
        """Bytes of the budget for the allocator, without the CUDA context."""
        return self.budget_bytes - self.device.context_bytes

    def for_model(self, baseline: Trace) -> Request:
        """The request with the choices that matter to the model of the baseline."""
        if baseline.convolves_images or len(self.memory_formats) == 1:
            return self
        return replace(self, asked=replace(self.asked, memory_format=str(self.memory_formats[0])))

    def keeps_batch_whole(self, baseline: Trace) -> bool:
        """Whether splitting the batch would change the mathematics and is not permitted."""
        return (
            bool(baseline.batch_coupled_modules)
            and not self.asked.split_batch_norm
            and self.asked.micro_batch_size is None
        )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(number, 0, -1) if number % d == 0)
