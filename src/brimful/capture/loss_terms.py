"""What a loss averages over, as its ops show it: evidence that it is not a mean over samples.

A few samples say little: if one label in a hundred is ignored, the loss of four samples is mostly the mean of
those of its halves. But a loss that ignores labels, weighs classes or divides by what it counted in the batch
is a mean over something else, however often that shows. Fixed divisors, weights of single samples and what
backward does not reach, such as metrics, are not evidence.

Private torch APIs used here: `torch.utils._python_dispatch`, the order of `nll_loss_forward`'s arguments
(checked: torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from brimful.batches import tensors_in
from brimful.capture.corrections import Rule
from brimful.capture.values.known import NotKnownError
from brimful.execution.label_watch import IGNORED_LABEL
from brimful.results.equivalence import OVER_LABELS
from brimful.torch_utils.lines import calling_line
from brimful.trace import Category, Phase

aten = torch.ops.aten

_MEAN = 1
"""The mean among ATen's reductions (Reduction.h)."""
MEAN_OVER_LABELS = f"{OVER_LABELS} {IGNORED_LABEL}"
"""Description of a loss whose mean is over all labels but those ignored by default."""
_OF_SHAPES = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
)
_OF_FIRST = frozenset(
    {"index_put", "index_put_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_"}
    | {"masked_scatter", "masked_scatter_", "index_copy", "index_copy_", "copy_"}
)
"""Ops that put entries of their other arguments back where they were chosen from."""
_MEANS = frozenset({"mean", "var", "std"})


class LossTerms(Rule):
    """Watches the forward of a step for a mean over something other than samples."""

    name = "loss_terms"
    source = "torch.nn.functional"
    device_kinds = ("cuda", "cpu")

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._found: list[tuple[str, object, Tensor]] = []
        """A description of the loss; a token for the op that shows it; and a tensor that depends on it."""
        self._reached: set[Node] = set()
        """Autograd's nodes that backward runs."""
        self._depth = 0
        self._numbers: set[float] = set()
        """Numbers that the code read from tensors that are computed from the batch."""
        self._extents: set[int] = set()
        """Numbers of entries that were chosen from tensors."""

    def found(self) -> tuple[str, ...]:
        """Descriptions of the mean that the loss is, if that is not over samples.

        What is found once for each sample by itself is omitted: it is still a mean over samples.
        """
        reached = {(what, token) for what, token, tensor in self._found if tensor.grad_fn in self._reached}
        times = Counter(what for what, _ in reached)
        whats = dict.fromkeys(what for what, _, _ in self._found)
        return tuple(what for what in whats if 0 < times[what] < self.settings.micro_batch_size)

    def begin_backward(self, roots: tuple[Tensor, ...]) -> None:
        """Collect the autograd nodes of the loss."""
        left = [root.grad_fn for root in roots]
        while left:
            node = left.pop()
            if node is not None and node not in self._reached:
                self._reached.add(node)
                left += [following for following, _ in node.next_functions]

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replace `F.cross_entropy`, so that entries which it chooses itself are not evidence.

        Under label smoothing it chooses entries, all of them if no label is ignored.
        """
        return {F.cross_entropy: self._cross_entropy}

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        is_of_chosen = any(getattr(tensor, _CHOSEN, False) for tensor in tensors_in((args, kwargs)))
        self._depth += 1
        try:
            loss = F.cross_entropy(*args, **kwargs)
        finally:
            self._depth -= 1
        if is_of_chosen and kwargs.get("reduction", "mean") == "mean":
            self._find(_OF_CHOSEN, loss)
        return loss

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Mark outputs that are computed from the batch, or from entries that were chosen from it."""
        if self.recorder.position.phase is not Phase.FORWARD:
            return
        name = func._schema.name.partition("::")[2]
        inputs = list(tensors_in((args, kwargs)))
        if func is aten._local_scalar_dense.default:
            if self._is_of_batch(args[0]):
                with suppress(NotKnownError):
                    self._numbers.add(float(self.recorder.values.known.number_of(args[0])))
            return
        of_batch = name not in _OF_SHAPES and any(map(self._is_of_batch, inputs))
        followed = inputs[:1] if name in _OF_FIRST else inputs
        if name in ("stack", "cat") and all(tensor.numel() == 1 for tensor in inputs):
            followed = []  # of one sample each
        chosen = self._chooses(func, args) or any(getattr(tensor, _CHOSEN, False) for tensor in followed)
        if self._chooses(func, args):
            self._extents.update(tensor.shape[0] for tensor in outputs if tensor.dim())
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        shares = [share for tensor in followed if (share := getattr(tensor, _SHARE, None)) is not None]
        for tensor in outputs:
            if of_batch:
                setattr(tensor, _OF_BATCH, True)
            if chosen and name not in _OF_SHAPES:
                setattr(tensor, _CHOSEN, True)
            if shares and name not in _OF_SHAPES and not is_trained:
                setattr(tensor, _SHARE, shares[0])
        if self._depth == 0 and self._is_over_count(name, args, chosen):
            if is_trained:
                self._find(_OVER_COUNT, outputs[0])
            else:
                share = (calling_line(), object())
                for tensor in outputs:
                    setattr(tensor, _SHARE, share)
        if not is_trained:
            return
        if shares:
            self._find(_OVER_COUNT, outputs[0], *shares[0])
        if self._depth == 0 and chosen and self._averages(func, name, args, kwargs):
            self._find(_OF_CHOSEN, outputs[0])
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            self._find_in_nll(outputs[0], *args)

    def _find_in_nll(
        self, loss: Tensor, _scores: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int
    ) -> None:
        if reduction != _MEAN:
            return
        if weight is not None:
            self._find("a mean over labels by the weight of their class", loss)
        if ignored != IGNORED_LABEL or self._are_uneven(labels, ignored):
            self._find(f"{OVER_LABELS} {ignored}", loss)

    def _are_uneven(self, labels: Tensor, ignored: int) -> bool:
        """Whether the labels of some samples are ignored more often than those of others.

        The last token of each text has no label, and a mean over tokens is still one over samples.
        """
        try:
            values = self.recorder.values.known.of(labels)
        except NotKnownError:
            return False
        samples = self.settings.micro_batch_size
        with _disable_current_modes():
            is_ignored = values == ignored
            if values.numel() % samples:
                return bool(is_ignored.any())
            counts = is_ignored.reshape(samples, -1).sum(1)
            return bool((counts != counts[0]).any())

    def _is_over_count(self, name: str, args: tuple[Any, ...], chosen: bool) -> bool:
        """Whether an op divides by a number that is computed from the batch."""
        if name == "reciprocal":
            return args[0].numel() == 1 and self._is_of_batch(args[0])
        if name not in ("div", "div_", "mul", "mul_"):
            return False
        upper, lower = args[0], args[1]
        if isinstance(lower, Tensor):
            return name in ("div", "div_") and lower.numel() == 1 and self._is_of_batch(lower)
        if upper.numel() != 1:
            return False
        divisor = lower if name in ("div", "div_") else 1 / lower if lower else 0
        counts = self._numbers | (self._extents if chosen else set())
        return divisor != 1 and any(abs(divisor - count) <= 1e-9 * abs(count) for count in counts)

    def _averages(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = {
            argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
        } | kwargs
        if name in _MEANS:
            dims = given.get("dim")  # without the first, each chosen entry has a mean of its own, as in a norm
            return not dims or any(dim % max(args[0].dim(), 1) == 0 for dim in dims)
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        reduction = given.get("reduction", defaults.get("reduction"))
        return type(reduction) is int and reduction == _MEAN

    def _chooses(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an op returns as many entries of a tensor as values of the batch say."""
        if func in (aten.nonzero.default, aten.masked_select.default):
            return self._is_of_batch(args[-1])
        if func is aten.index.Tensor:
            given = [index for index in args[1] if index is not None]
            return any(
                index.dtype in (torch.bool, torch.uint8)
                and self._is_of_batch(index)
                and not self._is_even(index)
                for index in given
            )
        return False

    def _is_even(self, mask: Tensor) -> bool:
        """Whether a mask chooses equally many entries of each sample, not all, as masked autoencoders do."""
        try:
            values = self.recorder.values.known.of(mask)
        except NotKnownError:
            return False
        samples = self.settings.micro_batch_size
        with _disable_current_modes():
            if mask.dim() < 2 or len(values) != samples:
                return False
            counts = values.bool().reshape(samples, -1).sum(1)
            return bool((counts == counts[0]).all()) and 0 < int(counts[0]) < values[0].numel()

    def _is_of_batch(self, value: Any) -> bool:
        """Whether a value is a tensor of the batch or computed with one."""
        if not isinstance(value, Tensor):
            return False
        if getattr(value, _OF_BATCH, False):
            return True
        ledger = self.recorder.ledger
        block = ledger.index_of(value) if value.layout is torch.strided else None
        return block is not None and ledger.blocks[block].category is Category.INPUTS

    def _find(self, what: str, tensor: Tensor, line: str | None = None, token: object = None) -> None:
        line = line or calling_line()
        self._found.append((f"{what}{f' ({line})' if line else ''}", token or object(), tensor))


_OF_CHOSEN = "a mean over entries that are chosen from the batch, as by a mask"
_OVER_COUNT = "a sum over a number that is computed from the batch, such as how many entries are not masked"
_SHARE = "_brimful_share"
"""Attribute of tensors without gradient that were divided by a count: the line of that op and its token."""
_OF_BATCH = "_brimful_of_batch"
_CHOSEN = "_brimful_chosen"
