"""What holds the memory at a peak, for a reader: by category, by block, by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from brimful.memory import HeldStorage, MemoryPrediction, ModuleShare
from brimful.memory.at_error import MemoryAtError
from brimful.prediction import Estimate
from brimful.report.layout import Listing, Share
from brimful.trace import Category, Phase
from brimful.trace.modules import OPTIMIZER, shown_module
from brimful.utils.quantities import format_bytes

AtPeak = MemoryPrediction | Estimate | MemoryAtError

_LISTED_BLOCKS = 5
_LISTED_MODULES = 10
_SHOWN_MODULE_FRACTION = 0.05
_LABEL_CELLS = 44


def peak_listings(held: AtPeak, peak_bytes: int) -> Iterator[Listing]:
    """What holds the memory by category, by block and by module."""
    place = peak_place(held.peak_phase, held.peak_module, held.peak_op)
    yield category_listing(place, held.breakdown, peak_bytes)
    yield block_listing(held.largest)
    yield from module_listing(held.modules, peak_bytes)


def peak_place(phase: Phase, module: str | None, op: str | None, line: str | None = None) -> str:
    """Where a peak is in the step: phase, module, op and line of code, as far as there are any."""
    if phase is Phase.SETUP:  # a model that is made, or an evaluation before training
        return ", ".join(filter(None, ("before the first step", op, line)))
    is_named = (phase, module) == (Phase.OPTIMIZER, OPTIMIZER)
    return ", ".join(filter(None, (phase, "" if is_named else shown_module(module), op, line)))


def category_listing(place: str, breakdown: Iterable[tuple[Category, int]], peak_bytes: int) -> Listing:
    """What each category holds."""
    whole = max(peak_bytes, 1)
    rows = tuple(
        (category.replace("_", " "), format_bytes(held_bytes), Share(held_bytes / whole, place_of(category)))
        for category, held_bytes in breakdown
        if held_bytes or category is not Category.OTHER_TENSORS
    )
    return Listing(title=f"at the peak ({place})", line="    {:<16}{:>9}  {}", rows=rows, is_whole=True)


def place_of(category: Category) -> int:
    """The number of a category's colour."""
    return [*Category].index(category)


def block_listing(largest: Sequence[HeldStorage]) -> Listing:
    """The largest blocks, with the lines of code that make them."""
    rows = []
    for block in largest[:_LISTED_BLOCKS]:
        label = block.label if len(block.label) <= _LABEL_CELLS else f"…{block.label[1 - _LABEL_CELLS :]}"
        origin = f" in {block.module}" if block.module and not block.module.startswith("<") else ""
        line = f" ({block.line})" if block.line else ""
        what = block.category.replace("_", " ")
        rows.append((format_bytes(block.held_bytes), f"{what}: {label}{origin}{line}"))
    title = "largest blocks at the peak"
    return Listing(title=title, line="    {:>9}  {}", rows=tuple(rows), is_detail=True)


def module_listing(modules: Iterable[ModuleShare], peak_bytes: int) -> Iterator[Listing]:
    """The modules that hold most, as a tree: the largest first, each followed by its largest submodules."""
    children: dict[str, list[ModuleShare]] = {}
    root_bytes, root_class = 0, ""
    for share in modules:
        if share.depth:
            children.setdefault(_parent_and_name(share)[0], []).append(share)
        else:
            root_bytes, root_class = share.held_bytes, share.class_name
    least_bytes = _SHOWN_MODULE_FRACTION * peak_bytes
    rows = list(_module_rows(children, "", least_bytes))
    own_bytes = root_bytes - _held_bytes(children.get("", []))
    if root_class and own_bytes >= least_bytes:
        rows.append((format_bytes(own_bytes), f"the model itself, outside of submodules ({root_class})"))
    if rows:
        title = f"by module, submodules included, of at least {_SHOWN_MODULE_FRACTION:.0%} of the peak"
        hidden = len(rows) - _LISTED_MODULES
        more = [("…", f"{hidden} more")] if hidden > 0 else []
        shown = (*rows[:_LISTED_MODULES], *more)
        yield Listing(title=title, line="    {:>9}  {}", rows=shown, is_detail=True)


def _module_rows(
    children: Mapping[str, Sequence[ModuleShare]], parent: str, least_bytes: float
) -> Iterator[tuple[str, str]]:
    """Rows below one module; more than two numbered siblings of a class are one row without rows below it."""
    alike: dict[str, list[ModuleShare]] = {}
    for share in children.get(parent, ()):
        name = _parent_and_name(share)[1]
        alike.setdefault(share.class_name if name.isdecimal() else name, []).append(share)
    groups = [
        part for group in alike.values() for part in ([group] if len(group) > 2 else [[x] for x in group])
    ]
    for group in sorted(groups, key=_held_bytes, reverse=True):
        first, last, held_bytes = group[0], group[-1], _held_bytes(group)
        if held_bytes < least_bytes:
            continue
        name, suffix = _parent_and_name(first)[1], f" ({first.class_name})" if first.class_name else ""
        if len(group) > 1:
            name, suffix = f"{name}…{_parent_and_name(last)[1]}", f" ({len(group)} × {first.class_name})"
        yield format_bytes(held_bytes), f"{'  ' * (first.depth - 1)}{name}{suffix}"
        if len(group) == 1:
            yield from _module_rows(children, first.fqn, least_bytes)


def _held_bytes(shares: Sequence[ModuleShare]) -> int:
    return sum(share.held_bytes for share in shares)


def _parent_and_name(share: ModuleShare) -> tuple[str, str]:
    parent, _, name = share.fqn.rpartition(".")
    return parent, name
