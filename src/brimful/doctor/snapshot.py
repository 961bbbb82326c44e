"""Reads a CUDA memory snapshot of torch, a pickle, in a way that can execute nothing.

Source: torch/cuda/memory.py, `_snapshot`, and c10/cuda/CUDACachingAllocator.cpp, `record_trace` (checked: torch
2.13). Sizes in a trace are requested bytes, as `requested_size` of a block is; `size` of a block is rounded.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from brimful.codec import NonNegativeInt, read_regular_file
from brimful.errors import FileFormatError
from brimful.utils.decode_errors import one_line
from brimful.utils.quantities import MIB

SNAPSHOT_BYTES = 512 * MIB
"""Largest snapshot that is read. A choice: a trace of 50,000 events with 30 frames each takes 9 MiB."""
MOST_CONTAINERS = 10_000_000
"""Most dicts, lists and tuples that a snapshot may have. A choice: each takes about 100 bytes of memory."""

_WRITTEN_BY = 'torch.cuda.memory._dump_snapshot("snapshot.pickle") writes one.'

_CONTAINERS = {"DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_PUTS = {"BINPUT", "LONG_BINPUT", "PUT"}
_DATA = {
    *_CONTAINERS,
    *_PUTS,
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("SETITEM", "SETITEMS", "APPEND", "APPENDS", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1"),
    *("BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
"""Opcodes of pickles that make nothing but containers, text, numbers, truth values and None."""


class Frame(Struct, frozen=True):
    """A function that was running."""

    filename: str
    line: int
    name: str


class Block(Struct, frozen=True):
    """A part of a segment."""

    size: NonNegativeInt
    state: Literal["active_allocated", "active_awaiting_free", "active_pending_free", "inactive"]
    address: NonNegativeInt = 0
    requested_size: NonNegativeInt | None = None
    frames: Any = ()
    """Frames as they are in the file, which shares them."""

    @property
    def used_bytes(self) -> int:
        """Bytes that were requested."""
        return self.size if self.requested_size is None else self.requested_size


class Segment(Struct, frozen=True):
    """Memory that the allocator has of the driver."""

    total_size: NonNegativeInt
    blocks: tuple[Block, ...]
    device: NonNegativeInt = 0
    is_expandable: bool = False


class TraceEvent(Struct, frozen=True):
    """What the allocator did."""

    action: str
    size: NonNegativeInt = 0
    addr: NonNegativeInt = 0
    device_free: NonNegativeInt | None = None
    """Free bytes of the device when memory ran out."""
    time_us: int | None = None
    frames: Any = ()


class AllocatorSettings(Struct, frozen=True):
    """How the allocator was set, as far as it matters here."""

    expandable_segments: bool = False


class Snapshot(Struct, frozen=True):
    """The allocator's memory at one moment, and what it did before."""

    segments: tuple[Segment, ...]
    device_traces: tuple[tuple[TraceEvent, ...], ...] = ()
    """By device; empty where no history was recorded."""
    allocator_settings: AllocatorSettings = AllocatorSettings()


def read_snapshot(path: Path | str) -> Snapshot:
    """The snapshot that `torch.cuda.memory._dump_snapshot` wrote.

    FileFormatError for what is not such a file, is too large, or has anything but plain data.
    """
    content = read_regular_file(path, what="memory snapshot", limit_bytes=SNAPSHOT_BYTES)
    where = f"the memory snapshot {path}"
    containers = _count_containers(content, where)
    try:
        document = _PlainData(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise FileFormatError(f"{where} is damaged: {one_line(str(error))}.") from error
    if isinstance(document, list):  # of `torch.cuda.memory_snapshot`
        document = {"segments": document}
    if _shared_items(document) > containers:
        raise FileFormatError(f"{where} repeats the same segments or events, as no snapshot of torch does.")
    try:
        return msgspec.convert(document, Snapshot)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileFormatError(f"{where} is not one of torch: {one_line(str(error))}. {_WRITTEN_BY}") from error


class _PlainData(pickle.Unpickler):
    """An unpickler for data alone: `_count_containers` has seen that it asks for nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _count_containers(content: bytes, where: str) -> int:
    """The number of containers in a pickle, which must have plain data alone."""
    containers = 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if opcode.name not in _DATA:
                raise FileFormatError(
                    f"{where} has more than data, which could run code ({opcode.name}); it is not read. "
                    "torch.cuda.memory._dump_snapshot writes data alone."
                )
            if opcode.name in _PUTS and (argument is None or argument > count):
                raise FileFormatError(f"{where} is damaged: it numbers an object {argument}.")
            containers += opcode.name in _CONTAINERS
            if containers > MOST_CONTAINERS:
                raise FileFormatError(
                    f"{where} has more than {MOST_CONTAINERS:,} dicts and lists, which is more than is read. "
                    "Record a shorter history: _record_memory_history(max_entries=100000)."
                )
    except FileFormatError:
        raise
    except Exception as error:  # what is not a pickle may raise anything
        raise FileFormatError(f"{where} is not a pickle: {one_line(str(error))}. {_WRITTEN_BY}") from error
    return containers


def _shared_items(document: Any) -> int:
    """The number of blocks and events, where a hostile file may have many of the same list."""
    if not isinstance(document, dict):
        return 0
    segments, traces = document.get("segments"), document.get("device_traces", [])
    blocks = [each.get("blocks") for each in segments or () if isinstance(each, dict)]
    lists = [*blocks, *(traces if isinstance(traces, list | tuple) else ())]
    return sum(len(each) for each in lists if isinstance(each, list | tuple))


class Lines:
    """Lines of the user's code, of frames that the file shares."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, str]] = {}
        """By the identity of frames: these, which must live as long, and their line."""

    def of(self, frames: Any) -> str:
        """The innermost line outside of torch and Python, as "train.py:12 (forward)"; "" if there is none."""
        if id(frames) not in self._found:
            try:
                line = _line(msgspec.convert(frames, tuple[Frame, ...]))
            except msgspec.ValidationError:
                line = ""
            self._found[id(frames)] = frames, line
        return self._found[id(frames)][1]


def _line(frames: tuple[Frame, ...]) -> str:
    for frame in frames:
        if frame.filename.endswith(".py") and not _OF_TORCH_OR_PYTHON.search(frame.filename.replace("\\", "/")):
            file = _shown(frame.filename)
            return one_line(f"{file}:{frame.line} ({frame.name})")
    return ""


_OF_TORCH_OR_PYTHON = re.compile(
    r"(site|dist)-packages/(torch|triton)/|/pytorch/torch/|/lib/python3\.\d+/(?!.*(site|dist)-packages/)|^<"
)


def _shown(file: str) -> str:
    """A path as people name it: inside its package, or else relative to the current folder."""
    parts = re.split(r"(?:site|dist)-packages[/\\]", file)
    if len(parts) > 1:
        return parts[-1]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
