"""What watching a run saw: its ops and memory, and facts that no trace has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low

from brimful.results.measurement import busy_text
from brimful.torch_utils.held_names import Holding
from brimful.trace import Phase, Trace


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
    line: str = ""
    """Where the optimizer's step is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A call of backward."""

    line: str
    step: int
    updates_before: int
    """How often an optimizer, or the loop by hand, has changed parameters before it."""
    leaves: int
    """Stands for the parameters that it reaches: equal for equal ones."""
    is_scaled: bool
    """Whether a loss is multiplied by something, or is a sum of samples, not a mean."""
    divisors: frozenset[float]
    """What a loss is divided by."""
    retains_graph: bool
    """Whether it keeps the graph, which no later backward of the step needs."""
    reduces: tuple[str, ...]
    """DDP models whose gradients it reduces over ranks."""
    zero_gradient_bytes: int
    """Bytes of gradients that are zero when it begins."""
    loses_gradients: bool
    """Whether gradients of an earlier backward of the step are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedGraph:
    """A forward that builds a graph which no backward uses."""

    line: str
    saved_bytes: int
    """The most bytes that graphs of this line hold at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOptimized:
    """A model that gets gradients, and of whose parameters no optimizer has any."""

    name: str
    line: str
    """Where it is called."""
    size_bytes: int
    """Bytes of its gradients, and of what its graphs save where nothing else needs them."""
    passes_gradients_on: bool
    """Whether its inputs come from something that gets gradients through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A name that holds results of more and more samples as an evaluation runs."""

    name: str
    line: str
    growth_bytes: int
    """Bytes that it holds more after each forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Memory ran out while a recorded op ran."""

    op: str
    phase: Phase
    line: str
    message: str
    """First line of the error's message."""
    requested_bytes: int | None
    """What it asked for; None if the message does not say it."""

    @property
    def asked_label(self) -> str:
        """The name of the memory that was asked for, in the trace."""
        return f"asked for by {self.op}"


def _between_updates(calls: Iterable[Backward]) -> dict[tuple[str, int], list[Backward]]:
    """Calls of one line and of the same parameters without a change of parameters between them.

    Calls whose gradients are gone when another line adds its own, as those of an attack, are none.
    """
    groups: dict[tuple[str, int, int], list[Backward]] = defaultdict(list)
    for each in calls:
        key = each.line, each.leaves, each.updates_before
        for other in [*groups] if each.loses_gradients else ():
            if other != key and other[2] == each.updates_before:
                del groups[other]
        groups[key].append(each)
    found: dict[tuple[str, int], list[Backward]] = {}
    for (line, leaves, _), group in groups.items():
        found[line, leaves] = max(found.get((line, leaves), []), group, key=len)
    return found


_LACKING = {
    "sharded": "weights that FSDP2 gathers are not counted, and checks of gradients are silent",
    "evaluation": "an evaluation between these steps was recorded in part: its peak may be higher",
    "full": "recording ended, as too many ops ran before an optimizer of torch.optim had stepped often enough",
}
"""What the figures lack, by flag."""
_NO_STEP = "no optimizer of torch.optim stepped while recording ran, so the figures are of all that ran"
_NOT_NAMED = (
    "memory grows, and no name that was looked at keeps more, of variables, containers and objects in objects: "
    "look into deeper ones, into libraries, and at the state of the optimizer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What watching a run saw, until it ended or was left alone."""

    trace: Trace
    """All ops so far and their memory; setup is what ran before the first training forward.

    Forwards whose graphs no backward uses are evaluations.
    """
    steps: tuple[StepEnd, ...]
    """Ends of the recorded optimizer steps."""
    held_in_forward: Mapping[str, Holding] = field(default_factory=dict)
    """What names of the user's code hold when the last recorded step begins its first forward."""
    time_shares: tuple[tuple[str, float], ...] = ()
    """Shares of a step by kind of operation, largest first, as torch's profilers measure them."""
    launches: int | None = None
    """Kernels that a step launches; None on a CPU."""
    host_waiting_seconds: float | None = None
    """Time of the profiled step in which the host waits for the GPU, by synchronising; None on a CPU."""
    profiled_seconds: float | None = None
    """Time of the step between those that are recorded and those that run unwatched: it is profiled."""
    seconds_after: tuple[float, ...] = ()
    """Times of the steps after those, which ran unwatched."""
    core_wait_fraction: float | None = None
    """Part of the time of those steps in which a thread waited for a processor; None if not known."""
    data_seconds_after: tuple[float, ...] = ()
    """Parts of them in which the run waited for its DataLoader."""
    backwards: tuple[Backward, ...] = ()
    evaluations: tuple[UnusedGraph, ...] = ()
    gathered: tuple[Gathered, ...] = ()
    """What the first evaluation gathers on the device."""
    trained_in_evaluation_mode: tuple[str, ...] = ()
    """Lines that call a model in evaluation mode, of whose result backward runs."""
    unused_graphs: tuple[UnusedGraph, ...] = ()
    """Those in training mode, within a step; `evaluations` are those in evaluation mode."""
    gradients_added: tuple[str, ...] = ()
    """Lines of backward that add to gradients which an optimizer has used and uses again."""
    frozen_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that graphs save only for gradients of inputs, which nothing reads, by line of backward."""
    adam: str = ""
    """Which of Adam and AdamW step, where no other optimizer has such state, nor they more of it."""
    divides_gradients: bool = False
    """Whether something that backward made is divided before the optimizer steps."""
    softmax_twice: tuple[str, ...] = ()
    """Lines that call a softmax whose result another one reads."""
    untrained_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parameters of models that run in steps and get no gradients, by name."""
    models: tuple[str, ...] = ()
    """Classes of the models that the run calls, wrappers included."""
    batch_norms: tuple[str, ...] = ()
    """Paths of BatchNorm modules in training mode; of a captured step, of all of them."""
    not_optimized: Mapping[str, int] = field(default_factory=dict)
    """Bytes of gradients of parameters that no optimizer steps, by name; but for `not_optimized_models`."""
    not_optimized_models: tuple[NotOptimized, ...] = ()
    host_reads: Mapping[str, int] = field(default_factory=dict)
    """How often lines of code waited for a value from the device, outside of optimizers."""
    last_reads: Mapping[int, int] = field(default_factory=dict)
    """The op that read each storage last, of those that no graph saves."""
    pageable_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that lines of code copied to a GPU in recorded steps, of memory that is not pinned."""
    made_on_the_host: Mapping[str, int] = field(default_factory=dict)
    """How often lines of code copied to a GPU what a forward had made on the host."""
    cache_flushes: Mapping[str, int] = field(default_factory=dict)
    """How often lines of code called `torch.cuda.empty_cache` in recorded steps."""
    loading_line: str = ""
    """The line that waited longest for a DataLoader."""
    loader_workers: int | None = None
    """Workers of that DataLoader."""
    flags: tuple[str, ...] = ()
    """Settings of torch that are on: "anomaly", "cudnn.benchmark", "expandable segments".

    Also "sharded" for parameters of FSDP2, "evaluation" where one was not recorded whole, and "full" where
    recording ended as too many ops ran.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures lack."""
        lacking = [text for flag, text in _LACKING.items() if flag in self.flags]
        busy = busy_text(self.core_wait_fraction)
        has_no_step = not (self.steps or self.failed or "full" in self.flags)
        caught = [
            f"memory ran out in {line or 'the script'}, and the run went on: what it asked for is not counted"
            for line in self.caught
        ]
        return (
            *([_NO_STEP] if has_no_step else ()),
            *caught,
            *lacking,
            *([_NOT_NAMED] if self._grows_unnamed else ()),
            *([f"{busy}: steps may be quicker without it"] if busy else ()),
        )

    @property
    def _grows_unnamed(self) -> bool:
        """Whether live memory grows, and no name holds more than before, or graphs of earlier steps."""
        if not self.growth_bytes or self.growth_bytes < 0:
            return False
        before, last = (each.held for each in self.steps[-2:])
        return not any(
            held.reaches_back or name not in before or held.size_bytes > before[name].size_bytes
            for name, held in last.items()
        )

    input_shapes: int = 0
    """Different shapes of the inputs of training forwards, but for the number of samples."""
    error: str = ""
    """An error of brimful's own, where recording ended; "" if there was none."""
    compiled: str = ""
    """The line that calls compiled code, where recording ended; "" if none did."""
    failed: Failure | None = None
    caught: tuple[str, ...] = ()
    """Lines at which memory ran out, and after which the run went on."""
    measured_peak_bytes: int | None = None
    """torch's own measurement of allocated memory; None on a CPU."""

    @classmethod
    def of_trace(cls, trace: Trace, optimizer: str = "") -> Evidence:
        """What the captured steps of a job show, which did not run: nothing but what is in their trace.

        `optimizer` is the name of one, as a `Job` has it, or "" for another. Ends of steps have no time and no
        memory, so that nothing is concluded from them.
        """
        first_ops = {op.step: index for index, op in reversed([*enumerate(trace.ops)])}
        ends = [first_ops.get(step + 1, len(trace.ops)) for step in range(trace.captured_steps)]
        return cls(
            trace=trace,
            adam={"adam": "Adam", "adamw": "AdamW"}.get(optimizer, "Adam or AdamW"),
            steps=tuple(StepEnd(seconds=None, live_bytes=0, op=end, held={}) for end in ends),
            models=tuple(name for path, name in trace.module_classes if not path),
            batch_norms=tuple(path for path, name in trace.module_classes if name.startswith("BatchNorm")),
        )

    @property
    def whole_steps(self) -> int:
        """Steps of which all is recorded, at least 1: what follows the last one's end is not."""
        return max(len(self.steps) - 1, 1)

    @property
    def repeated(self) -> dict[str, list[Backward]]:
        """Calls of backward of the last recorded step that are to accumulate gradients, by line.

        They are those of one line and of the same parameters, as often in the step before.
        """
        last = len(self.steps) - 1
        before, now = (
            _between_updates(each for each in self.backwards if each.step == step) for step in (last - 1, last)
        )
        return {key[0]: calls for key, calls in now.items() if 1 < len(calls) == len(before.get(key, ()))}

    @property
    def accumulated(self) -> dict[str, list[Backward]]:
        """Calls of backward of the last recorded step whose gradients add up, by line."""
        return {
            line: calls
            for line, calls in self.repeated.items()
            if not any(each.loses_gradients for each in calls[1:])
        }

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, as far as calls of backward show them; at least 1."""
        return max(map(len, self.accumulated.values()), default=1)

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
        """Time that recording and profiling added to the steps, the first not measured.

        Each counts where its steps are slower than every unwatched one; None if neither is, or if not known.
        """
        recorded = [each.seconds for each in self.steps if each.seconds is not None]
        if not (recorded and self.seconds_after):
            return None
        plain, slowest = median(self.seconds_after), max(self.seconds_after)
        watched = (median_low(recorded), len(self.steps)), (self.profiled_seconds or 0.0, 1)
        added = [(seconds - plain) * count for seconds, count in watched if seconds > slowest]
        return sum(added) if added else None
