"""The state of every generator of random numbers that a step may draw from."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """States of the generators of Python, NumPy and torch at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    host: bytes
    """State of torch's generator on the host. A tensor would count as memory of the step it is kept for."""
    cuda: Tensor | None
    """State of the generator of the device in use; None on a CPU."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Copy the states of the host's generators, and of that of a CUDA `device`."""
        return cls(
            python=random.getstate(),
            numpy=_NUMPY.now(),
            host=_bytes_of(torch.get_rng_state()),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    @property
    def host_tensor(self) -> Tensor:
        """State of torch's generator on the host, as `torch.Generator.set_state` takes it."""
        return torch.frombuffer(bytearray(self.host), dtype=torch.uint8)

    def restore(self, device: torch.device) -> None:
        """Restore the states of all generators; `device` is as in `now`."""
        random.setstate(self.python)
        _NUMPY.set(self.numpy)
        torch.set_rng_state(self.host_tensor)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[None]:
        """Within, random draws on the host do not change those that follow the context."""
        cpu = torch.device("cpu")
        before = cls.now(cpu)
        try:
            yield
        finally:
            before.restore(cpu)

    def to_save(self) -> dict[str, Any]:
        """The state in plain numbers, lists and tensors, so that a file of it runs no code when loaded."""
        version, numbers, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, list(numbers), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "host": self.host_tensor,
            "cuda": self.cuda,
        }

    @classmethod
    def from_save(cls, saved: dict[str, Any]) -> Self:
        """The state from a result of `to_save`."""
        version, numbers, gauss = saved["python"]
        name, keys, *rest = saved["numpy"]
        return cls(
            python=(version, tuple(numbers), gauss),
            numpy=(name, np.array(keys, dtype=np.uint32), *rest),
            host=_bytes_of(saved["host"]),
            cuda=saved["cuda"],
        )


PAUSED: list[Callable[[], AbstractContextManager[object]]] = []
"""What watches the process, each by a context in which it sees nothing."""


@contextmanager
def unseen() -> Iterator[None]:
    """Within, who watches the process sees nothing."""
    with ExitStack() as stack:
        for paused in PAUSED:
            stack.enter_context(paused())
        yield


def copied_to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, to undo a step, which who watches the step on a CPU does not count as its memory."""
    with unseen():
        return tensor.detach().to("cpu", copy=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within, random draws on the host and GPUs do not change those that follow; also a decorator.

    Public functions that run a job's code have it: weights that are made after a prediction or a training run
    are those that would have been made without it, and who watches the run sees none of it.
    """
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with unseen(), RandomState.kept():
            yield
    finally:
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


def _bytes_of(state: Tensor) -> bytes:
    """Bytes of a tensor of bytes on the host; no op runs, which might find no memory."""
    return ctypes.string_at(state.data_ptr(), state.numel())


class _OfNumPy:
    """NumPy's global generator, whose state takes 35 µs to read or set, number by number in Python.

    Most steps draw nothing from it, which comparing its bytes shows in 1 µs. There is one exception: `randn`
    makes two numbers at once and keeps the second elsewhere. A state with such a number is read each time. A
    state set from outside goes unnoticed if it differs only in having a second number.
    """

    def __init__(self) -> None:
        self._bytes: bytes | None = None
        self._state: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        """The generator's state: the identical tuple as before, if nothing was drawn since."""
        found = _bytes_of_numpy()
        if found is None or found != self._bytes:
            self._state = np.random.get_state(legacy=True)  # type: ignore[assignment]
            _, _, _, has_second, _ = self._state
            self._bytes = None if has_second else found
        return self._state

    def set(self, state: tuple[Any, ...]) -> None:
        """Set a state that `now` returned, or that was read from a file."""
        if self.now() is not state:
            np.random.set_state(state)
            self._bytes = None


_NUMPY = _OfNumPy()

_MT19937_BYTES = 624 * 4 + 4
"""Bytes of the generator's numbers and the place among them (`mt19937_state`; checked: numpy 2.4)."""


def _bytes_of_numpy() -> bytes | None:
    """The state bytes of the global generator; None if it is not NumPy's default kind."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
