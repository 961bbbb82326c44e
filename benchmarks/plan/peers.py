"""What people do instead of a plan: one rule for all blocks, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from brimful.capture import capture_step
from brimful.hardware import Device
from brimful.job import Job
from brimful.module_tree import unit_of_each_op
from brimful.planning import Request, estimate_trace, find_units
from brimful.planning.savable import unit_calls
from brimful.planning.sizes import RoughlyScaledTraces
from brimful.settings import Action, Settings, UnitAction, op_kind
from brimful.timeline import predict_memory
from brimful.trace import Trace

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a way to train comes to, by a capture with it applied."""

    settings: Settings
    peak_device_bytes: int
    step_seconds: float


Rule = Callable[["Bench"], tuple[UnitAction, ...] | None]
"""The actions of all units; None where the rule says nothing of such a model."""


class Bench:
    """One job on one device, with everything that has been captured of it.

    Args:
        job: What is trained.
        device: Where.
        request: The global batch, the precision and the optimizer's implementation of all.
    """

    def __init__(self, job: Job, device: Device, request: Request) -> None:
        self.device = device
        self.request = request
        self.capture = cache(lambda settings, steps=1: capture_step(job, settings, device, steps=steps))
        plain = request.plain_settings()
        self.plain = replace(plain, optimizer_implementation=request.optimizer_implementation)
        whole = self.capture(self.plain)
        self.units = find_units(whole)
        self._scaled = RoughlyScaledTraces(self.capture)
        is_whole = request.keeps_batch_whole(whole)
        self.sizes = (request.global_batch_size,) if is_whole else request.micro_batch_sizes()

    def all_units(self, action: Action) -> tuple[UnitAction, ...]:
        return tuple(UnitAction(fqn=unit, action=action) for unit in self.units)

    def recomputed(self) -> Trace:
        """The step with every unit recomputed, at a small size."""
        size = self.sizes[0] if len(self.sizes) == 1 else 5
        steps = 1 if len(self.sizes) == 1 else 2
        settings = replace(self.plain, micro_batch_size=size, gradient_accumulation_steps=steps)
        return self.capture(replace(settings, units=self.all_units(Action.RECOMPUTE)))

    def outcome(self, settings: Settings) -> Outcome:
        """What a capture of some settings says."""
        trace = self.capture(settings).with_last_step_again()
        estimate = estimate_trace(trace, self.device, capacity_bytes=1 << 62)
        return Outcome(
            settings=settings,
            peak_device_bytes=estimate.predicted_peak_device_bytes,
            step_seconds=estimate.predicted_step_seconds,
        )

    def largest_that_fits(self, rule: Rule, budget_bytes: int) -> Outcome | None:
        """A rule with the largest micro-batch whose capture is within the budget; the smallest if none is."""
        actions = rule(self)
        if actions is None:
            return None
        outcome = None
        for size in self.sizes:
            settings = replace(self.plain.with_micro_batch_size(size), units=actions)
            if size != self.sizes[-1] and self._surely_too_much(settings, budget_bytes):
                continue
            outcome = self.outcome(settings)
            if outcome.peak_device_bytes <= budget_bytes:
                break
        return outcome

    def _surely_too_much(self, settings: Settings, budget_bytes: int) -> bool:
        """By scaling, which saves a capture; what is near the budget is captured."""
        peak = predict_memory(self._scaled.at(settings)).peak_reserved_bytes + self.device.context_bytes
        return peak > 1.05 * budget_bytes


def recompute_everything(bench: Bench) -> tuple[UnitAction, ...]:
    """What Transformers' `gradient_checkpointing` and a batch size finder give."""
    return bench.all_units(Action.RECOMPUTE)


def every_second_block(bench: Bench) -> tuple[UnitAction, ...]:
    """Torchtitan's `selective` with option 2."""
    actions = (Action.RECOMPUTE, Action.KEEP)
    return tuple(UnitAction(fqn=unit, action=actions[i % 2]) for i, unit in enumerate(bench.units))


def torchtitan_selective(bench: Bench) -> tuple[UnitAction, ...] | None:
    """Torchtitan's `selective` with option "op": save attention and every second product, recompute the rest.

    Its rule names `aten.mm`; a layer with a bias runs `aten.addmm`, which is taken for the same.
    """

    def chosen(ops: Sequence[str]) -> Iterator[str]:
        products = 0
        for name in ops:
            kind = name.partition("#")[0]
            products += kind in PRODUCTS
            if kind == "attention" or (kind in PRODUCTS and products % 2 == 1):
                yield name

    return _saving(bench, chosen)


def attention_only(bench: Bench) -> tuple[UnitAction, ...] | None:
    """Save what fused attention returns, recompute the rest."""
    return _saving(bench, lambda ops: (name for name in ops if name.startswith("attention#")))


def _saving(bench: Bench, chosen: Callable[[Sequence[str]], Iterator[str]]) -> tuple[UnitAction, ...] | None:
    trace = bench.recomputed()
    calls = unit_calls(trace, unit_of_each_op(trace, bench.units), len(bench.units))
    actions = []
    for unit, runs in zip(bench.units, calls, strict=True):
        names = _forward_names(trace, runs[0][0].forward)
        saved = tuple(chosen(names))
        action = Action.SAVE if saved else Action.RECOMPUTE
        actions.append(UnitAction(fqn=unit, action=action, saved=saved))
    return tuple(actions) if any(action.saved for action in actions) else None


def _forward_names(trace: Trace, ops: Sequence[int]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for index in ops:
        kind = op_kind(trace.ops[index].name)
        names.append(f"{kind}#{seen.get(kind, 0)}")
        seen[kind] = seen.get(kind, 0) + 1
    return names


PEERS: dict[str, Rule] = {
    "recompute everything": recompute_everything,
    "every second block": every_second_block,
    "torchtitan selective": torchtitan_selective,
    "attention only": attention_only,
}
