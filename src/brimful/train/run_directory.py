"""The run directory: what a run leaves behind, written so that a failure never damages what was there.

| file | what |
|---|---|
| `plan.json`, or `settings.json` without a plan | how it is trained |
| `metrics.jsonl` | a line per step and per validation, as they come |
| `weights.safetensors` | the latest weights; its metadata say after which step |
| `best.safetensors` | the weights with the lowest validation loss |
| `result.json` | the `TrainingResult`, once the run has ended |

`load_weights(model, path)` loads weights again.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from brimful.errors import RunDirectoryError, SaveError, UsageError
from brimful.units import format_bytes

PLAN = "plan.json"
SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
WEIGHTS = "weights.safetensors"
BEST = "best.safetensors"
RESULT = "result.json"
_NAMES = (PLAN, SETTINGS, METRICS, WEIGHTS, BEST, RESULT)

_TIED = "tied"
"""Metadata: further names of tied weights, each with the name they are written under, as JSON."""
_MOST_ENTRIES_NAMED = 3


class RunDirectory:
    """A directory of one run's own.

    Args:
        path: A directory that is empty or does not exist yet; it is made, with its parents.

    Raises:
        RunDirectoryError: It is a file, has something in it, or cannot be made.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        check_run_directory(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.path / METRICS).open("xb", buffering=0)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be written to: {error.strerror or error}. "
                "Choose another."
            ) from error

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON file whole, or leave the one that is there.

        Args:
            name: The file's name.
            document: What `json` can write.

        Raises:
            SaveError: It could not be written.
        """
        content = (json.dumps(document, indent=2) + "\n").encode()
        self._replace(name, len(content), lambda temporary: temporary.write_bytes(content))

    def append_metrics(self, entry: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`: a whole one, or none.

        Args:
            entry: What `json` can write.

        Raises:
            SaveError: It could not be written.
        """
        line = (json.dumps(entry) + "\n").encode()
        end = self._metrics.tell()
        try:
            if self._metrics.write(line) != len(line):
                raise OSError("only a part of the line was written")
        except OSError as error:
            self._metrics.truncate(end)
            self._metrics.seek(end)
            raise self._save_error(METRICS, len(line), error) from error

    def save_weights(self, model: nn.Module, name: str, metadata: Mapping[str, str]) -> Path:
        """Write the model's parameters and buffers whole, or leave the file that is there.

        Tied weights are written once, under their first name.

        Args:
            model: Its `state_dict` is written.
            name: The file's name.
            metadata: Kept beside the weights.

        Returns:
            Where they are.

        Raises:
            SaveError: They could not be written.
        """
        tensors, tied = _distinct_tensors(model)
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        kept = {"format": "pt", _TIED: json.dumps(tied)} | dict(metadata)
        return self._replace(name, size_bytes, lambda temporary: save_file(tensors, temporary, metadata=kept))

    def close(self) -> None:
        """Close `metrics.jsonl`; calling it again does nothing."""
        self._metrics.close()

    def discard(self) -> None:
        """Close, and leave the directory empty: for a run that failed before its first step."""
        self.close()
        for name in _NAMES:
            (self.path / name).unlink(missing_ok=True)

    def _replace(self, name: str, size_bytes: int, write: Callable[[Path], object]) -> Path:
        """Write beside the file, bring it to the disk, then put it in the file's place."""
        path, temporary = self.path / name, self.path / f".{name}.partial"
        try:
            write(temporary)
            shutil.copymode(self.path / METRICS, temporary)  # safetensors lets nobody else read its files
            _bring_to_disk(temporary)
            temporary.replace(path)
            if os.name == "posix":
                _bring_to_disk(self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise self._save_error(name, size_bytes, error) from error
        return path

    def _save_error(self, name: str, size_bytes: int, error: Exception) -> SaveError:
        path = self.path / name
        before = "What was there before is intact" if path.exists() else "Nothing is there"
        return SaveError(
            f"{path} could not be written: {getattr(error, 'strerror', None) or error}.\n"
            f"  needed: {format_bytes(size_bytes)}; free: {format_bytes(_free_bytes(path))}\n"
            f"  {before}; the weights are still in the model (Trainer.model).\n"
            "  Free some space, or train into another run directory."
        )


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Give a model the weights that a run saved.

    Args:
        model: Of the same structure as the one that was trained; on any device.
        path: A `weights.safetensors` or `best.safetensors`.

    Raises:
        UsageError: The file is damaged, or of another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        tensors |= {name: tensors[first] for name, first in tied.items()}
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UsageError(f"{path} has no weights for this {type(model).__name__}: {error}") from error


def check_run_directory(path: Path) -> None:
    """Check that a run may write into `path`, without writing.

    Args:
        path: Where the run directory is or is to be.

    Raises:
        RunDirectoryError: It is a file, or has something in it, or cannot be looked into.
    """
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"the run directory {path} is a file. Choose another path.")
    try:
        present = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be read: {error.strerror}.") from error
    if present:
        named = ", ".join(present[:_MOST_ENTRIES_NAMED]) + (", …" if len(present) > _MOST_ENTRIES_NAMED else "")
        raise RunDirectoryError(
            f"the run directory {path} is not empty: it has {named}. "
            "A run writes into a new or empty directory only; choose another."
        )


def _bring_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(path: Path) -> int:
    """What the disk of `path` has left; the directories that lead to it may be gone."""
    return shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.exists())).free


def _distinct_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a `state_dict`, each once, and which further names it has.

    `safetensors.torch.save_model` would do, but refuses a parameter that is a part of a larger block, as every
    weight of an RNN on a GPU is (safetensors 0.8).
    """
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    blocks: set[int] = set()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            warnings.warn(
                f"the model's state {name!r} ({type(tensor).__name__}) is no tensor and is not saved.",
                stacklevel=4,
            )
            continue
        first = names.setdefault(_place(name, tensor), name)
        if first == name:
            distinct[name] = _alone_in_block(tensor, blocks)
        else:
            tied[name] = first
    return distinct, tied


def _place(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors if, and only if, they are one."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _alone_in_block(tensor: Tensor, blocks: set[int]) -> Tensor:
    """The tensor on the host, filling a block of memory that is not one of `blocks`, where it is then added."""
    tensor = tensor.detach().cpu().contiguous()
    block = tensor.untyped_storage()
    if block.nbytes() != tensor.nbytes or block.data_ptr() in blocks:
        tensor = tensor.clone()
    blocks.add(tensor.untyped_storage().data_ptr())
    return tensor
