"""Cross-entropy over a large vocabulary, a part of the tokens at a time.

For N tokens, width D and a vocabulary of V, the last linear layer makes logits (N, V), and their cross-entropy
several tensors as large, most in float32. Here the layer returns `DeferredLogits` instead, which only hold
its input (N, D). Reshaped, sliced or cast they stay deferred. Their cross-entropy is computed for one chunk of
tokens after another, and each chunk's logits are computed again in backward. Any other operation on them
computes the real logits first.

The sums over tokens are those of the baseline in another order: loss and gradients agree to rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class DeferringLinear:
    """Replaces the `forward` of a linear layer by one that defers it.

    `chunks` is the number of chunks in which the cross-entropy is computed.
    """

    def __init__(self, linear: nn.Linear, chunks: int) -> None:
        self.forward: Callable[..., Any] = linear.forward
        """The original bound method."""
        self._linear, self._chunks = linear, chunks

    def __call__(self, input: Tensor) -> Tensor:
        """Logits (..., V) for an input (..., D), computed on first use; at once while a graph is compiled."""
        if torch.compiler.is_compiling():
            logits: Tensor = self.forward(input)
            return logits
        return DeferredLogits.of(_Product.of(self._linear, input, self._chunks))


class DeferredLogits(Tensor):
    """Logits (..., V) that are not computed before they are used."""

    _product: _Product
    _computed: Tensor | None

    @staticmethod
    def of(product: _Product) -> DeferredLogits:
        """Make deferred logits for a product."""
        logits = Tensor._make_wrapper_subclass(
            DeferredLogits,
            (*product.input.shape[:-1], product.layer.out_features),
            dtype=product.dtype,
            device=product.input.device,
            requires_grad=product.has_gradients,
        )
        logits._product, logits._computed = product, None
        assert isinstance(logits, DeferredLogits)
        return logits

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return metadata, defer views and casts, compute the loss in chunks; for anything else, compute the
        logits.
        """
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        handler, keywords = _HANDLERS.get(func, (None, frozenset()))
        if handler is not None and args and isinstance(args[0], cls) and kwargs.keys() <= keywords:
            result = handler(args[0]._product, *args[1:], **kwargs)
            if result is not None:
                return DeferredLogits.of(result) if isinstance(result, _Product) else result
        return func(*_computed(args), **_computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the logits for calls that bypass `__torch_function__`."""
        return func(*_computed(args), **_computed(kwargs or {}))

    def _compute(self) -> Tensor:
        if self._computed is None:
            self._computed = self._product.logits()
        return self._computed


def _computed(value: Any) -> Any:
    """A value with real logits in place of deferred ones."""
    if isinstance(value, DeferredLogits):
        return value._compute()
    if isinstance(value, Mapping):
        return {key: _computed(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_computed(each) for each in value)
    return value


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear layer, its input (..., D), and the types that its output is cast to one after another."""

    layer: nn.Linear
    input: Tensor
    chunks: int
    versions: tuple[int, ...]
    """Versions of the input and the weight when the layer was called."""
    has_gradients: bool
    autocast_dtype: torch.dtype | None
    """Autocast's dtype when the layer was called, also for the deferred product; None if no cast applies."""
    casts: tuple[torch.dtype, ...] = ()

    @classmethod
    def of(cls, layer: nn.Linear, input: Tensor, chunks: int) -> _Product:
        kind = input.device.type
        is_cast = torch.is_autocast_enabled(kind) and input.dtype is not torch.float64
        autocast_dtype = torch.get_autocast_dtype(kind) if is_cast else None
        return cls(
            layer, input, chunks, _versions(input, layer.weight), torch.is_grad_enabled(), autocast_dtype
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.input.shape[:-1], self.layer.out_features)

    @property
    def dtype(self) -> torch.dtype:
        own = self.autocast_dtype or self.input.dtype
        return self.casts[-1] if self.casts else own

    def logits(self) -> Tensor:
        """Compute the logits (..., V)."""
        self.check_unchanged()
        with torch.set_grad_enabled(self.has_gradients):
            return self.logits_of(self.input, self.layer.weight, self.layer.bias)

    def logits_of(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits for another input and other parameters."""
        dtype = self.autocast_dtype
        with torch.autocast(input.device.type, dtype, enabled=dtype is not None):
            logits = F.linear(input, weight, bias)
        for dtype in self.casts:
            logits = logits.to(dtype)
        return logits

    def check_unchanged(self) -> None:
        """Raise if the layer's input or weight has been written to since it was called."""
        if _versions(self.input, self.layer.weight) != self.versions:
            raise RuntimeError(
                "the input or the weight of the layer that makes the logits was written to in place before "
                "they were used. The plan computes the loss in chunks, and so logits where they are used. "
                "Plan with chunked_loss=False, or use the logits before."
            )

    def of_rows(self, input: Tensor) -> _Product:
        """The product with the layer for other rows of the input."""
        self.check_unchanged()
        return replace(self, input=input, versions=_versions(input, self.layer.weight))


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of the cross-entropy that are summed over tokens."""

    product: _Product
    class_weight: Tensor | None
    ignored: int
    label_smoothing: float

    def sum(self, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Sum of the terms of some tokens, in float32 at least: in float16 the sum of many overflows."""
        logits = self.product.logits_of(input, weight, bias)
        if logits.dtype.itemsize < torch.float32.itemsize:
            logits = logits.float()
        return F.cross_entropy(
            logits,
            target,
            weight=None if self.class_weight is None else self.class_weight.to(logits.dtype),
            ignore_index=self.ignored,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def count(self, target: Tensor) -> Tensor:
        """The divisor of the mean: the number of tokens not ignored, or the sum of their class weights."""
        is_counted = target != self.ignored
        if self.class_weight is None:
            return is_counted.sum()
        return (self.class_weight[target.where(is_counted, 0)] * is_counted).sum()


class _ChunkedSum(torch.autograd.Function):
    """The terms of all tokens, and their gradients, from the logits of one chunk of tokens at a time.

    The weight is cast once for all chunks; its gradients are summed in its own type, not in that of the cast.
    """

    @staticmethod
    def forward(
        ctx: Any, terms: _Terms, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> Tensor:
        """Sum of the terms, a scalar, for input (N, D), weight (V, D), bias (V,) and target (N,)."""
        ctx.save_for_backward(input, weight, bias, target)
        ctx.terms = terms
        used = _cast(weight, terms.product.autocast_dtype)
        rows = _rows(len(target), terms.product.chunks)
        return torch.stack([terms.sum(input[part], used, bias, target[part]) for part in rows]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input (N, D), weight (V, D) and bias (V,), None where not needed; `grad` is a scalar."""
        input, weight, bias, target = ctx.saved_tensors
        terms: _Terms = ctx.terms
        _, needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        input_grad = torch.empty_like(input) if needs_input else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if needs_bias else None
        weight_leaf = _leaf(_cast(weight, terms.product.autocast_dtype), needs_weight)
        bias_leaf = None if bias is None else _leaf(bias, needs_bias)
        for part in _rows(len(target), terms.product.chunks):
            input_leaf = _leaf(input[part], needs_input)
            with torch.enable_grad():
                total = terms.sum(input_leaf, weight_leaf, bias_leaf, target[part])
            total.backward(grad)
            if input_grad is not None and input_leaf.grad is not None:
                input_grad[part] = input_leaf.grad
            for grad_sum, leaf in ((weight_grad, weight_leaf), (bias_grad, bias_leaf)):
                if grad_sum is not None and leaf is not None and leaf.grad is not None:
                    grad_sum += leaf.grad
                    leaf.grad = None
        return None, input_grad, weight_grad, bias_grad, None


# Handlers of functions of logits: the result without computing them, or None where that is not possible.


def _view(product: _Product, *shape: Any) -> _Product | None:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, torch.dtype)) else shape
    if not all(isinstance(size, int) for size in sizes):
        return None
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        if not rest:
            return None
        sizes = tuple(math.prod(product.shape) // rest if size == -1 else size for size in sizes)
    if not sizes or sizes[-1] != product.layer.out_features or math.prod(sizes) != math.prod(product.shape):
        return None
    return product.of_rows(product.input.reshape(*sizes[:-1], product.input.shape[-1]))


def _flatten(product: _Product, start_dim: int = 0, end_dim: int = -1) -> _Product | None:
    dims = len(product.shape)
    end_dim += dims if end_dim < 0 else 0
    return product.of_rows(product.input.flatten(start_dim, end_dim)) if end_dim < dims - 1 else None


def _index(product: _Product, index: Any) -> _Product | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts):
        is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and index.ndim < len(product.shape)
        return product.of_rows(product.input[index]) if is_mask else None
    counted = sum(part is not None and part is not ... for part in parts)
    reaches_width = counted == len(product.shape) or (... in parts and parts[-1] is not ...)
    if reaches_width and parts[-1] != slice(None):
        return None
    return product.of_rows(product.input[index])


def _contiguous(product: _Product, *layout: Any) -> _Product | None:
    return None if layout else product


def _to(product: _Product, *what: Any, dtype: torch.dtype | None = None, device: Any = None) -> _Product | None:
    dtypes = [each for each in (*what, dtype) if isinstance(each, torch.dtype)]
    devices = [each for each in (*what, device) if isinstance(each, (str, torch.device))]
    is_plain = len(dtypes) + len(devices) == len(what) + (dtype is not None) + (device is not None)
    if not is_plain or not all(_are_same(torch.device(each), product.input.device) for each in devices):
        return None
    return replace(product, casts=(*product.casts, *dtypes))


def _float(product: _Product, *layout: Any) -> _Product | None:
    return None if layout else replace(product, casts=(*product.casts, torch.float32))


def _cross_entropy(product: _Product, *args: Any, **kwargs: Any) -> Tensor | None:
    """`torch.nn.functional.cross_entropy` of logits (N, V) and classes (N,), reduced to a scalar."""
    given = _CROSS_ENTROPY.bind(None, *args, **kwargs)
    given.apply_defaults()
    target, weight = given.arguments["target"], given.arguments["weight"]
    reduction, ignored = given.arguments["reduction"], given.arguments["ignore_index"]
    is_deprecated = given.arguments["size_average"] is not None or given.arguments["reduce"] is not None
    if (
        len(product.shape) != 2
        or target.shape != product.shape[:1]
        or reduction not in ("mean", "sum")
        or is_deprecated
    ):
        return None
    product.check_unchanged()
    terms = _Terms(product, weight, ignored, given.arguments["label_smoothing"])
    with torch.set_grad_enabled(product.has_gradients and torch.is_grad_enabled()):
        total: Tensor = _ChunkedSum.apply(
            terms, product.input, product.layer.weight, product.layer.bias, target
        )
        if reduction == "mean":
            total = total / terms.count(target)
    is_autocast = torch.is_autocast_enabled(product.input.device.type)
    return total if is_autocast else total.to(product.dtype)


def _are_same(device: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; a CPU's index means nothing."""
    return device == other or device.type == other.type == "cpu"


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _rows(count: int, chunks: int) -> list[slice]:
    size = max(1, -(-count // chunks))
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(needs_grad)


_METADATA = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.__len__,
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse")
        ),
    }
)
"""Functions that read metadata, which are known before the logits are computed."""

_HANDLERS: dict[Any, tuple[Callable[..., Any], frozenset[str]]] = {
    Tensor.view: (_view, frozenset()),
    Tensor.reshape: (_view, frozenset()),
    torch.reshape: (_view, frozenset()),
    Tensor.flatten: (_flatten, frozenset({"start_dim", "end_dim"})),
    torch.flatten: (_flatten, frozenset({"start_dim", "end_dim"})),
    Tensor.__getitem__: (_index, frozenset()),
    Tensor.contiguous: (_contiguous, frozenset()),
    Tensor.to: (_to, frozenset({"dtype", "device"})),
    Tensor.float: (_float, frozenset()),
    F.cross_entropy: (_cross_entropy, frozenset(_CROSS_ENTROPY.parameters)),
}
"""By function: what may defer it, and the keyword arguments that this supports."""
