"""What held the memory when it ran out, and what would take less: facts of an error, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from brimful.memory.attribution import HeldStorage, ModuleShare, shares_of_modules
from brimful.trace import Category, Phase

EIGHT_BIT_BYTES = 2.03
"""State of AdamW in 8 bits for each parameter: see `brimful.optimizers`."""
FRAGMENTED_FRACTION = 0.05
"""Fraction of the allocated memory from which on reserved but unused memory is worth a change. A choice."""
_OF_MODEL = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
_MOST_PARTS = 64
"""Micro-batches into which a suggestion divides a batch. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change that takes less memory, whose amount follows from what the peak holds."""

    change: str
    size_bytes: int
    """About how much less; with another peak elsewhere in the step it is less than that."""


def smaller_micro_batches(of_batch_bytes: int, parts: int = 2, samples: int | None = None) -> Saving:
    """Micro-batches of a part of the samples; `of_batch_bytes` is what grows with them."""
    size = "half as large" if parts == 2 else f"1/{parts} as large"
    if samples is not None:
        each = -(-samples // parts)
        size = f"of {each} sample{'s' if each != 1 else ''} in place of {samples}"
    count = "two" if parts == 2 else parts
    return Saving(
        change=f"micro-batches {size}, {count} of them accumulated: the same gradients of a mean loss, "
        "but for BatchNorm",
        size_bytes=of_batch_bytes - of_batch_bytes // parts,
    )


def activation_checkpointing(freed_bytes: int) -> Saving:
    """Recomputation of the repeated blocks."""
    change = (
        "activation checkpointing of the repeated blocks: the same results but for BatchNorm's running "
        "statistics, a forward more"
    )
    return Saving(change=change, size_bytes=freed_bytes)


def eight_bit_optimizer(name: str, state_bytes: int, parameters: int) -> Saving:
    """Adam's or AdamW's state in 8 bits; `state_bytes` is what the state of these parameters takes now."""
    change = f"{name} in 8 bits (bitsandbytes): state rounded by blocks"
    return Saving(change=change, size_bytes=max(int(state_bytes - EIGHT_BIT_BYTES * parameters), 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHistory:
    """Graphs of earlier steps that a name of the user's code keeps alive."""

    name: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResults:
    """Results of earlier steps that a name of the user's code holds, without what their graphs saved."""

    name: str
    line: str
    count: int
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtError:
    """What was asked for when memory ran out, and what held the rest.

    The peak is that moment: it has the fields of a `MemoryPrediction` that say what a peak holds.
    """

    message: str
    """First line of the error's message."""
    requested_bytes: int | None
    """What was asked for; None if the message does not say it."""
    line: str
    """Line of code that asked, as "file.py:12"; "" if not known."""
    peak_op: str | None
    """The call that asked; in backward the autograd node, as far as its graph shows it."""
    peak_module: str | None
    peak_phase: Phase
    held: tuple[HeldStorage, ...]
    """What is held, the largest first."""
    module_classes: tuple[tuple[str, str], ...]
    """(path, class name) of the modules."""
    not_found_bytes: int = 0
    """On CUDA, what the allocator has handed out beyond `held`: temporaries of kernels and of C++."""
    unused_bytes: int | None = None
    """On CUDA, what the allocator has reserved and not handed out."""
    free_bytes: int | None = None
    """What nobody holds of the card's memory, or of the host's; None if that is not known."""
    others: tuple[tuple[int, int], ...] = ()
    """Other processes on the card: number, bytes."""
    reached_fraction: float = 1.0
    """How much of the model's forward had run, by its modules with parameters."""
    largest_saved_bytes: int = 0
    """The largest saved tensor of a forward, whose gradient comes beside it in backward."""
    update_bytes: int = 0
    """Temporaries of the optimizer's update."""
    makes_state: bool = False
    """Whether the first update has yet to be completed."""
    further_bytes: int = 0
    """Gradients and optimizer state that are yet to make, and one gradient beside the accumulated one."""
    recomputable_bytes: int = 0
    """Saved tensors inside repeated blocks, but for one block, which is recomputed, and the others' inputs."""
    adam_bytes: int = 0
    """Optimizer state of Adam or AdamW, made or yet to make, but for that in 8 bits."""
    adam_parameters: int = 0
    """Parameters that have it."""
    adam: str = "AdamW"
    """The optimizer: Adam, AdamW or both."""
    samples: int | None = None
    """Samples of the micro-batch; None if they are not known."""
    kept: tuple[KeptHistory, ...] = ()
    kept_bytes: int = 0
    """Saved tensors of earlier steps' graphs."""
    results: tuple[KeptResults, ...] = ()
    evaluates_with_gradients: bool = False
    """Whether a model in evaluation mode builds a graph."""
    is_checkpointed: bool = False
    """Whether activation checkpointing is in use already."""
    expands_segments: bool = False
    """Whether the CUDA allocator uses expandable segments already."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(each.held_bytes for each in self.held) + self.not_found_bytes

    @property
    def breakdown(self) -> tuple[tuple[Category, int], ...]:
        """Bytes by category."""
        found = dict.fromkeys(Category, 0)
        for each in self.held:
            found[each.category] += each.held_bytes
        found[Category.TEMPORARIES] += self.not_found_bytes
        return tuple(found.items())

    @property
    def largest(self) -> tuple[HeldStorage, ...]:
        """What is held, one entry for all of a category that a line made, or an op; the largest first."""
        groups: dict[tuple[Category, str, str], list[HeldStorage]] = {}
        for each in self.held:
            label = "" if each.line or each.category in _OF_MODEL else each.label
            groups.setdefault((each.category, each.line, label), []).append(each)
        return tuple(sorted(map(_joined, groups.values()), key=lambda each: -each.held_bytes))

    @property
    def modules(self) -> tuple[ModuleShare, ...]:
        """Bytes by module, submodules included."""
        held = ((each.module, each.held_bytes) for each in self.held if each.module is not None)
        return shares_of_modules(held, dict(self.module_classes))

    @property
    def limit_bytes(self) -> int:
        """What there is for tensors, as far as it can be seen: what is held, unused or free."""
        return self.peak_allocated_bytes + (self.unused_bytes or 0) + (self.free_bytes or 0)


def _joined(group: list[HeldStorage]) -> HeldStorage:
    """One entry for several, in the module around them; the largest gives its name."""
    first, count = group[0], len(group)
    modules = [each.module.split(".") for each in group if each.module is not None]
    around = takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))
    return HeldStorage(
        label=first.label if count == 1 else f"{first.label} and {count - 1} more",
        category=first.category,
        module=".".join(names[0] for names in around) if modules and count > 1 else first.module,
        held_bytes=sum(each.held_bytes for each in group),
        line=first.line,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes that take less memory, those first that are expected to make the step fit."""

    listed: tuple[Saving, ...]
    lacking_bytes: int
    """What is lacking even if all of them are made, as far as it can be seen; 0 if the first one is enough."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes of the two moments of a step that may be its peak."""

    of_batch: int
    """Forward and backward."""
    of_update: int

    def less(self, other: _Bytes) -> _Bytes:
        return _Bytes(max(self.of_batch - other.of_batch, 0), max(self.of_update - other.of_update, 0))

    @property
    def most(self) -> int:
        return max(self.of_batch, self.of_update)


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    frees: _Bytes
    is_of_optimizer: bool = False
    """Whether it is instead of other changes of the optimizer."""
    parts: int = 1
    """Micro-batches in place of one."""
    is_of_batch: bool = False
    """Whether it frees as much less in smaller micro-batches."""

    @property
    def saving(self) -> Saving:
        return Saving(change=self.text, size_bytes=self.frees.most)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the step is expected to take at most."""

    fixed_bytes: int
    """Model, gradients, optimizer state and what else does not depend on the batch."""
    of_batch_bytes: int
    update_bytes: int
    limit_bytes: int

    @property
    def lacking(self) -> _Bytes:
        room = self.limit_bytes - self.fixed_bytes
        return _Bytes(max(self.of_batch_bytes - room, 0), max(self.update_bytes - room, 0))


def changes(found: MemoryAtError) -> Changes:
    """Changes that take less memory: those first that are expected to make the step fit, the cheapest first.

    If none is alone, the first is several of them together.
    """
    step = _step(found)
    listed = [each for each in _changes(found, step) if each.frees.most > 0]
    fitting = [each for each in listed if not step.lacking.less(each.frees).most]
    others = sorted((each for each in listed if each not in fitting), key=lambda each: -each.frees.most)
    if fitting:
        return Changes(listed=tuple(each.saving for each in (*fitting, *others)), lacking_bytes=0)
    taken = list[_Change]()
    for each in listed:
        lacking = step.lacking.less(_all_of(taken).frees)
        if lacking.less(each.frees) != lacking:
            taken = [other for other in taken if not (other.is_of_optimizer and each.is_of_optimizer)]
            taken.append(each)
    together = _all_of(taken)
    first = [together] if len(taken) > 1 else []
    return Changes(
        listed=tuple(each.saving for each in (*first, *others)),
        lacking_bytes=step.lacking.less(together.frees).most,
    )


def _all_of(taken: list[_Change]) -> _Change:
    parts = math.prod(each.parts for each in taken)
    of_batch = sum(each.frees.of_batch // (parts if each.is_of_batch else 1) for each in taken)
    frees = _Bytes(of_batch, sum(each.frees.of_update for each in taken))
    return _Change("; and ".join(each.text for each in taken), frees)


def _step(found: MemoryAtError) -> _Step:
    held, limit_bytes = dict(found.breakdown), found.limit_bytes
    asked = found.requested_bytes or 0
    of_batch = held[Category.SAVED_TENSORS] + held[Category.INPUTS] + held[Category.TEMPORARIES]
    fixed = found.peak_allocated_bytes - of_batch + found.further_bytes
    if found.peak_phase is not Phase.OPTIMIZER:
        whole = int((of_batch + asked) / found.reached_fraction) + found.largest_saved_bytes
        return _Step(fixed, whole, found.update_bytes, limit_bytes)
    # The next forward has the state beside it that the first update makes; the one before had fitted without,
    # and before most gradients.
    before = max(limit_bytes, found.peak_allocated_bytes + asked) - held[Category.PARAMETERS]
    if not found.makes_state:
        before -= held[Category.OPTIMIZER_STATE]
    return _Step(
        fixed, max(before, 0), max(asked + held[Category.TEMPORARIES], found.update_bytes), limit_bytes
    )


def _changes(found: MemoryAtError, step: _Step) -> Iterator[_Change]:
    """Changes, the cheapest first."""
    held = dict(found.breakdown)
    if found.kept_bytes:
        names = " and ".join(f"{each.name} ({each.line})" for each in found.kept) or "a variable"
        text = f"keep no graphs of earlier steps: add to {names} what has none, .detach() or .item()"
        yield _Change(text, _Bytes(found.kept_bytes, found.kept_bytes))
    for each in found.results:
        which = f"{each.name} ({each.line}), which has {each.count} results of earlier steps"
        text = f"keep numbers (.item()) or .detach().cpu() in {which}"
        yield _Change(text, _Bytes(each.held_bytes, each.held_bytes))
    if found.evaluates_with_gradients:
        text = "run the evaluation under torch.no_grad() or torch.inference_mode()"
        yield _Change(text, _Bytes(held[Category.SAVED_TENSORS], 0))
    unused = found.unused_bytes or 0
    is_fragmented = unused >= max(FRAGMENTED_FRACTION * found.peak_allocated_bytes, found.requested_bytes or 0)
    if is_fragmented and not found.expands_segments:
        text = "PYTORCH_ALLOC_CONF=expandable_segments:True: unused memory in pieces can be used"
        yield _Change(text, _Bytes(unused, unused))
    if found.others:
        listed = ", ".join(str(number) for number, _ in found.others)
        size = sum(size for _, size in found.others)
        text = f"end what else is on the card (process {listed}), or use another one"
        yield _Change(text, _Bytes(size, size))
    if step.update_bytes and (step.lacking.of_update or found.peak_phase is Phase.OPTIMIZER):
        text = "the optimizer with fused=True: an update without temporaries"
        yield _Change(text, _Bytes(0, step.update_bytes), is_of_optimizer=True)
    of_a_batch = held[Category.SAVED_TENSORS] + held[Category.INPUTS]
    has_batch = found.samples is not None or of_a_batch > 0  # else any code asked
    is_divisible = has_batch and found.samples not in (0, 1)
    if found.peak_phase is Phase.EVALUATION and is_divisible:
        parts = _parts(step, found.samples)
        saving = smaller_micro_batches(step.of_batch_bytes, parts, found.samples)
        text = saving.change.partition(",")[0].replace("micro-", "evaluation ")
        yield _Change(text, _Bytes(saving.size_bytes, 0))
    elif found.peak_phase is Phase.OPTIMIZER and not found.makes_state:
        pass  # forward and backward of an earlier step fitted beside the same state
    elif found.peak_phase is not Phase.EVALUATION:
        if is_divisible:
            parts = _parts(step, found.samples)
            saving = smaller_micro_batches(step.of_batch_bytes, parts, found.samples)
            yield _Change(saving.change, _Bytes(saving.size_bytes, 0), parts=parts)
        if not found.is_checkpointed:
            saving = activation_checkpointing(int(found.recomputable_bytes / found.reached_fraction))
            yield _Change(saving.change, _Bytes(saving.size_bytes, 0), is_of_batch=True)
    saving = eight_bit_optimizer(found.adam, found.adam_bytes, found.adam_parameters)
    if saving.size_bytes:
        of_update = saving.size_bytes + step.update_bytes
        yield _Change(saving.change, _Bytes(saving.size_bytes, of_update), is_of_optimizer=True)


def _parts(step: _Step, samples: int | None) -> int:
    """The least power of two into which micro-batches are divided to fit; the most if none does."""
    most: int = _MOST_PARTS if samples is None else 2 ** int(math.log2(max(samples, 1)))
    room = step.limit_bytes - step.fixed_bytes
    if room <= 0:
        return most
    wanted: int = 2 ** max(math.ceil(math.log2(max(step.of_batch_bytes, 1) / room)), 1)
    return min(wanted, most)
