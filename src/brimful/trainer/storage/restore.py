"""Finds, checks and reads the newest complete checkpoint of a run.

The files are not trusted. `manifest.py` checks their names and digests; loading them runs no code (safetensors,
and `torch.load` with `weights_only`); `checkpoint.py` checks types and ranges. A save that fails any of these
checks is refused, and the one before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.codec import read_regular_file
from brimful.distributed.ranks import SINGLE, Ranks
from brimful.errors import FileFormatError, OutOfMemoryError, ResumeError
from brimful.execution.attached import is_quantization_metadata, load_state
from brimful.execution.out_of_memory import with_room
from brimful.module_names import plain_state, wrapped_state
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.manifest import (
    FROZEN,
    MODEL,
    RUN,
    SHARDS,
    STATE,
    check_file,
    check_listed,
    find_saves,
    read_manifest,
)
from brimful.trainer.storage.shards import check_alike, check_names, load_model, load_optimizer_state
from brimful.trainer.storage.weights import read_tensors, read_tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A complete checkpoint."""

    path: Path
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Number of steps taken before the save."""
        return self.checkpoint.step

    def load_model(self, model: nn.Module) -> None:
        """Load the saved parameters and buffers into a model."""
        try:
            if (self.path / SHARDS).is_dir() or any(isinstance(p, DTensor) for p in model.parameters()):
                load_model(model, self.path, self._whole_names())
            else:
                _load_whole(model, [self.path / name for name in self._whole_names()])
        except FileFormatError as error:
            raise ResumeError(f"the run cannot be resumed: {error}") from error

    def optimizer_state_for(self, optimizer: Optimizer) -> dict[str, Any]:
        """Read the saved `state_dict` of the optimizer with the shards that its parameters need."""
        return load_optimizer_state(optimizer, self.checkpoint.optimizer, self.path)

    def _whole_names(self) -> list[str]:
        """The names of the files of unsharded tensors."""
        return [name for name in (MODEL, FROZEN) if name == MODEL or (self.path / name).exists()]

    def release(self) -> None:
        """Free the optimizer state and the average, once they are loaded."""
        for tensors in (self.checkpoint.optimizer, self.checkpoint.average):
            if tensors is not None:
                tensors.clear()


def newest_save(
    run_dir: Path, refused: Callable[[str], None], *, ranks: Ranks = SINGLE, maps: bool = False
) -> Save | None:
    """Find the newest complete checkpoint of a run, and read its state.

    All ranks call this together, and each checks some of the files. `refused` is called with a message for each
    newer one that is not complete. `maps` maps the tensors of the state into memory instead of reading them.
    Returns None if the run has none. Raises ResumeError if none is complete.
    """
    found = _found_alike(run_dir, ranks)
    reasons = []
    for path in found:
        reason, save = _read_or_reason(path, ranks, maps=maps)
        refusal = next(filter(None, ranks.all_gather(reason)), None)
        if refusal is None:
            return save
        reasons.append(f"{path} is not used: {refusal}")
        refused(reasons[-1])
    if found:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise ResumeError(f"{run_dir} has no complete checkpoint, so the run cannot be resumed.\n{listed}")
    return None


def _found_alike(run_dir: Path, ranks: Ranks) -> list[Path]:
    """List the saves; raise if the ranks see different ones."""
    found: list[Path] = []
    problem = None
    try:
        found = find_saves(run_dir)
    except ResumeError as error:
        problem = str(error)
    seen = ranks.all_gather((problem, [path.name for path in found]))
    for problem, _names in seen:
        if problem is not None:
            raise ResumeError(problem)
    if any(each != seen[0] for each in seen):
        listed = "; ".join(
            f"rank {rank}: {', '.join(names) or 'none'}" for rank, (_problem, names) in enumerate(seen)
        )
        raise ResumeError(
            f"the ranks found different saves in {run_dir} ({listed}). All of them must see the same run "
            "directory: put it on a file system that every machine has."
        )
    return found


def _read_or_reason(path: Path, ranks: Ranks, *, maps: bool) -> tuple[str | None, Save | None]:
    try:
        return None, _read(path, ranks, maps=maps)
    except FileFormatError as reason:
        return str(reason).removesuffix("."), None


def _read(path: Path, ranks: Ranks, *, maps: bool) -> Save:
    manifest = read_manifest(path)
    check_listed(path, manifest)
    for name in sorted(manifest.files)[ranks.rank :: ranks.count]:
        check_file(path, name, manifest.files[name])
    read_tied(path / MODEL, elsewhere=(path / SHARDS).is_dir())
    if FROZEN in manifest.files:
        read_tied(path / FROZEN)
    checkpoint = Checkpoint.from_documents(
        read_regular_file(path / RUN, what="file"), _load_state(path / STATE, maps=maps), where="its "
    )
    if checkpoint.step != manifest.step:
        raise FileFormatError(f"its {RUN} is of step {checkpoint.step}")
    return Save(path=path, checkpoint=checkpoint)


def _load_state(path: Path, *, maps: bool) -> object:
    try:
        return with_room(
            partial(torch.load, path, weights_only=True, map_location="cpu", mmap=maps),
            during=f"{path} is read",
        )
    except OutOfMemoryError:
        raise
    except Exception as error:  # any error: the file may hold anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FileFormatError(f"its {path.name} cannot be read ({reason})") from error


def _load_whole(model: nn.Module, paths: Sequence[Path]) -> None:
    """Load a model from files that together have the same names, shapes and types."""
    tensors = {name: tensor for path in paths for name, tensor in read_tensors(path).items()}
    own = {name: value for name, value in plain_state(model).items() if isinstance(value, Tensor)}
    check_names(paths[0].parent, own.keys() - tensors.keys(), tensors.keys() - own.keys())
    for name, value in own.items():
        if not is_quantization_metadata(name):
            check_alike(name, value, tensors[name].shape, tensors[name].dtype)
    load_state(model, wrapped_state(model, tensors))
