"""Writes saves: everything that a run needs to resume exactly, written atomically.

A save is a directory such as `saves/step-000000120/`; `checkpoint.py` describes its files. It is written under
a temporary name, flushed to the disk and renamed; then the oldest saves are deleted. If the model is sharded,
each rank writes its shard, and the first rank renames the save once all have sent it the digests of their
files. `restore.py` reads saves.

Parameters that are not trained have a file of their own, which saves share as long as they stay the same. Each
save has the file under its own name, so that it is complete by itself; on the disk these are two files with
several names (hard links), so that damage to one leaves every second save whole. Whether the parameters are the
same is decided by comparing them with the file byte by byte, because some code changes frozen parameters
without a trace, as momentum encoders do by `.data`.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from brimful.distributed.ranks import SINGLE, Ranks
from brimful.errors import FileFormatError, SaveError, UsageError
from brimful.execution.out_of_memory import free_frames, with_room
from brimful.execution.signals import HeldSignals
from brimful.torch_utils.module_names import plain_namer
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.restore import (
    FROZEN,
    MANIFEST,
    MODEL,
    PARTIAL,
    RUN,
    SAVES,
    STATE,
    by_step,
    digest_of,
    manifest_text,
    name_of,
    step_of,
)
from brimful.trainer.storage.run_directory import unused
from brimful.trainer.storage.shards import SHARDS, divided_of_model, divided_of_optimizer, own_shards
from brimful.trainer.storage.weights import TIED, distinct_tensors, write_or_link, write_tensors
from brimful.utils.files import bring_to_disk, free_bytes, fresh
from brimful.utils.quantities import format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The copies on the host that one rank writes."""

    step: int
    files: dict[str, tuple[dict[str, Tensor], dict[str, str]]]
    """The tensors and the metadata of each of its files of tensors, by the name of the file."""
    run: dict[str, Any]
    state: dict[str, Any]
    """The documents, which the first rank alone writes."""

    @property
    def file_bytes(self) -> int:
        """Least size of the files, in bytes."""
        counter = _Counter()
        if self.state:
            torch.save(self.state, cast("IO[bytes]", counter))
        tensors = sum(each.nbytes for tensors, _ in self.files.values() for each in tensors.values())
        return tensors + counter.size_bytes + len(json.dumps(self.run))


class _Counter(io.RawIOBase):
    """Counts the bytes written to it."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        size_bytes = memoryview(content).nbytes
        self.size_bytes += size_bytes
        return size_bytes


class Saves:
    """Writes the saves of one run in a thread, while training continues; keeps the newest `keep`.

    `ranks` are those that each write a shard, with a process group that nothing else uses; a single one where
    it writes whole tensors. `saved_step` is the step of the save that the run resumes from; None for a new run.
    """

    def __init__(
        self, run_dir: Path, *, keep: int, ranks: Ranks = SINGLE, saved_step: int | None = None
    ) -> None:
        self.saved_step = saved_step
        """The step of the newest complete checkpoint; None if there is none."""
        self._directory = run_dir / SAVES
        self._keep = keep
        self._ranks = ranks
        self._writing: Future[int] | None = None
        self._is_checked = False

    def write(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Copy everything to the host, then write it while training continues; all ranks call this together.

        The first save is waited for. A step that is saved already is not saved again. The checkpoint of the
        first rank is written, with parameters and buffers of the model. Raises SaveError if the save before
        this one, or this one if it is the first, could not be written; UsageError if the state cannot be loaded
        without running code.
        """
        self.wait()
        if self.saved_step == checkpoint.step:
            return
        copies = with_room(
            partial(self._copied, model, checkpoint),
            during=f"the save after step {checkpoint.step} is copied to the host",
        )
        is_first = not self._is_checked
        thread = ThreadPoolExecutor(1, "brimful save")
        with HeldSignals().held():  # an error would leave a thread that is neither started nor to be joined
            self._writing = thread.submit(self._write, copies)
            thread.shutdown(wait=False)
        del copies  # else the error of the first save would hold them
        if is_first:
            self.wait()  # whether it can be read back must be known before hours of training

    def wait(self) -> None:
        """Wait until the save under way is on the disk; its SaveError or UsageError is raised here."""
        if self._writing is None:
            return
        wait_for([self._writing])  # where an error interrupts it, it is called again
        writing, self._writing = self._writing, None
        try:
            self.saved_step = writing.result()
        except (SaveError, UsageError) as error:
            free_frames(error)  # they hold copies of all weights
            raise
        finally:
            del writing  # it holds the error, which holds this frame

    def _copied(self, model: nn.Module, checkpoint: Checkpoint) -> _Copies:
        whole, divided, tied_parts = divided_of_model(model)
        of_optimizer, divided_state = divided_of_optimizer(checkpoint.optimizer)
        is_first, is_sharded = self._ranks.is_first, self._ranks.is_distributed
        frozen, rest = ({}, whole) if is_sharded else _split_frozen(model, whole)
        files = {}
        if is_first:
            tensors, tied = distinct_tensors(rest, copies=True)
            files[MODEL] = tensors, {TIED: json.dumps(tied | tied_parts)}
        if frozen:
            tensors, tied = distinct_tensors(frozen, copies=True)
            files[FROZEN] = tensors, {TIED: json.dumps(tied)}
        if is_sharded:
            name = f"{SHARDS}/{self._ranks.rank + 1:05d}-of-{self._ranks.count:05d}.safetensors"
            files[name] = own_shards(divided | divided_state)
        state = replace(checkpoint, optimizer=of_optimizer).state_document() if is_first else {}
        return _Copies(
            step=checkpoint.step,
            files=files,
            run=checkpoint.run_document() if is_first else {},
            state=tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state),
        )

    def _write(self, copies: _Copies) -> int:
        """Write a save; return its step. What it raises is the same on every rank."""
        path = self._directory / name_of(copies.step)
        unfinished = self._directory / f".{path.name}{PARTIAL}"
        try:
            self._all_do(partial(self._begin, unfinished))
            written = self._all_do(partial(self._write_own, unfinished, copies))
            files = {name: digest for of_rank in written for name, digest in of_rank.items()}
            self._all_do(partial(self._finish, unfinished, path, copies, files))
        except UsageError:
            self._discard(unfinished)
            raise
        except Exception as error:
            room = f"{_needed(copies)}{_free(self._directory)}"
            before = "There is no checkpoint before it."
            if self.saved_step is not None:
                before = f"The checkpoint after step {self.saved_step} is complete."
            self._discard(unfinished)
            free_frames(error)
            raise SaveError(
                f"the save after step {copies.step} could not be written to {path}: {_summary_line(error)}.\n"
                f"  {room}\n"
                f"  {before}"
            ) from None
        self._is_checked = True
        return copies.step

    def _discard(self, partial: Path) -> None:
        if self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the refused saves after `step`, where the run resumes, so that they are not used again."""
        for path in by_step(self._directory):
            if step_of(path) > step:
                path.rename(unused(self._directory, partial(_name_of_refused, path)))

    def _all_do(self, action: Callable[[], T]) -> list[T]:
        """Gather what the action returns on each rank; if one raises, all raise its error."""
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
        for _value, failed in found:
            if failed is not None:
                raise UsageError(failed[1]) if failed[0] else _FailedSomewhereError(failed[1])
        return [value for value, _failure in found]  # type: ignore[misc]

    def _begin(self, partial: Path) -> None:
        if self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            if partial.is_symlink():
                fresh(partial)
            (partial / SHARDS if self._ranks.is_distributed else partial).mkdir(parents=True)

    def _write_own(self, partial: Path, copies: _Copies) -> dict[str, dict[str, Any]]:
        """Write the files of this rank; return their sizes and digests by name."""
        names = list(copies.files)
        for name, (tensors, metadata) in copies.files.items():
            if name == FROZEN:
                write_or_link(tensors, partial / name, metadata, self._frozen_to_share())
            else:
                write_tensors(tensors, partial / name, metadata)
        if self._ranks.is_first:
            self._write_documents(copies, partial)
            names += [RUN, STATE]
        for name in names:
            bring_to_disk(partial / name)
        return {name: digest_of(partial / name) for name in names}

    def _finish(
        self, partial: Path, path: Path, copies: _Copies, files: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Write the manifest and rename the save, once all files are on the disk."""
        if not self._ranks.is_first:
            return
        (partial / MANIFEST).write_text(manifest_text(copies.step, files))
        bring_to_disk(partial / MANIFEST)
        if self._ranks.is_distributed:
            bring_to_disk(partial / SHARDS)
        bring_to_disk(partial)
        partial.rename(path)
        bring_to_disk(self._directory)
        self._delete_superseded()

    def _frozen_to_share(self) -> Path | None:
        """The file of frozen parameters that the next save may share; None if there is none.

        It is that of the newest save but one, so that two saves in a row never share one; of the newest if only
        one save is kept.
        """
        found = by_step(self._directory)[min(self._keep, 2) - 1 :]
        return found[0] / FROZEN if found and (found[0] / FROZEN).is_file() else None

    def _write_documents(self, copies: _Copies, partial: Path) -> None:
        """Write everything but the model; the first time, check that it can be read without running code."""
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
        """Delete the oldest saves, and incomplete ones of a run that was killed."""
        for old in (*by_step(self._directory)[self._keep :], *self._directory.glob(f".*{PARTIAL}")):
            fresh(old) if old.is_symlink() else shutil.rmtree(old, ignore_errors=True)


def _split_frozen(model: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the parameters that are not trained from the rest of a model's state, which is by plain names.

    Returns the frozen parameters, with what belongs to them, such as the scales of quantised weights; and the
    rest.
    """
    plain_name = plain_namer(model)
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {plain_name(name) for name, parameter in parameters if not parameter.requires_grad}
    kept = {name: value for name, value in state.items() if _is_of(name, frozen)}
    return kept, {name: value for name, value in state.items() if name not in kept}


def _is_of(name: str, parameters: Container[str]) -> bool:
    """Whether an entry is a parameter, or named after one."""
    while name:
        if name in parameters:
            return True
        name = name.rpartition(".")[0]
    return False


def _name_of_refused(save: Path, number: int) -> str:
    return f"refused-{save.name}" + ("" if number == 1 else f"-{number}")


class _FailedSomewhereError(Exception):
    """An action raised on some rank."""


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
    except Exception:  # the state cannot be written, or memory ran out
        return ""
