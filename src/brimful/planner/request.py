"""What is asked of a plan: the job and the device, what is pinned, what is permitted, and the ranks.

Start reading at `Request`; `Request.bases` has the settings that a search starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from brimful.devices import Device
from brimful.errors import UsageError
from brimful.settings import (
    Action,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    check_counts,
    fp16_is_divided,
)
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """An optimizer that may be used in place of the job's own."""

    name: str
    implementation: OptimizerImplementation | None = None


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
class Pins:
    """Settings that are pinned; None lets the plan choose."""

    micro_batch_size: int | None = None
    recompute: Action | None = None
    """The action for all units."""
    optimizer: str | None = None
    """Name of the optimizer, also in the baseline; None is the job's own."""
    optimizer_implementation: OptimizerImplementation | None = None
    """Implementation in every candidate; None keeps the optimizer's own, as in the baseline."""
    optimizer_in_backward: bool = False
    """Whether parameters are updated in backward, which requires an unsplit batch."""
    offload_optimizer: bool | None = False
    prefetch_inputs: bool = False
    """Whether the next micro-batch is copied to the device while the current one is computed."""
    own_checkpointing: bool = True
    """Whether to keep the model's own activation checkpointing, as the baseline does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permits:
    """Choices that a plan is permitted."""

    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Permitted precisions; the first is that of the baseline."""
    other_optimizers: tuple[OptimizerChoice, ...] = ()
    """Optimizers permitted in addition to the baseline's. They change the mathematics."""
    chunked_loss: bool = True
    """Whether a loss over a large vocabulary may be computed for one chunk of the tokens at a time."""
    expandable_segments: bool = True
    """Whether the CUDA allocator may use expandable segments."""
    offload_host_bytes: int = 0
    """Host memory that offloaded units and an offloaded optimizer may take; with 0, no plan offloads."""
    splits_coupled_batches: bool = False
    """Whether a batch may be split although a layer couples its samples (BatchNorm) or each forward changes
    what the next one finds (spectral norm), which changes what is computed. False keeps the mathematics: such a
    model trains its whole batch at once."""
    exceedance: float = 1.0
    """Largest probability of exceeding the budget; 1 permits any."""
    prefers_simplest: bool = False
    """Whether the simplest is chosen among plans whose times cannot be distinguished, not the fastest."""
    memory_formats: tuple[MemoryFormat | None, ...] = (None,)
    """Permitted memory formats, of which None leaves the layout as it is, as the baseline does. Of a model
    without 2-d and 3-d convolutions the first alone is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Data-parallel ranks and the ways to train on them; the last three fields are for FSDP2."""

    world_size: int = 1
    """Number of ranks, which divide the global batch evenly."""
    num_nodes: int = 1
    """Number of machines among which the ranks are divided."""
    parallelisms: tuple[Parallelism, ...] = (Parallelism.DDP,)
    """Permitted ways to train on them; the first is that of the baseline."""
    reshard_after_forward: bool | None = None
    """Whether gathered parameters are freed after forward; None lets the plan choose."""
    param_dtype: str | None = None
    """Type to gather parameters in. It changes the mathematics slightly, so no plan chooses it by itself."""
    offload_parameters: bool = False

    def check_division(self, global_batch_size: int) -> None:
        """Check that ranks divide the global batch evenly; UsageError if not."""
        if global_batch_size % self.world_size:
            nearest = max(round(global_batch_size / self.world_size), 1) * self.world_size
            raise UsageError(
                f"the global batch size {global_batch_size} cannot be divided evenly among "
                f"{self.world_size} ranks. Nearest that can: {nearest}."
            )

    def check_nodes(self) -> None:
        """Check that ranks are divided evenly among nodes; UsageError if not."""
        if self.world_size % self.num_nodes:
            raise UsageError(f"{self.world_size} ranks cannot be divided evenly among {self.num_nodes} nodes.")

    def check_fsdp2(self) -> None:
        """Check that fields for FSDP2 are set only where it is permitted; UsageError if not."""
        if Parallelism.FSDP2 in self.parallelisms:
            return
        for name in ("reshard_after_forward", "param_dtype", "offload_parameters"):
            value = getattr(self, name)
            if value is None or (name == "offload_parameters" and not value):
                continue
            how = f"{name}={value!r}"
            if self.world_size == 1:
                on_host = " On one device offload_optimizer has the optimizer's state on the host."
                raise UsageError(
                    f"{how} is for FSDP2, which divides a model among several ranks; there is one. Leave "
                    "it out." + (on_host if name == "offload_parameters" else "")
                )
            raise UsageError(
                f"{how} is for FSDP2, which is not among the ways to train that are permitted "
                f"({', '.join(self.parallelisms)}, {self.world_size} ranks)."
            )

    def choices(self, parallelism: Parallelism) -> tuple[RankOptions, ...]:
        """The fields for FSDP2 under one way to train, each decided; what takes less memory first."""
        if parallelism is not Parallelism.FSDP2:
            return (replace(self, reshard_after_forward=True, param_dtype=None, offload_parameters=False),)
        pinned = self.reshard_after_forward
        reshards = (True, False) if pinned is None else (pinned,)
        return tuple(replace(self, reshard_after_forward=each) for each in reshards)


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
    pins: Pins = Pins()
    permits: Permits = Permits()
    ranks: RankOptions = RankOptions()

    def __post_init__(self) -> None:
        check_counts(self, "global_batch_size")
        check_counts(self.ranks, "world_size", "num_nodes")
        pinned = self.pins.micro_batch_size
        if pinned is not None:
            check_counts(self.pins, "micro_batch_size")
        self.ranks.check_nodes()
        if self.pins.optimizer_in_backward and pinned not in (None, self.global_batch_size):
            raise UsageError(
                f"micro_batch_size is {pinned}, and optimizer_in_backward takes the global "
                f"batch of {self.global_batch_size} at once. Set only one of the two."
            )
        if self.job.why_not_split is not None:
            self._check_whole(self.job.why_not_split)
        self.ranks.check_division(self.global_batch_size)
        if self.permits.precisions == (Precision.FP16,) and Parallelism.DDP not in self.ranks.parallelisms:
            raise fp16_is_divided(self.ranks.parallelisms[0])
        self.ranks.check_fsdp2()

    def _check_whole(self, why_not_split: str) -> None:
        """Check that nothing asks for parts of a batch that cannot be split."""
        asked = f"Parts of each batch for {self.ranks.world_size} ranks" if self.ranks.world_size > 1 else ""
        if self.pins.micro_batch_size not in (None, self.rank_batch_size):
            asked = f"Micro-batches of {self.pins.micro_batch_size} of {self.global_batch_size} samples"
        if asked:
            raise UsageError(f"{asked} cannot be formed: {why_not_split}")

    @property
    def rank_batch_size(self) -> int:
        """Samples of the global batch that each rank computes."""
        return self.global_batch_size // self.ranks.world_size

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Divisors of a rank's part of the global batch, largest first, or the one size that is pinned.

        A pinned size that is not a divisor raises UsageError.
        """
        is_whole = self.pins.optimizer_in_backward or self.job.why_not_split is not None
        pinned = self.rank_batch_size if is_whole else self.pins.micro_batch_size
        if pinned is None:
            return _divisors(self.rank_batch_size)
        if self.rank_batch_size % pinned:
            near = min(_divisors(self.rank_batch_size), key=lambda size: abs(size - pinned))
            is_global = self.ranks.world_size == 1
            whose = "the global batch size" if is_global else "a rank's part of the global batch,"
            raise UsageError(
                f"micro_batch_size {pinned} does not divide {whose} {self.rank_batch_size}. "
                f"Nearest that does: {near}."
            )
        return (pinned,)

    def baseline_settings(self) -> Settings:
        """Training without a plan: the whole global batch at once, everything kept."""
        parallelism = self.ranks.parallelisms[0]
        return Settings(
            micro_batch_size=self.rank_batch_size,
            precision=self.permits.precisions[0],
            optimizer=self.pins.optimizer,
            world_size=self.ranks.world_size,
            num_nodes=self.ranks.num_nodes,
            parallelism=parallelism,
            param_dtype=self.ranks.choices(parallelism)[0].param_dtype,
        )

    def bases(self) -> tuple[Settings, ...]:
        """What may be chosen for the whole of a step, each with the whole batch at once and everything kept."""
        pins, permits = self.pins, self.permits
        own = (pins.optimizer, pins.optimizer_implementation)
        optimizers = (own, *((other.name, other.implementation) for other in permits.other_optimizers))
        return tuple(
            Settings(
                micro_batch_size=self.rank_batch_size,
                precision=precision,
                optimizer=name,
                optimizer_implementation=implementation,
                optimizer_in_backward=pins.optimizer_in_backward,
                offload_optimizer=bool(pins.offload_optimizer),
                prefetch_inputs=pins.prefetch_inputs,
                own_checkpointing=pins.own_checkpointing,
                memory_format=memory_format,
                world_size=ranks.world_size,
                num_nodes=ranks.num_nodes,
                parallelism=parallelism,
                reshard_after_forward=bool(ranks.reshard_after_forward),
                param_dtype=ranks.param_dtype,
                offload_parameters=ranks.offload_parameters,
            )
            for parallelism in self.ranks.parallelisms
            for ranks in self.ranks.choices(parallelism)
            for name, implementation in optimizers
            for precision in permits.precisions
            if precision is not Precision.FP16 or self._may_take_fp16(parallelism)
            for memory_format in self._memory_formats(parallelism)
        )

    def _may_take_fp16(self, parallelism: Parallelism) -> bool:
        """Whether fp16, one of several precisions perhaps, can be combined with what is asked."""
        is_choice = len(self.permits.precisions) > 1
        return parallelism is Parallelism.DDP and not (self.pins.optimizer_in_backward and is_choice)

    def _memory_formats(self, parallelism: Parallelism) -> tuple[MemoryFormat | None, ...]:
        """The memory formats to try: where a choice is left, only those that ranks can take."""
        formats = self.permits.memory_formats
        is_sharded = self.ranks.world_size > 1 and parallelism is not Parallelism.DDP
        return formats[:1] if is_sharded else formats

    @property
    def may_offload_optimizer(self) -> bool:
        """Whether a plan may put the optimizer on the host, where several ranks would share its processors."""
        is_apart = (
            self.device.kind == "cuda" and self.ranks.world_size == 1 and not self.pins.optimizer_in_backward
        )
        return is_apart and self.pins.offload_optimizer is None and self.permits.offload_host_bytes > 0

    @property
    def reserved_budget_bytes(self) -> int:
        """Bytes of the budget for the allocator, without the CUDA context."""
        return self.budget_bytes - self.device.context_bytes

    def for_model(self, baseline: Trace) -> Request:
        """The request with the choices that matter to the model of the baseline."""
        if baseline.convolves_images or len(self.permits.memory_formats) == 1:
            return self
        return replace(self, permits=replace(self.permits, memory_formats=self.permits.memory_formats[:1]))

    def keeps_batch_whole(self, baseline: Trace) -> bool:
        """Whether splitting the batch would change the mathematics and is not permitted."""
        return (
            bool(baseline.batch_coupled_modules)
            and not self.permits.splits_coupled_batches
            and self.pins.micro_batch_size is None
        )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(number, 0, -1) if number % d == 0)
