"""What is wrong with a watched run: one function for each check, from what was seen to findings.

Start reading at `findings`. A check finds nothing where the evidence does not show the fault: a run that is
well has no findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from statistics import median

from brimful.doctor.evidence import Evidence
from brimful.doctor.not_recomputed import without_recomputation
from brimful.memory import live_profile
from brimful.memory.liveness import LiveProfile
from brimful.prediction.growth import growth
from brimful.results import WAITING_FRACTION
from brimful.settings import op_kind
from brimful.torch_utils.held_names import Holding
from brimful.trace import Category, Op, Phase
from brimful.utils.quantities import MIB

LARGE_FRACTION = 0.05
"""Fraction of the peak from which memory is worth a finding. A choice."""
GATHERED_FRACTION = 0.001
"""Fraction of the peak from which what an evaluation keeps of each forward is a finding. A choice: of 1,000
forwards it takes as much as the peak."""
LEAST_VALUE_BYTES = 1024
"""Bytes of a kept result from which on it is more than a number. A choice."""
LEAST_BYTES = MIB
"""Temporaries of an optimizer, and copies to a GPU, that are of no interest below this. A choice: copying takes
0.1 ms at 10 GB/s."""

LEAST_WAIT_SECONDS = 0.001
"""Waiting for data in a step that is of no interest below this. A choice: ten thousand steps wait ten seconds.
32 rows of a TensorDataset take 0.2 to 0.3 ms without workers (x86 host, torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, what it costs, and the one change to make."""

    what: str
    change: str
    line: str = ""
    """Line of code, as "train.py:12"; "" for a finding without one."""
    size_bytes: int | None = None
    """Bytes at stake; None if it is not memory, or not known."""
    seconds: float | None = None
    """Time at stake in a step."""
    check: str = ""
    """Name of the check, such as "history-kept": that of its function, which `findings` sets."""


def known_fault(check: str, line: str, size_bytes: int | None = None, name: str = "") -> Finding:
    """A fault of a kind that `_KNOWN` has the texts of, in a run or in source text."""
    what, change = _KNOWN[check]
    return Finding(
        what=what.format(name=name), change=change.format(name=name), line=line, size_bytes=size_bytes
    )


_KNOWN = {
    "history-kept": (
        "{name} keeps the graphs of earlier steps, with all that they hold",
        "add to {name} what has no graph: .detach(), or the number alone, .item()",
    ),
    "evaluation-with-gradients": (
        "an evaluation saves tensors for a backward that never runs",
        "run it under torch.no_grad() or torch.inference_mode()",
    ),
    "trained-in-evaluation-mode": (
        "the model trains in evaluation mode: no dropout, and BatchNorm takes its running statistics",
        "call model.train() before the step, after each evaluation",
    ),
    "gradients-lost": (
        "gradients of earlier micro-batches are cleared before the optimizer has used them",
        "call zero_grad() once for each optimizer step, not for each micro-batch",
    ),
    "gradients-added": (
        "gradients are added to those that the step before has used",
        "call {name}.zero_grad() once for each optimizer step",
    ),
    "graph-retained": (
        "backward keeps the graph and all saved tensors",
        "omit retain_graph=True if nothing else needs the graph, or add the losses for one backward",
    ),
    "softmax-twice": (
        "cross entropy takes logits and gets probabilities: its gradients are nearly flat",
        "omit the softmax in training",
    ),
    "pageable-memory": (
        "what is copied to the GPU is in memory that is not pinned, so the host waits for each copy",
        "pin_memory=True for the DataLoader, and .to(device, non_blocking=True)",
    ),
    "made-on-the-host": (
        "a tensor is made on the host and copied to the GPU again and again",
        "make it where it is used: device={name}",
    ),
    "cache-flushed": (
        "empty_cache in each step frees nothing that torch could not use again, and waits",
        "omit it",
    ),
    "anomaly-detection": (
        "anomaly detection checks every gradient and keeps stacks of the forward",
        "torch.autograd.set_detect_anomaly(False) once the fault is found",
    ),
    "data-parallel": (
        "nn.DataParallel copies the model in each step, and its first GPU holds all outputs",
        "DistributedDataParallel, one process for each GPU",
    ),
    "checkpoint-without-gradient": (
        "a checkpointed region whose input needs no gradient gives its parameters none",
        "use_reentrant=False, or model.enable_input_require_grads()",
    ),
}
"""What is wrong and the change to make, by check; `name` is that of a variable."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Evidence, with what several checks derive from it."""

    evidence: Evidence

    @cached_property
    def profile(self) -> LiveProfile:
        """Live bytes after each allocation and release."""
        return live_profile(self.evidence.trace, 1)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return self.profile.peak_bytes

    @property
    def step_line(self) -> str:
        """Where the optimizer's step is called; "" of a captured step."""
        return next((each.line for each in reversed(self.evidence.steps)), "")

    @cached_property
    def held_at_peak(self) -> dict[int, int]:
        """Bytes of each storage that lives at the peak."""
        return self.profile.held_bytes_at(self.profile.peak_position)

    @property
    def peak_phase(self) -> Phase:
        """The phase in which the peak is."""
        op = self.profile.op_at(self.profile.peak_position)
        return Phase.SETUP if op is None else op.phase

    def is_large(self, size_bytes: int) -> bool:
        """Whether bytes are much beside the peak."""
        return size_bytes >= LARGE_FRACTION * self.peak_bytes

    @cached_property
    def last_step(self) -> list[Op]:
        """Ops of the last recorded step."""
        last = len(self.evidence.steps) - 1
        return [op for op in self.evidence.trace.ops if op.step == max(last, 0)]

    @cached_property
    def lasting(self) -> list[tuple[Holding, tuple[int, ...]]]:
        """What names hold at the end of the last step, each with how many tensors at the end of every step."""
        ends = [each.held for each in self.evidence.steps]
        if not ends:
            return []
        return [
            (held, tuple(end[name].count if name in end else 0 for end in ends))
            for name, held in ends[-1].items()
        ]

    @property
    def made_at_peak(self) -> Iterator[tuple[int, int, Op]]:
        """Bytes of storages that live at the peak, their indices, and the ops that made them."""
        for index, size_bytes in self.held_at_peak.items():
            op = self.evidence.trace.storages[index].op
            if op is not None:
                yield size_bytes, index, self.evidence.trace.ops[op]

    def made_by(self, is_meant: Callable[[Op], bool]) -> list[tuple[int, Op]]:
        """Bytes that live at the peak with the ops that made them, of those ops that are meant."""
        return [(size, op) for size, _, op in self.made_at_peak if is_meant(op)]


Check = Callable[[Seen], Iterator[Finding]]
CHECKS: list[Check] = []
"""All checks, in the order in which their findings are listed where they cost the same."""


def check(function: Check) -> Check:
    """Add a check to `CHECKS`; a decorator."""
    CHECKS.append(function)
    return function


def _lines_check(name: str, lines_of: Callable[[Evidence], Iterable[str]]) -> None:
    """Add a check that finds a fault of `_KNOWN` in each of some lines; "" is a line that is not known."""

    def found(seen: Seen) -> Iterator[Finding]:
        for line in lines_of(seen.evidence):
            yield known_fault(name, line, name="optimizer")

    found.__name__ = name.replace("-", "_")
    check(found)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """What is wrong with a run, what costs most memory first."""
    seen = Seen(evidence)
    if not evidence.trace.events:
        return ()
    found = [
        replace(each, check=function.__name__.replace("_", "-"))
        for function in CHECKS
        for each in function(seen)
    ]
    return tuple(sorted(found, key=lambda each: -(each.size_bytes or 0)))


def captured_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """What is wrong with a job of which only a trace is known, of a mebibyte and more where it is memory.

    Of a job without a loop of its own, plans choose the precision and how the optimizer is computed.
    """
    chosen = () if evidence.trace.is_own_loop else ("half-precision-missed", "optimizer-makes-the-peak")
    found = [each for each in findings(evidence) if each.check not in chosen]
    kept = [each for each in found if each.size_bytes is None or each.size_bytes >= LEAST_BYTES]
    grown = growth(evidence.trace)
    if grown is not None:
        each = Finding(
            what="each step keeps more memory than the one before",
            change="keep .detach() or .item() of a loss, and bound what a forward adds to buffers and lists",
            line=grown.line,
            size_bytes=grown.size_bytes,
            check="memory-grows",
        )
        kept.insert(0, each)
    return tuple(kept)


# What is kept


@check
def history_kept(seen: Seen) -> Iterator[Finding]:
    """Tensors whose graphs lead back to earlier steps: `total += loss`, or a list of losses."""
    found = [held for held, _ in seen.lasting if held.reaches_back]
    growth_bytes, whole_bytes = seen.evidence.growth_bytes or 0, sum(held.size_bytes for held in found)
    for held in found:
        # What the graphs keep grows too; which name keeps how much of it, their own tensors suggest.
        shared_bytes = growth_bytes * held.size_bytes // max(whole_bytes, 1)
        size_bytes = shared_bytes if growth_bytes > 0 else held.size_bytes
        each = known_fault("history-kept", held.line, size_bytes, held.name)
        holds_values = held.count > 1 and held.size_bytes // held.count >= max(
            size_bytes // 2, LEAST_VALUE_BYTES
        )
        yield replace(each, change=_KEEP_NUMBERS) if holds_values else each


_KEEP_NUMBERS = "keep numbers (.item()), or copies on the host (.detach().cpu())"


@check
def container_grows(seen: Seen) -> Iterator[Finding]:
    """A list or dict that has more tensors after each step."""
    for held, counts in seen.lasting:
        is_growing = len(counts) > 2 and all(first < second for first, second in pairwise(counts[-3:]))
        is_more_than_numbers = held.size_bytes // held.count >= LEAST_VALUE_BYTES
        if is_growing and is_more_than_numbers and not held.reaches_back:
            yield Finding(
                what=f"{held.name} has more tensors after each step: {', '.join(map(str, counts))}",
                change=_KEEP_NUMBERS,
                line=held.line,
                size_bytes=held.size_bytes // held.count,
            )


def _alive_past_last_use(seen: Seen) -> Counter[str]:
    """Bytes at the peak of results of the forward that no graph saves and nothing reads after it, by line.

    In a forward also callers hold what they pass on, so a peak in backward counts, of a step that has ended.
    """
    found = Counter[str]()
    ops, peak = seen.evidence.trace.ops, int(seen.profile.ops[seen.profile.peak_position])
    has_ended = peak >= 0 and ops[peak].step < len(seen.evidence.steps)
    if not has_ended or seen.peak_phase is not Phase.BACKWARD or "sharded" in seen.evidence.flags:
        return found
    for size_bytes, index, made in seen.made_at_peak:
        read = seen.evidence.last_reads.get(index, peak)
        is_read_before = read < peak and ops[read].phase is Phase.FORWARD
        if is_read_before and made.phase is Phase.FORWARD and made.step == ops[peak].step:
            found[made.line] += size_bytes
    return found


@check
def intermediate_kept(seen: Seen) -> Iterator[Finding]:
    """A variable that keeps a large result of the forward until the next one has replaced it."""
    at_peak = set(_alive_past_last_use(seen).values())
    for held in seen.evidence.held_in_forward.values():
        is_large = held.has_graph and held.count == 1 and seen.is_large(held.size_bytes)
        if is_large and held.size_bytes not in at_peak:  # else it is there past its last use, too
            yield Finding(
                what=f"{held.name} lives on through the next forward, beside the one that replaces it",
                change=f"del {held.name} after backward",
                line=held.line,
                size_bytes=held.size_bytes,
            )


@check
def alive_past_last_use(seen: Seen) -> Iterator[Finding]:
    """Results of the forward that no graph saves and nothing reads after it, and that are there at the peak."""
    names = {each.size_bytes: each.name for each in seen.evidence.held_in_forward.values() if each.has_graph}
    for line, size_bytes in _alive_past_last_use(seen).items():
        if seen.is_large(size_bytes):
            name = names.get(size_bytes)
            yield Finding(
                what=f"{name or 'what this line makes'} is there at the peak, though nothing reads it then",
                change=f"del {name or 'the name that holds it'} once it is used, before backward",
                line=line,
                size_bytes=size_bytes,
            )


@check
def state_kept(seen: Seen) -> Iterator[Finding]:
    """A checkpoint that was loaded and lives on beside the model, or a copy of its weights."""
    for held in seen.evidence.held_in_forward.values():
        if held.is_state and seen.is_large(held.size_bytes):
            yield Finding(
                what=f"{held.name} holds weights beside the model's own",
                change=f"del {held.name} after load_state_dict, or keep it on the host",
                line=held.line,
                size_bytes=held.size_bytes,
            )


# Evaluation


@check
def evaluation_with_gradients(seen: Seen) -> Iterator[Finding]:
    """A forward in evaluation mode that builds a graph which no backward uses."""
    for each in seen.evidence.evaluations:
        if each.saved_bytes:
            yield known_fault("evaluation-with-gradients", each.line, each.saved_bytes)


@check
def evaluation_gathered(seen: Seen) -> Iterator[Finding]:
    """An evaluation that keeps the results of all samples on the device; on a CPU, large ones alone."""
    is_on_gpu = seen.evidence.trace.device_kind == "cuda"
    least_bytes = seen.peak_bytes * (GATHERED_FRACTION if is_on_gpu else LARGE_FRACTION)
    moved = ", or .cpu()" if is_on_gpu else ", such as argmax(-1)"
    options = "preprocess_logits_for_metrics or eval_accumulation_steps"
    for each in seen.evidence.gathered:
        if each.growth_bytes >= least_bytes:
            yield Finding(
                what=f"{each.name} keeps results of all samples on the device, so much more after each forward",
                change=f"keep what the metric needs{moved}; of a Trainer {options}",
                line=each.line,
                size_bytes=each.growth_bytes,
            )


_lines_check("trained-in-evaluation-mode", lambda seen: seen.trained_in_evaluation_mode)


@check
def graph_unused(seen: Seen) -> Iterator[Finding]:
    """A forward in training mode that builds a graph which no backward uses."""
    for each in seen.evidence.unused_graphs:
        yield Finding(
            what="a forward in training mode saves tensors for a backward that does not run",
            change="run it under torch.no_grad(), after model.eval() if it evaluates",
            line=each.line,
            size_bytes=each.saved_bytes,
        )


@check
def untrained_model(seen: Seen) -> Iterator[Finding]:
    """A teacher or an average of weights that takes much memory."""
    for name, size_bytes in seen.evidence.untrained_bytes.items():
        if seen.is_large(size_bytes):
            yield Finding(
                what=f"{name} runs in the step and is not trained, and its weights take memory",
                change="keep its weights in bf16 or on the host; or compute a teacher's results once, before",
                size_bytes=size_bytes,
            )


# Gradients


def _lost(evidence: Evidence) -> Iterator[str]:
    for line, calls in evidence.repeated.items():
        if all(each.loses_gradients for each in calls[1:]):
            yield line


_lines_check("gradients-lost", _lost)


@check
def gradients_kept(seen: Seen) -> Iterator[Finding]:
    """Gradients of the step before that are zeroed and still there in the forward."""
    kept = [each for each in seen.evidence.backwards if each.step > 0 and each.zero_gradient_bytes]
    if kept and seen.is_large(kept[-1].zero_gradient_bytes):
        yield Finding(
            what="gradients of the step before take memory during the forward",
            change="zero_grad(set_to_none=True), the default, after the optimizer's step or before the forward",
            line=kept[-1].line,
            size_bytes=kept[-1].zero_gradient_bytes,
        )


_lines_check("gradients-added", lambda seen: seen.gradients_added)


@check
def without_gradient(seen: Seen) -> Iterator[Finding]:
    """Parameters that the optimizer has, and that get no gradient."""
    names = seen.evidence.trace.without_gradient
    if names:
        yield Finding(
            what=f"the optimizer has {_some(names)}, of which no recorded step has gradients",
            change="set requires_grad to False, or use them in the forward",
            line=seen.step_line,
        )


@check
def not_optimized(seen: Seen) -> Iterator[Finding]:
    """Parameters that get gradients, and that no optimizer has."""
    for each in seen.evidence.not_optimized_models:
        freezing = f"{each.name}.requires_grad_(False)" if each.passes_gradients_on else "torch.no_grad()"
        yield Finding(
            what=f"{each.name} gets gradients that no optimizer uses, and saves tensors for them",
            change=f"{freezing}, or give its parameters to the optimizer if it is to be trained",
            line=each.line,
            size_bytes=each.size_bytes,
        )
    names = seen.evidence.not_optimized
    if names:
        yield Finding(
            what=f"{_some(tuple(names))} get gradients that no optimizer uses",
            change="give them to the optimizer, or set requires_grad to False",
            line=seen.step_line,
            size_bytes=sum(names.values()),
        )


@check
def frozen_part_saves(seen: Seen) -> Iterator[Finding]:
    """Frozen layers that save tensors for the gradient of an input, which nothing reads."""
    for line, size_bytes in seen.evidence.frozen_bytes.items():
        if seen.is_large(size_bytes):
            yield Finding(
                what="frozen layers save tensors for the gradient of an input, which nothing reads",
                change="an input without requires_grad, and no enable_input_require_grads()",
                line=line,
                size_bytes=size_bytes,
            )


# What seems the end of the first step may be that of another optimizer, whose backward uses the graph.
_lines_check(
    "graph-retained",
    lambda seen: {each.line: 1 for each in seen.backwards if each.retains_graph and each.step > 0},
)


@check
def not_normalized(seen: Seen) -> Iterator[Finding]:
    """Gradient accumulation of losses that are not divided by the number of micro-batches."""
    for line, calls in seen.evidence.accumulated.items():
        # Divisors that differ, such as numbers of tokens, make means.
        is_scaled = any(each.is_scaled for each in calls) or calls[0].divisors.intersection(
            *(each.divisors for each in calls)
        )
        if not seen.evidence.divides_gradients and not is_scaled:
            count = len(calls)
            change = f"(loss / {count}).backward(), if the loss is a mean"
            if line.startswith("accelerate/"):
                change = (
                    f"Accelerator(gradient_accumulation_steps={count}) and accumulate(model); "
                    "of a Transformers Trainer, trainer.loss_is_scaled_for_ga = False"
                )
            yield Finding(
                what=f"the gradients of {count} micro-batches are added, and none is divided by {count}",
                change=change,
                line=line,
            )


@check
def reduced_in_every_micro_batch(seen: Seen) -> Iterator[Finding]:
    """Gradients of micro-batches that ranks reduce one by one."""
    for line, calls in seen.evidence.accumulated.items():
        if all(each.reduces for each in calls):
            yield Finding(
                what=f"ranks reduce gradients {len(calls)} times in a step",
                change="run forward and backward of all but the last micro-batch under model.no_sync()",
                line=line,
            )


@check
def batch_norm_of_micro_batches(seen: Seen) -> Iterator[Finding]:
    """BatchNorm under gradient accumulation."""
    norms = seen.evidence.batch_norms
    if norms and seen.evidence.micro_batches > 1:
        yield Finding(
            what=f"{_some(norms)} normalise over micro-batches, not over the batch of a step",
            change="GroupNorm, or a larger micro-batch with activation checkpointing",
        )


@check
def batch_norm_recomputed(seen: Seen) -> Iterator[Finding]:
    """BatchNorm inside a checkpointed region, whose running statistics move twice."""
    again = (op for op in seen.last_step if op.recomputed and "batch_norm" in op.name)
    modules = {op.module for op in again if not op_kind(op.name).endswith("backward")}
    norms = sorted(modules.intersection(seen.evidence.batch_norms))
    if norms:
        yield Finding(
            what=f"the running statistics of {_some(norms)} move twice in a step, as its forward runs again",
            change="activation checkpointing around it, or correct its momentum to 1 - sqrt(1 - momentum)",
        )


_lines_check("softmax-twice", lambda seen: seen.softmax_twice)


# The step's peak


@check
def checkpointing_saves_nothing(seen: Seen) -> Iterator[Finding]:
    """A checkpointed region whose backward holds as much as is held without checkpointing."""
    again = seen.made_by(lambda op: op.recomputed)
    size_bytes = sum(size for size, _ in again)
    if not seen.is_large(size_bytes) or seen.evidence.failed:
        return
    kept = without_recomputation(seen.evidence.trace)
    if kept is not None and not seen.is_large(live_profile(kept, 1).peak_bytes - seen.peak_bytes):
        modules = sorted({op.module for _, op in again})
        yield Finding(
            what=f"{_some(modules)} run again, and hold as much at the peak as without checkpointing",
            change="checkpoint each block by itself, or none: the forward need not run twice",
            line=again[0][1].line,
            size_bytes=size_bytes,
        )


@check
def optimizer_makes_the_peak(seen: Seen) -> Iterator[Finding]:
    """A peak in the optimizer's step, of temporaries."""
    storages, ops = seen.evidence.trace.storages, seen.evidence.trace.ops
    held = [(size, storages[index]) for index, size in seen.held_at_peak.items()]
    temporaries = sum(
        size
        for size, storage in held
        if storage.category is Category.TEMPORARIES
        and storage.op is not None
        and ops[storage.op].phase is Phase.OPTIMIZER
        and op_kind(ops[storage.op].name).startswith("_foreach")
    )
    if seen.peak_phase is Phase.OPTIMIZER and seen.is_large(temporaries) and temporaries >= LEAST_BYTES:
        yield Finding(
            what="the peak is in the optimizer's step, which computes on lists of all parameters at once",
            change="fused=True, or foreach=False",
            line=seen.step_line,
            size_bytes=temporaries,
        )


@check
def attention_not_fused(seen: Seen) -> Iterator[Finding]:
    """Attention that saves its weights of tokens × tokens."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for op in seen.last_step:
        if op.phase is Phase.FORWARD:
            kinds[op.module].append(op_kind(op.name))
    modules = {module for module, found in kinds.items() if _attends(found)}
    made = [
        (size, op)
        for size, op in seen.made_by(lambda op: op.module in modules and op.phase is Phase.FORWARD)
        if op_kind(op.name) in _OF_ATTENTION
    ]
    weights = {(op.module, size) for size, op in made if op_kind(op.name) == "_softmax"}
    weights |= {(module, size // 2) for module, size in weights}  # in half types
    of_attention = [
        (size, op) for size, op in made if (op.module, size) in weights or op_kind(op.name) == "native_dropout"
    ]
    softmax = [op for _, op in of_attention if op_kind(op.name) == "_softmax"]
    size_bytes = sum(size for size, _ in of_attention)
    if softmax and seen.is_large(size_bytes):
        yield Finding(
            what=f"attention in {_some(sorted(modules))} saves its weights of all pairs of tokens",
            change='F.scaled_dot_product_attention; in Transformers attn_implementation="sdpa"',
            line=softmax[0].line,
            size_bytes=size_bytes,
        )


def _attends(kinds: list[str]) -> bool:
    """Whether ops of a module are products, a softmax of them and products with it."""
    products = [place for place, kind in enumerate(kinds) if kind in ("bmm", "baddbmm")]
    return any(
        kind == "_softmax" and products[0] < place < products[-1]
        for place, kind in enumerate(kinds)
        if products
    )


_OF_ATTENTION = ("_softmax", "mul", "div", "native_dropout", "masked_fill", "add", "bmm")
"""Kinds of ops that make tensors of tokens × tokens, among others."""


@check
def logits_in_the_loss(seen: Seen) -> Iterator[Finding]:
    """Log-probabilities of a large vocabulary that a loss saves beside the logits."""
    found = seen.made_by(lambda op: op_kind(op.name) == "_log_softmax")
    size_bytes = sum(size for size, _ in found)
    if found and seen.is_large(size_bytes):
        yield Finding(
            what="the loss saves log-probabilities as large as the logits, and backward makes as many again",
            change="compute logits and loss in chunks of tokens: a plan's chunked loss, or Liger's fused one",
            line=found[0][1].line,
            size_bytes=size_bytes,
        )


@check
def float32_copy(seen: Seen) -> Iterator[Finding]:
    """A result in half precision that is copied to float32 and kept."""
    copies = seen.made_by(_is_float32_copy)
    size_bytes = sum(size for size, _ in copies)
    if copies and seen.is_large(size_bytes):
        _, largest = max(copies, key=itemgetter(0))
        yield Finding(
            what="results in half precision are copied to float32, which takes twice their memory beside them",
            change="keep them as they are, or compute the loss of a part of the tokens at a time",
            line=largest.line,
            size_bytes=size_bytes,
        )


def _is_float32_copy(op: Op) -> bool:
    return (
        op_kind(op.name) == "_to_copy"
        and op.phase is Phase.FORWARD
        and op.dtype in ("bfloat16", "float16")
        and op.written_bytes > op.read_bytes
    )


@check
def lengths_change(seen: Seen) -> Iterator[Finding]:
    """Inputs whose lengths change from step to step, which fragment the CUDA allocator's memory."""
    steps = len(seen.evidence.steps)
    if seen.evidence.trace.device_kind != "cuda" or "expandable segments" in seen.evidence.flags:
        return
    if 2 < steps <= seen.evidence.input_shapes:
        yield Finding(
            what=f"inputs have {seen.evidence.input_shapes} shapes in {steps} steps: freed blocks do not fit",
            change="PYTORCH_ALLOC_CONF=expandable_segments:True, or batches of a few lengths",
        )


# Time


@check
def half_precision_missed(seen: Seen) -> Iterator[Finding]:
    """Products in float32 on a GPU."""
    flops = Counter[str]()
    for op in seen.last_step:
        flops[op.dtype] += op.flops
    if seen.evidence.trace.device_kind == "cuda" and flops["float32"] > sum(flops.values()) / 2:
        yield Finding(
            what=f"{flops['float32'] / sum(flops.values()):.0%} of the step's products are in float32",
            change="torch.autocast('cuda', torch.bfloat16): products of 8 significant bits on tensor cores",
        )


@check
def waits_for_data(seen: Seen) -> Iterator[Finding]:
    """Steps that wait for a DataLoader."""
    usual = seen.evidence.step_seconds
    if usual is None:
        return
    waited = median(seen.evidence.data_seconds_after)
    if waited >= max(LEAST_WAIT_SECONDS, WAITING_FRACTION * usual):
        none = seen.evidence.loader_workers == 0
        which = ", which has no workers" if none else ""
        yield Finding(
            what=f"{min(waited / usual, 1):.0%} of a step waits for the DataLoader{which}",
            change="num_workers=1 or more reads ahead"
            if none
            else "more workers, or less work for each sample",
            line=seen.evidence.loading_line,
            seconds=waited,
        )


@check
def waits_for_values(seen: Seen) -> Iterator[Finding]:
    """Lines that wait for the GPU in each step."""
    if seen.evidence.trace.device_kind != "cuda":
        return
    steps = seen.evidence.whole_steps
    for line, count in seen.evidence.host_reads.items():
        if count >= steps:
            yield Finding(
                what=f"the host waits for the GPU {round(count / steps)} times a step to read a value",
                change="read it once in many steps, or accumulate it on the GPU with .detach()",
                line=line,
            )


_lines_check(
    "pageable-memory",
    lambda seen: [
        line for line, size_bytes in seen.pageable_bytes.items() if size_bytes >= LEAST_BYTES * seen.whole_steps
    ],
)


@check
def made_on_the_host(seen: Seen) -> Iterator[Finding]:
    """Tensors of known values that each forward makes on the host and copies to the GPU."""
    for line, count in seen.evidence.made_on_the_host.items():
        if count >= seen.evidence.whole_steps:
            yield known_fault("made-on-the-host", line, name="x.device")


_lines_check("cache-flushed", lambda seen: [line for line, count in seen.cache_flushes.items() if count > 1])
_lines_check("anomaly-detection", lambda seen: [""] * ("anomaly" in seen.flags))


@check
def benchmark_with_changing_shapes(seen: Seen) -> Iterator[Finding]:
    """cuDNN tries its algorithms again for each new shape."""
    steps = len(seen.evidence.steps)
    if "cudnn.benchmark" in seen.evidence.flags and 1 < steps <= seen.evidence.input_shapes:
        yield Finding(
            what=f"cudnn.benchmark tries algorithms for each of {seen.evidence.input_shapes} shapes of inputs",
            change="pad to a few shapes, or torch.backends.cudnn.benchmark = False",
        )


# How the model is wrapped


_lines_check("data-parallel", lambda seen: [""] * ("DataParallel" in seen.models))
_lines_check("checkpoint-without-gradient", lambda seen: [""] * bool(seen.trace.checkpoints_without_gradient))


def _some(names: list[str] | tuple[str, ...]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(each or 'the model itself' for each in names[:3])}{more}"
