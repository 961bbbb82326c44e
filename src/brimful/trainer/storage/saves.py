"""Saves: everything that a run needs to resume exactly, whole or not there at all.

A save is a directory such as `saves/step-000000120/`; `checkpoint.py` says what is in it. It is written beside
the others under another name, brought to the disk and then renamed, which happens whole or not at all; only
then are the oldest deleted. Where parameters are divided, each rank writes its part, and the first renames once
all have told it what they have written. `restore.py` reads saves.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from brimful.distributed.ranks import SINGLE, Ranks
from brimful.errors import FileFormatError, SaveError, UsageError
from brimful.execution.out_of_memory import with_room
from brimful.files import bring_to_disk, free_bytes
from brimful.quantities import format_bytes
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.manifest import (
    MANIFEST,
    MODEL,
    RUN,
    SHARDS,
    STATE,
    by_step,
    digest_of,
    manifest_text,
    name_of,
    step_of,
)
from brimful.trainer.storage.run_directory import SAVES
from brimful.trainer.storage.shards import Shards, divided_of_model, divided_of_optimizer
from brimful.trainer.storage.weights import TIED, distinct_tensors, write_tensors

T = TypeVar("T")

PARTIAL = ".partial"
"""Ends the name of a save that is being written, which begins with a dot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """What one rank writes, on the host."""

    step: int
    shards: Shards | None
    """None where nothing is divided."""
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    run: dict[str, Any]
    state: dict[str, Any]
    """Of the first rank; others write none of these four."""

    @property
    def file_bytes(self) -> int:
        """What the files take at least."""
        parts = {} if self.shards is None else self.shards.tensors
        tensors = sum(tensor.nbytes for tensor in (*self.tensors.values(), *parts.values()))
        counter = _Counter()
        if self.state:
            torch.save(self.state, cast("IO[bytes]", counter))
        return tensors + counter.size_bytes + len(json.dumps(self.run))


class _Counter(io.RawIOBase):
    """Counts what is written to it."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        size_bytes = memoryview(content).nbytes
        self.size_bytes += size_bytes
        return size_bytes


class Saves:
    """Writes the saves of one run, each while training goes on.

    Args:
        run_dir: The run directory.
        keep: How many to keep, the newest.
        ranks: Those that write together, each its part, over connections that nothing else uses meanwhile;
            one that writes whole tensors is alone.
        saved_step: Of the save that the run is resumed from; None begins it.
    """

    def __init__(
        self, run_dir: Path, *, keep: int, ranks: Ranks = SINGLE, saved_step: int | None = None
    ) -> None:
        self.saved_step = saved_step
        """Of the newest save that is known to be whole; None if there is none."""
        self._directory = run_dir / SAVES
        self._keep = keep
        self._ranks = ranks
        self._writing: tuple[threading.Thread, int] | None = None
        self._failure: SaveError | UsageError | None = None
        self._is_checked = False

    def write(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Copy everything to the host, and write it while training goes on; all ranks do so together.

        Args:
            model: Its parameters and buffers.
            checkpoint: All else; the first rank's is written.

        Raises:
            SaveError: The save before this one could not be written, or this one, the first.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        self.wait()
        copies = with_room(
            partial(self._copied, model, checkpoint),
            during=f"the save after step {checkpoint.state.step} is copied to the host",
        )
        thread = threading.Thread(target=self._write_safely, args=(copies,), name="brimful save")
        self._writing = thread, copies.step
        is_first = not self._is_checked
        thread.start()
        if is_first:
            self.wait()  # that it can be read is to be known before hours of training

    def wait(self) -> None:
        """Wait until the save under way is on the disk.

        Raises:
            SaveError: It could not be written; those before it are whole.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        if self._writing is None:
            return
        thread, step = self._writing
        thread.join()
        self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self.saved_step = step

    def _copied(self, model: nn.Module, checkpoint: Checkpoint) -> _Copies:
        whole, divided, tied_parts = divided_of_model(model)
        of_optimizer, divided_state = divided_of_optimizer(checkpoint.state.optimizer)
        divided |= divided_state
        is_first = self._ranks.is_first
        tensors, tied = distinct_tensors(whole, copies=True) if is_first else ({}, {})
        state = checkpoint.with_optimizer(of_optimizer).state_document() if is_first else {}
        return _Copies(
            step=checkpoint.state.step,
            shards=Shards(divided) if self._ranks.is_distributed else None,
            tensors=tensors,
            tied=tied | tied_parts,
            run=checkpoint.run_document() if is_first else {},
            state=tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state),
        )

    def _write_safely(self, copies: _Copies) -> None:
        """Write, and keep why it could not be, the same on every rank."""
        path = self._directory / name_of(copies.step)
        partial = self._directory / f".{path.name}{PARTIAL}"
        try:
            self._all_do(lambda: self._begin(partial, copies))
            written = self._all_do(lambda: self._write_own(partial, copies))
            files = {name: digest for of_rank in written for name, digest in of_rank.items()}
            self._all_do(lambda: self._finish(partial, path, copies, files))
            self._is_checked = True
        except UsageError as error:
            self._failure = error
        except Exception as error:  # whatever it is, the thread's end is not to hide it
            self._failure = SaveError(
                f"the save after step {copies.step} could not be written to {path}: {_summary_line(error)}.\n"
                f"  {_needed(copies)}{_free(self._directory)}\n"
                f"  {self._before()}"
            )
        if self._failure is not None and self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)

    def _before(self) -> str:
        if self.saved_step is None:
            return "There is no save before it."
        return f"The save after step {self.saved_step} is whole."

    def set_aside_after(self, step: int) -> None:
        """Rename the saves of later steps, which were refused: they count no more.

        Args:
            step: Of the save that the run resumes from.
        """
        for path in by_step(self._directory):
            if step_of(path) > step:
                refused = path.with_name(f"refused-{path.name}")
                number = 1
                while refused.exists():
                    number += 1
                    refused = path.with_name(f"refused-{path.name}-{number}")
                path.rename(refused)

    def _all_do(self, action: Callable[[], T]) -> list[T]:
        """What each rank's action returns; if one raises, all raise the same."""
        value: T | None = None
        failure: tuple[bool, str] | None = None
        try:
            value = action()
        except Exception as error:
            if not self._ranks.is_distributed:
                raise
            of_user = isinstance(error, UsageError)
            failure = of_user, str(error) if of_user else f"rank {self._ranks.rank}: {_summary_line(error)}"
        found = self._ranks.all_gather((value, failure))
        for _value, told in found:
            if told is not None:
                raise UsageError(told[1]) if told[0] else _FailedSomewhereError(told[1])
        return [value for value, _failure in found]  # type: ignore[misc]

    def _begin(self, partial: Path, copies: _Copies) -> None:
        if self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial if copies.shards is None else partial / SHARDS).mkdir(parents=True)

    def _write_own(self, partial: Path, copies: _Copies) -> dict[str, dict[str, Any]]:
        """What this rank has written: sizes and digests by name."""
        names = []
        if self._ranks.is_first:
            write_tensors(copies.tensors, partial / MODEL, {TIED: json.dumps(copies.tied)})
            self._write_documents(copies, partial)
            names += [MODEL, RUN, STATE]
        if copies.shards is not None:
            names.append(f"{SHARDS}/{self._ranks.rank + 1:05d}-of-{self._ranks.count:05d}.safetensors")
            copies.shards.write(partial / names[-1])
        for name in names:
            bring_to_disk(partial / name)
        return {name: digest_of(partial / name) for name in names}

    def _finish(
        self, partial: Path, path: Path, copies: _Copies, files: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Let the save be there, now that all of it is on the disk."""
        if not self._ranks.is_first:
            return
        (partial / MANIFEST).write_text(manifest_text(copies.step, files))
        bring_to_disk(partial / MANIFEST)
        if copies.shards is not None:
            bring_to_disk(partial / SHARDS)
        bring_to_disk(partial)
        partial.rename(path)
        bring_to_disk(self._directory)
        self._delete_superseded()

    def _write_documents(self, copies: _Copies, partial: Path) -> None:
        """Write all but the model; the first time, check that it can be read without running code."""
        (partial / RUN).write_text(json.dumps(copies.run, indent=2, allow_nan=False) + "\n")
        try:
            torch.save(copies.state, partial / STATE)
            if not self._is_checked:
                state = torch.load(partial / STATE, weights_only=True)
                Checkpoint.from_documents((partial / RUN).read_bytes(), state, where="")
        except FileFormatError as error:
            raise UsageError(f"the run cannot be saved, as it could not be read again: {error}") from error
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise UsageError(
                "the run cannot be saved: the state of the optimizer or of the schedule holds objects that "
                f"cannot be loaded without running code: {error}. Keep plain numbers, text, tensors, lists and "
                "dicts in their state_dict, or train without run_dir."
            ) from error

    def _delete_superseded(self) -> None:
        """Now that a save is whole: the oldest, and what a run that was killed had written of one."""
        for old in (*by_step(self._directory)[self._keep :], *self._directory.glob(f".*{PARTIAL}")):
            shutil.rmtree(old, ignore_errors=True)


class _FailedSomewhereError(Exception):
    """An action of a rank raised."""


def _summary_line(error: Exception) -> str:
    return str(error) if isinstance(error, _FailedSomewhereError) else f"{type(error).__name__}: {error}"


def _free(directory: Path) -> str:
    try:
        return f"free: {format_bytes(free_bytes(directory))}"
    except OSError as error:
        return f"free space is unknown ({error.strerror})"


def _needed(copies: _Copies) -> str:
    try:
        return f"needed: at least {format_bytes(copies.file_bytes)}; "
    except Exception:  # of an error that is told, or for want of memory
        return ""
