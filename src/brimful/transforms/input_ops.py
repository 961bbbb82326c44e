"""Ops between modules that make a unit's input, run again with the unit instead of holding their result.

A U-Net concatenates a skip connection with upsampled features. The result is as large as both together, and a
recomputed unit would hold it from forward to backward, although the skip connection is held by the layer that
made it or reads it, and the features are small before they are upsampled. Here the unit holds those, and makes
its input again right before its recomputation.

* A mode follows the functions in `FUNCTIONS` in the model's forward: they copy, pool, interpolate or convolve
  upwards, draw no random numbers and write to nothing. A result is known as long as it exists. Any other
  tensor, such as what a layer returns, is held as it is.
* A result that something has written to is held like the input of any recomputed unit. A tensor it is made
  from that something writes to later raises an error in backward, as in plain PyTorch.
* Under FSDP2 a module has its weights in its own forward and backward only: what an upward convolution returns
  is held there.
* `torch.compile` does not take the mode into its graphs: a model compiled as a whole runs eagerly.
* The function runs again with the same arguments, so the values are the same bits. Autocast is restored by
  checkpointing; a result of another dtype than in the forward raises an error.

Private or undocumented parts of torch used here: `torch.utils.weak.WeakIdKeyDictionary`,
`torch._compile._disable_dynamo` (checked: torch 2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from brimful.batches import map_leaves
from brimful.transforms.segments import Argument, Held, gathers_its_weights

_UPWARDS: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_POOLING: tuple[Any, ...] = (F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.avg_pool2d, F.avg_pool3d)

FUNCTIONS: frozenset[Any] = frozenset(
    {torch.cat, torch.concat, torch.concatenate, torch.stack, F.pad, F.interpolate, *_POOLING, *_UPWARDS}
)
"""Functions that run again; their ops are `trace.modules.INPUT_OP_KINDS`."""

_running = threading.local()


def are_running() -> bool:
    """Whether this thread is making an input again, by ops that do not belong to the unit's own forward."""
    return getattr(_running, "depth", 0) > 0


class Made(Argument):
    """How a tensor was made: a function and its arguments, each held, or made by such a function itself.

    `function` is one of `FUNCTIONS`; `arguments` are positional and keyword ones, with a `Held` or `Made` in
    place of each tensor; `result` is what it returned.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, result: Tensor) -> None:
        self._function = function
        self._arguments = arguments
        self._dtype = result.dtype
        self.version = result._version
        """Version of the result when it was made."""

    def read(self) -> Tensor:
        """The tensor, made again and without history."""
        return self.again().detach()

    def take(self) -> Tensor:
        """The tensor, as `read` returns it."""
        return self.read()

    def again(self) -> Tensor:
        """Run the function again; nothing is saved for backward, as its arguments have no history."""
        args, kwargs = map_leaves(self._arguments, Argument, methodcaller("read"), into_objects=False)
        result: Tensor = self._function(*args, **kwargs)
        if result.dtype is not self._dtype:
            raise RuntimeError(
                f"a unit cannot be recomputed: its input was made as {self._dtype} in the forward, and as "
                f"{result.dtype} again, because autocast was switched in between. Recompute the unit without "
                'the ops that make its input: remove the "+" before its name.'
            )
        return result


class Derived(Argument):
    """An argument of a unit that is not held but made again; `requires_grad` is as in the forward."""

    def __init__(self, made: Made, *, requires_grad: bool) -> None:
        self._made = made
        self._requires_grad = requires_grad

    def read(self) -> Tensor:
        """The tensor, made again."""
        _running.depth = getattr(_running, "depth", 0) + 1
        try:
            return self._made.read().requires_grad_(self._requires_grad)
        finally:
            _running.depth -= 1

    def take(self) -> Tensor:
        """The tensor, as `read` returns it."""
        return self.read()


class InputOps:
    """How tensors of the current forward were made, as long as they exist. A copy of this object is empty."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[InputOps], tuple[()]]:
        return InputOps, ()

    @contextmanager
    def followed(self, functions: frozenset[Any] = FUNCTIONS) -> Iterator[None]:
        """Follow the functions called while the context is open."""
        with _Following(self, functions):
            yield

    def remember(self, result: Tensor, made: Made) -> None:
        """Record how a tensor was made."""
        self._made[result] = made

    def derived(self, tensor: Tensor) -> Derived | None:
        """What replaces a tensor that was made by `FUNCTIONS`; None for any other."""
        made = self.made(tensor)
        return None if made is None else Derived(made, requires_grad=tensor.requires_grad)

    def made(self, tensor: Tensor) -> Made | None:
        """How a tensor was made; None if it is not known, or if something has written to the tensor since."""
        made: Made | None = self._made.get(tensor)
        return None if made is None or made.version != tensor._version else made


class FollowedForward:
    """Replaces the whole model's `forward` and follows the functions that it calls between its modules.

    `input_ops` records how tensors are made.
    """

    def __init__(self, model: nn.Module, input_ops: InputOps) -> None:
        self.forward: Callable[..., Any] = model.forward
        """The original bound method."""
        self._model = model
        self._input_ops = input_ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward; with gradients enabled, follow its functions."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self._followed(*args, **kwargs)

    @_disable_dynamo
    def _followed(self, *args: Any, **kwargs: Any) -> Any:
        is_gathered = any(map(gathers_its_weights, self._model.modules()))
        with self._input_ops.followed(FUNCTIONS.difference(_UPWARDS if is_gathered else ())):
            return self.forward(*args, **kwargs)


class _Following(TorchFunctionMode):
    def __init__(self, input_ops: InputOps, functions: frozenset[Any]) -> None:
        super().__init__()
        self._input_ops = input_ops
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._functions and isinstance(result, Tensor) and not result.is_inference():
            arguments = map_leaves((args, kwargs or {}), Tensor, self._operand, into_objects=False)
            self._input_ops.remember(result, Made(func, arguments, result))
        return result

    def _operand(self, tensor: Tensor) -> Held | Made:
        return self._input_ops.made(tensor) or Held(tensor.detach())
