"""What people do instead of a plan: one rule for all blocks, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from brimful.planner.problem.savable_ops import unit_calls
from brimful.settings import Action, UnitAction, op_kind
from brimful.trace import Trace
from plan.bench import Bench, Outcome

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


Rule = Callable[[Bench], tuple[UnitAction, ...] | None]
"""The actions of all units; None where the rule says nothing of such a model."""

Peer = Callable[[Bench, int], Outcome | None]
"""What comes of a budget in bytes; None where the peer says nothing of such a model."""


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
    calls = unit_calls(trace, bench.units)
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


def _largest_that_fits(rule: Rule) -> Peer:
    """A rule and a batch size finder."""

    def peer(bench: Bench, budget_bytes: int) -> Outcome | None:
        actions = rule(bench)
        return None if actions is None else bench.largest_that_fits(actions, budget_bytes)

    return peer


PEERS: dict[str, Peer] = {
    "recompute everything": _largest_that_fits(recompute_everything),
    "every second block": _largest_that_fits(every_second_block),
    "torchtitan selective": _largest_that_fits(torchtitan_selective),
    "attention only": _largest_that_fits(attention_only),
}
