"""What watching a run saw: its ops and memory, and facts that no trace has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from brimful.doctor.names import Holding
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The end of an optimizer step."""

    seconds: float | None
    """Time since the end of the step before; None for the first."""
    live_bytes: int
    op: int
    """Number of ops until then."""
    held: Mapping[str, Holding]
    """What names of the user's code hold then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A call of backward."""

    line: str
    step: int
    last_node: str
    """Name of the autograd node of what it begins with, such as "DivBackward0"."""
    retains_graph: bool
    syncs: bool
    """Whether gradients are reduced over ranks in it."""
    gradient_bytes: int
    """Bytes of gradients that are there when it begins."""
    adds_gradients: bool
    """Whether any of those is not zero."""
    loses_gradients: bool
    """Whether gradients of an earlier backward of the step are gone, though no optimizer stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A forward that builds a graph which no backward uses."""

    line: str
    saved_bytes: int
    """Bytes that it holds when it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Memory ran out while a recorded op ran."""

    op: str
    line: str
    message: str
    """First line of the error's message."""
    requested_bytes: int | None
    """What it asked for; None if the message does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What watching a run saw, until it ended or was left alone."""

    trace: Trace
    """All ops so far and their memory; setup is what ran before the first training forward."""
    steps: tuple[StepEnd, ...]
    """Ends of the recorded optimizer steps."""
    held_in_forward: Mapping[str, Holding]
    """What names of the user's code hold when the last recorded step begins its first forward."""
    seconds_after: tuple[float, ...]
    """Times of the steps after those, which ran unwatched."""
    data_seconds_after: tuple[float, ...]
    """Parts of them in which the run waited for its DataLoader."""
    backwards: tuple[Backward, ...]
    evaluations: tuple[Evaluation, ...]
    trained_in_evaluation_mode: tuple[str, ...]
    """Lines that call a model in evaluation mode, of whose result backward runs."""
    unused_graphs: tuple[Evaluation, ...]
    """Forwards in training mode that build a graph which no backward of the step uses."""
    untrained_bytes: Mapping[str, int]
    """Bytes of parameters of models that run in steps and get no gradients, by class."""
    models: tuple[str, ...]
    """Classes of the models that the run calls, wrappers included."""
    not_optimized: Mapping[str, int]
    """Bytes of gradients of parameters that no optimizer steps, by name."""
    host_reads: Mapping[str, int]
    """How often lines of code waited for a value from the device, outside of optimizers."""
    cache_flushes: Mapping[str, int]
    """How often lines of code called `torch.cuda.empty_cache` in recorded steps."""
    loader_workers: tuple[int, ...]
    """Workers of each DataLoader that was read."""
    flags: tuple[str, ...]
    """Settings of torch that are on: "anomaly", "cudnn.benchmark"."""
    input_shapes: int
    """Different shapes of the inputs of training forwards, but for the number of samples."""
    compiled: str
    """The line that calls `torch.compile`, where recording ended; "" if none did."""
    failed: Failure | None
    measured_peak_bytes: int | None
    """torch's own measurement of allocated memory; None on a CPU."""

    @property
    def micro_batches(self) -> int:
        """Calls of backward in the last recorded step that has any; at least 1."""
        last = max((each.step for each in self.backwards), default=0)
        return max(sum(each.step == last for each in self.backwards), 1)

    @property
    def growth_bytes(self) -> int | None:
        """Bytes by which live memory grows in a step, after the first; None without three steps."""
        grown = [after - before for before, after in pairwise(each.live_bytes for each in self.steps)]
        return min(grown[1:], default=None)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step that ran unwatched."""
        return median(self.seconds_after) if self.seconds_after else None

    @property
    def watching_seconds(self) -> float | None:
        """Time that recording added to the steps, the first one not counted; None if that is not known."""
        recorded = [each.seconds for each in self.steps if each.seconds is not None]
        if not (recorded and self.seconds_after):
            return None
        return max(median(recorded) - median(self.seconds_after), 0.0) * len(self.steps)
