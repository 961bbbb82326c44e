"""Calls of `torch.cuda` in a captured step work on a machine without a GPU."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.settings import Precision
from brimful.torch_utils.lines import is_users_own
from brimful.torch_utils.replaced import replaced


class CudaCalls(Rule):
    """Answer calls of `torch.cuda` and `torch.accelerator` for the target.

    Synchronising does nothing, memory statistics are those of the capture, times between events are a
    millisecond. `is_available` is True for the user's own code alone: libraries would call the GPU.
    """

    name = "cuda_calls"
    source = "torch/cuda/__init__.py, memory.py, streams.py, torch/accelerator (checked: 2.13)"

    @contextmanager
    def context(self) -> Iterator[None]:
        """Replace the calls while the context is open."""
        with ExitStack() as stack:
            for owner, answers in self._answers():
                for name, answer in answers.items():
                    if hasattr(owner, name):
                        stack.enter_context(replaced(owner, name, answer))
            yield

    def _answers(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        yield Tensor, {"record_stream": _nothing}  # checks what it is given before function modes see it
        yield torch.cuda, dict.fromkeys(_WITHOUT_RESULT, _nothing) | self._statistics() | self._facts()
        yield torch.cuda, {"Event": _Event, "Stream": _Stream, "stream": _Entered, "device": _Entered}
        yield torch.cuda, {"current_stream": _Stream, "default_stream": _Stream}
        yield torch.cuda, {"get_rng_state": _rng_state, "set_rng_state": _nothing}
        yield torch, {"Generator": _Generator}
        yield torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _nothing)
        yield torch.cuda.nvtx, {"range": _Entered}
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is not None:
            yield accelerator, dict.fromkeys(_WITHOUT_RESULT, _nothing) | self._statistics()
            yield (
                accelerator,
                {
                    "current_device_index": _first,
                    "is_available": _to_users(accelerator.is_available, lambda: True),
                    "device_count": _to_users(accelerator.device_count, lambda: 1),
                    "current_accelerator": _to_users(
                        accelerator.current_accelerator, lambda: torch.device("cuda")
                    ),
                },
            )

    def _statistics(self) -> dict[str, Callable[..., Any]]:
        def held(*_args: Any, **_options: Any) -> int:
            return self.recorder.places.device_bytes

        def free(*_args: Any, **_options: Any) -> tuple[int, int]:
            return max(self.target.capacity_bytes - held(), 0), self.target.capacity_bytes

        return dict.fromkeys(_HELD, held) | {
            "mem_get_info": free,
            "get_memory_info": free,
            "memory_stats": lambda *_args, **_options: defaultdict(int),
            "memory_summary": lambda *_args, **_options: "",
        }

    def _facts(self) -> dict[str, Callable[..., Any]]:
        """Answers from properties of the target, which are read when they are asked for."""

        def capability(*_args: Any, **_options: Any) -> tuple[int, int]:
            return self.target.compute_capability or (0, 0)

        def properties(*_args: Any, **_options: Any) -> SimpleNamespace:
            major, minor = capability()
            return SimpleNamespace(
                name=self.target.name, major=major, minor=minor, total_memory=self.target.capacity_bytes
            )

        cuda = torch.cuda
        return {
            "current_device": _first,
            "get_device_name": lambda *_args, **_options: self.target.name,
            "get_device_capability": capability,
            "get_device_properties": properties,
            "is_available": _to_users(cuda.is_available, lambda: True),
            "device_count": _to_users(cuda.device_count, lambda: 1),
            "is_initialized": _to_users(cuda.is_initialized, lambda: True),
            "is_bf16_supported": _to_users(
                cuda.is_bf16_supported, lambda: self.target.supports(Precision.BF16)
            ),
        }


def _rng_state(*_args: Any, **_options: Any) -> Tensor:
    return torch.get_rng_state()


_WITHOUT_RESULT = (
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "init",
    "set_device",
    "set_device_index",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)
_HELD = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _nothing(*_args: Any, **_options: Any) -> None:
    """Stands for a call that only waits, or sets something."""


def _first(*_args: Any, **_options: Any) -> int:
    return 0


def _to_users(real: Callable[..., Any], answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return `answer()` to the user's own code and `real()` to libraries."""

    def answered(*args: Any, **options: Any) -> Any:
        return answer() if is_users_own(sys._getframe(2).f_code.co_filename) else real(*args, **options)

    return answered


class _IsGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Lets `isinstance(generator, torch.Generator)` be true of torch's own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TORCH_GENERATOR)


class _Generator(torch.Generator, metaclass=_IsGenerator):
    """A generator on the CPU, whatever device is asked for."""

    def __new__(cls, *_args: Any, **_options: Any) -> torch.Generator:  # type: ignore[misc]
        return _TORCH_GENERATOR("cpu")


_TORCH_GENERATOR = torch.Generator


class _Entered:
    """A context that does nothing, in the place of a stream's or a device's."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> _Entered:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class _Stream(_Entered):
    """A stream that has nothing to wait for."""

    wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        """Whether all work of the stream is done."""
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        """The event, or a new one."""
        return event or _Event()


class _Event:
    """An event a millisecond after any other."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, _end: _Event) -> float:
        """Milliseconds to another event."""
        return 1.0
