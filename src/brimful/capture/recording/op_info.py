"""An operator → what the recorder has to know of it, from its schema and tags; looked up once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from brimful.capture.corrections.rule import Rule
from brimful.capture.values.choices import CHOICES
from brimful.capture.values.shapes import SHAPED_BY_VALUES
from brimful.optimizers import SPARSE_ARGUMENT, check_op_makes_dense_gradient
from brimful.torch_utils.op_writes import has_writes
from brimful.transforms.host_link import to_host

aten = torch.ops.aten

_WITHOUT_COST = frozenset({aten._local_scalar_dense.default})
"""Ops that neither make a storage nor read one, beside those whose schema says they return a view."""
_LIST_WRITES = ("aten._foreach_", "aten._fused_")
"""Beginnings of the names of ops that write to every tensor of lists."""
_READ_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Facts of one operator, and the rules that watch it."""

    name: str
    is_metadata: bool
    """Asks a tensor for its device, say, and computes nothing."""
    is_view: bool
    has_no_cost: bool
    """Neither makes a storage nor reads one."""
    is_random: bool
    reads_values: bool
    """Cannot be run on fake tensors alone: its result, or its result's shape, depends on values."""
    is_functional: bool
    """Neither writes to its arguments nor returns views of them, according to its schema."""
    is_in_place: bool
    """Writes to its first argument alone, which stays as large as it is, and returns it."""
    is_list_write: bool
    """Writes to every tensor of lists and returns nothing, so that on fake tensors there is nothing to run."""
    is_copy_to_host: bool
    """Its results are not in the device's memory."""
    written_arguments: tuple[int, ...]
    """Positions of the arguments that the op writes to, if it returns nothing."""
    writes: bool
    """Writes to any of its arguments."""
    chooses: bool
    """Returns what rows of numbers choose, such as the largest."""
    before: tuple[Callable[..., None], ...]
    """Methods of rules to call before the op."""
    after: tuple[Callable[..., None], ...]
    """Methods of rules to call after the op."""


def describe_op(func: Any, rules: Iterable[Rule]) -> OpInfo:
    """The facts of an operator; `rules` are those that may watch it."""
    returns = func._schema.returns
    is_view = func is aten._unsafe_view.default or any(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    watching = [rule for rule in rules if rule.watches_op(func)]
    return OpInfo(
        name=str(func),
        is_metadata=func.namespace in ("prim", "profiler"),
        is_view=is_view,
        has_no_cost=is_view or func in _WITHOUT_COST,
        # Fused attention is tagged as random even where it draws nothing, so the tag alone is not believed.
        is_random=torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func),
        reads_values=not _READ_VALUES.isdisjoint(func.tags) or func in SHAPED_BY_VALUES,
        is_functional=bool(returns) and not any(a.alias_info for a in (*func._schema.arguments, *returns)),
        is_in_place=_is_in_place(func),
        is_list_write=not returns and str(func).startswith(_LIST_WRITES),
        is_copy_to_host=func is to_host,
        written_arguments=tuple(
            index
            for index, argument in enumerate(func._schema.arguments)
            if not returns and argument.alias_info is not None and argument.alias_info.is_write
        ),
        writes=has_writes(func),
        chooses=func in CHOICES,
        before=(
            *([check_op_makes_dense_gradient] if func in SPARSE_ARGUMENT else []),
            *(rule.before_op for rule in watching if _overrides(rule, "before_op")),
        ),
        after=tuple(rule.after_op for rule in watching if _overrides(rule, "after_op")),
    )


def _overrides(rule: Rule, method: str) -> bool:
    return getattr(type(rule), method) is not getattr(Rule, method)


def _is_in_place(func: Any) -> bool:
    """Whether an op writes to its first argument alone and returns it as large as it was, by its schema."""
    aliases = [value.alias_info for value in (*func._schema.arguments, *func._schema.returns)]
    first, *others, returned = aliases if len(aliases) > 1 else (None, None)
    if first is None or returned is None or not (first.is_write and returned.is_write) or any(others):
        return False
    return torch.Tag.inplace_view not in func.tags and "resize" not in str(func)
