"""What is asked of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.devices import Device
from brimful.errors import UsageError
from brimful.settings import Action, OptimizerImplementation, Parallelism, Precision, Settings, check_counts
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """An optimizer that may be used in place of the job's own."""

    name: str
    implementation: OptimizerImplementation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a plan, and what is pinned."""

    job: str
    device: Device
    budget_bytes: int
    global_batch_size: int
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Those permitted; the first is that of plain training."""
    micro_batch_size: int | None = None
    """None lets the plan choose."""
    recompute: Action | None = None
    """The one action for all units; None lets the plan choose for each."""
    optimizer: str | None = None
    optimizer_implementation: OptimizerImplementation | None = None
    """That of every candidate; None leaves it to the optimizer, as plain training does."""
    other_optimizers: tuple[OptimizerChoice, ...] = ()
    """Permitted beside that of plain training. They change the mathematics."""
    permits_chunked_loss: bool = True
    """Whether a loss over a large vocabulary may be computed a part of the tokens at a time."""
    permits_expandable_segments: bool = True
    """Whether the CUDA allocator may be told to grow its segments."""
    optimizer_in_backward: bool = False
    """Whether parameters are updated in backward, which takes the batch whole."""
    offload_host_bytes: int = 0
    """Host memory that offloaded units and an optimizer on the host may take; where it is 0, no plan chooses
    either."""
    own_checkpointing: bool = True
    """Whether the model's own activation checkpointing stays as it is; plain training leaves it so."""
    prefetch_inputs: bool = False
    """Whether the next micro-batch is copied to the device while one is computed."""
    offload_optimizer: bool | None = False
    """None lets the plan choose."""
    why_not_split: str | None = None
    """Why the job's batches cannot be split; None if they can. Then each rank's part is one micro-batch."""
    weighs_by_count: bool = False
    """Whether the job says what its mean loss is a mean over."""
    brings_own_loop: bool = False
    """Whether the job has a training loop of its own, which a plan says nothing of."""
    world_size: int = 1
    """Data-parallel ranks that divide the global batch evenly."""
    num_nodes: int = 1
    """Machines among which they are divided."""
    parallelisms: tuple[Parallelism, ...] = (Parallelism.DDP,)
    """Ways to train on them that are permitted; the first is that of plain training."""
    reshard_after_forward: bool | None = None
    """Under FSDP2; None lets the plan choose."""
    param_dtype: str | None = None
    """Under FSDP2. It changes the mathematics a little, so that no plan chooses it by itself."""
    offload_parameters: bool = False
    """Under FSDP2."""
    splits_coupled_batches: bool = False
    """Whether a batch may be split although a layer couples its samples (BatchNorm) or changes its buffers in
    each forward (spectral norm), which changes what is computed. False keeps the mathematics: such a model
    trains its whole batch at once."""

    def __post_init__(self) -> None:
        check_counts(self, "global_batch_size", "world_size", "num_nodes")
        if self.world_size < 1 or self.num_nodes < 1 or self.world_size % self.num_nodes:
            raise UsageError(
                f"{self.world_size} ranks cannot be divided evenly among {self.num_nodes} nodes; both are at "
                "least 1."
            )
        if self.optimizer_in_backward and self.micro_batch_size not in (None, self.global_batch_size):
            raise UsageError(
                f"micro_batch_size is {self.micro_batch_size}, and optimizer_in_backward takes the global "
                f"batch of {self.global_batch_size} at once. Set only one of the two."
            )
        if self.why_not_split is not None:
            self._check_whole(self.why_not_split)
        if self.global_batch_size % self.world_size:
            nearest = max(round(self.global_batch_size / self.world_size), 1) * self.world_size
            raise UsageError(
                f"the global batch size {self.global_batch_size} cannot be divided evenly among "
                f"{self.world_size} ranks. Nearest that can: {nearest}."
            )

        for name in ("reshard_after_forward", "param_dtype", "offload_parameters"):
            is_asked = getattr(self, name) is not (False if name == "offload_parameters" else None)
            if is_asked and Parallelism.FSDP2 not in self.parallelisms:
                how = f"{name}={getattr(self, name)!r}"
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

    def _check_whole(self, why_not_split: str) -> None:
        """Check that nothing asks for parts of a batch that cannot be split."""
        asked = f"Parts of each batch for {self.world_size} ranks" if self.world_size > 1 else ""
        if self.micro_batch_size not in (None, self.rank_batch_size):
            asked = f"Micro-batches of {self.micro_batch_size} of {self.global_batch_size} samples"
        if asked:
            raise UsageError(f"{asked} cannot be formed: {why_not_split}")

    @property
    def rank_batch_size(self) -> int:
        """Samples of the global batch that each rank computes."""
        return self.global_batch_size // self.world_size

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Micro-batches to choose from.

        Returns:
            Divisors of a rank's part of the global batch, largest first, or the one that is pinned.

        Raises:
            UsageError: The pinned one is no divisor.
        """
        is_whole = self.optimizer_in_backward or self.why_not_split is not None
        pinned = self.rank_batch_size if is_whole else self.micro_batch_size
        if pinned is None:
            return _divisors(self.rank_batch_size)
        if self.rank_batch_size % pinned:
            near = min(_divisors(self.rank_batch_size), key=lambda size: abs(size - pinned))
            whose = "the global batch size" if self.world_size == 1 else "a rank's part of the global batch,"
            raise UsageError(
                f"micro_batch_size {pinned} does not divide {whose} {self.rank_batch_size}. "
                f"Nearest that does: {near}."
            )
        return (pinned,)

    def baseline_settings(self) -> Settings:
        """Training without a plan: the whole global batch at once, everything kept."""
        return Settings(
            micro_batch_size=self.rank_batch_size,
            precision=self.precisions[0],
            optimizer=self.optimizer,
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            parallelism=self.parallelisms[0],
            param_dtype=self._param_dtype(self.parallelisms[0]),
        )

    def bases(self) -> tuple[Settings, ...]:
        """What may be chosen for the whole of a step, each with the whole batch at once and everything kept."""
        own = (self.optimizer, self.optimizer_implementation)
        optimizers = (own, *((other.name, other.implementation) for other in self.other_optimizers))
        return tuple(
            Settings(
                micro_batch_size=self.rank_batch_size,
                precision=precision,
                optimizer=name,
                optimizer_implementation=implementation,
                optimizer_in_backward=self.optimizer_in_backward,
                offload_optimizer=bool(self.offload_optimizer),
                prefetch_inputs=self.prefetch_inputs,
                own_checkpointing=self.own_checkpointing,
                world_size=self.world_size,
                num_nodes=self.num_nodes,
                parallelism=parallelism,
                reshard_after_forward=reshards,
                param_dtype=self._param_dtype(parallelism),
                offload_parameters=self.offload_parameters and parallelism is Parallelism.FSDP2,
            )
            for parallelism in self.parallelisms
            for reshards in self._reshards(parallelism)
            for name, implementation in optimizers
            for precision in self.precisions
            if precision is not Precision.FP16 or not self._leaves_fp16_out(parallelism)
        )

    def _param_dtype(self, parallelism: Parallelism) -> str | None:
        return self.param_dtype if parallelism is Parallelism.FSDP2 else None

    def _reshards(self, parallelism: Parallelism) -> tuple[bool, ...]:
        """Whether gathered parameters are let go of after forward: what takes less memory first."""
        if parallelism is not Parallelism.FSDP2:
            return (True,)
        return (True, False) if self.reshard_after_forward is None else (self.reshard_after_forward,)

    def _leaves_fp16_out(self, parallelism: Parallelism) -> bool:
        """Whether fp16, one of several precisions perhaps, cannot be combined with what is asked."""
        is_choice = len(self.precisions) > 1
        return parallelism is not Parallelism.DDP or (self.optimizer_in_backward and is_choice)

    @property
    def may_offload_optimizer(self) -> bool:
        """Whether a plan may choose so: several ranks of a machine would share its processors."""
        is_apart = self.device.kind == "cuda" and self.world_size == 1 and not self.optimizer_in_backward
        return is_apart and self.offload_optimizer is None and self.offload_host_bytes > 0

    @property
    def reserved_budget_bytes(self) -> int:
        """What the budget leaves for the allocator beside the CUDA context."""
        return self.budget_bytes - self.device.context_bytes

    def keeps_batch_whole(self, baseline: Trace) -> bool:
        """Whether splitting the batch of plain training would change the mathematics and is not permitted."""
        return (
            bool(baseline.batch_coupled_modules)
            and not self.splits_coupled_batches
            and self.micro_batch_size is None
        )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(number, 0, -1) if number % d == 0)
