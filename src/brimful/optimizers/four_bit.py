"""AdamW whose two moments take four bits a number each, and the scales of their blocks.

The method is that of Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States" (arXiv:2309.01507), as
torchao's `AdamW4bit` has it: blocks of 128 numbers, each with its largest magnitude in float32; the first
moment by a signed table whose steps grow tenfold twice, the second by a linear one without zero. A parameter is
updated from the moments before they are rounded.

torchao's own keeps its state in a tensor subclass whose memory torch does not see, and compiles its step. The
state here is plain byte tensors, so that it is predicted, copied, saved and restored like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import UsageError

BLOCK_NUMBERS = 128
"""That share a scale: torchao's default, and the paper's for the second moment."""

LEAST_NUMBERS = 4096
"""Smaller parameters keep float32, as in bitsandbytes and torchao: they take little and matter much."""

PIECE_NUMBERS = 2**22
"""Numbers of a parameter that are updated together, if it is contiguous: temporaries are a few times 16 MiB for
a parameter of any size.

A choice: they keep a GPU busy for longer than it takes to launch the next op.
"""

_CODE_BYTES = BLOCK_NUMBERS // 2
_BLOCK_BYTES = _CODE_BYTES + 4

# Middles of 4, 2 and 1 parts of what is between a tenth and one, each time a tenth of that before, as
# torchao.optim.quant_utils has them, create_dynamic_map(True, 3, 4).
_MAGNITUDES = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)
SIGNED = (*(-each for each in reversed(_MAGNITUDES)), 0.0, *_MAGNITUDES, 1.0)
"""Values of the codes of the first moment, relative to the block's largest magnitude."""
UNSIGNED = tuple(code / 16 for code in range(1, 17))
"""The same of the second moment: without zero, by which an update would be divided."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LEAST_SCALE = 1e-12  # as torchao's scale_tensor


class AdamW4bit(Optimizer):
    """AdamW with 4-bit moments; see above. It computes in float32.

    Parameters with fewer than 4096 numbers, or not a multiple of 128, keep their moments in float32.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate, at least 0.
        betas: Decay of the two moments, each at least 0 and below 1.
        eps: Added to the root of the second moment, at least 0.
        weight_decay: Decoupled, at least 0.

    Raises:
        UsageError: A number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise UsageError(f"AdamW4bit: {name} is {value}; it must be at least 0.")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"AdamW4bit: betas are {betas}; each must be at least 0 and below 1.")
        self._tables: dict[torch.device, tuple[_Table, _Table]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Reevaluates the model and returns the loss, with gradients.

        Returns:
            The loss; None without `closure`.

        Raises:
            UsageError: A gradient is sparse, or a parameter has a type that float32 would round.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch's own method would convert the bytes to floats.

        Args:
            state_dict: State of an `AdamW4bit` with the same parameter groups.

        Raises:
            ValueError: The parameter groups differ.
        """
        super().load_state_dict({**state_dict, "state": {}})
        given = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(given, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().to(device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = {}

    def _tables_on(self, device: torch.device) -> tuple[_Table, _Table]:
        """Of both moments; made once, as a GPU waits for such a copy."""
        if device not in self._tables:
            self._tables[device] = _Table(SIGNED, device), _Table(UNSIGNED, device)
        return self._tables[device]

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"adamw4bit takes dense gradients, and one is {gradient.layout}. Make embeddings with "
                "sparse=False."
            )
        if parameter.dtype not in _DTYPES:
            raise UsageError(
                f"adamw4bit computes in float32, and a parameter is {parameter.dtype}. Take 'adamw'."
            )
        signed, unsigned = self._tables_on(parameter.device)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = _zeros(parameter)
            state["exp_avg_sq"] = _zeros(parameter)
        state["step"] += 1
        steps = state["step"].item()
        beta1, beta2 = group["betas"]
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        row = gradient.reshape(-1)
        for piece, begin, end in _pieces(parameter):
            first_moment = _Moment(state["exp_avg"], begin, end, signed)
            second_moment = _Moment(state["exp_avg_sq"], begin, end, unsigned)
            part = row[begin:end].float()
            first = first_moment.read().lerp(part, 1 - beta1)
            second = second_moment.read().lerp(part.square(), 1 - beta2)
            divisor = second.sqrt().div_(correction2**0.5).add_(group["eps"])
            updated = piece.float().reshape(-1).mul(1 - group["lr"] * group["weight_decay"])
            updated.addcdiv_(first, divisor, value=-group["lr"] / correction1)
            # one change of each tensor, the parameter first, so that an interrupted update can be resumed
            piece.copy_(updated.view(piece.shape))
            first_moment.write(first)
            second_moment.write(second)


class _Table:
    """Values of the 16 codes of a moment, on a device."""

    def __init__(self, values: tuple[float, ...], device: torch.device) -> None:
        self.values = torch.tensor(values, device=device)
        below, above = torch.tensor(values[:-1]), torch.tensor(values[1:])
        self.bounds = ((below + above) / 2).to(device)
        """From where on the next code is nearer, (15,)."""


class _Moment:
    """Some numbers of a moment.

    Args:
        kept: All of it: float32, or rows of the codes of a block, two a byte, and its scale.
        begin: The first number.
        end: The one after the last.
        table: Of the codes.
    """

    def __init__(self, kept: Tensor, begin: int, end: int, table: _Table) -> None:
        self._is_exact = kept.dtype is torch.float32
        per_row = 1 if self._is_exact else BLOCK_NUMBERS
        self._kept = kept[begin // per_row : end // per_row]
        self._table = table

    def read(self) -> Tensor:
        """The numbers, float32 (N,)."""
        if self._is_exact:
            return self._kept
        codes, scales = self._kept[:, :_CODE_BYTES], self._kept[:, _CODE_BYTES:].view(torch.float32)
        pairs = torch.stack([codes >> 4, codes & 15], dim=-1)
        numbers = self._table.values.index_select(0, pairs.view(-1).int())
        return (numbers.view(-1, BLOCK_NUMBERS) * scales).view(-1)

    def write(self, numbers: Tensor) -> None:
        """Keep others in their place, float32 (N,)."""
        if self._is_exact:
            self._kept.copy_(numbers)
            return
        blocks = numbers.view(-1, BLOCK_NUMBERS)
        scales = blocks.abs().amax(1, keepdim=True).clamp_(min=_LEAST_SCALE)
        codes = torch.bucketize(blocks / scales, self._table.bounds, out_int32=True, right=True)
        codes = codes.to(torch.uint8)
        packed = (codes[:, ::2] << 4) | codes[:, 1::2]
        self._kept.copy_(torch.cat([packed, scales.view(torch.uint8)], dim=1))


def _zeros(parameter: nn.Parameter) -> Tensor:
    """A moment before the first step: float32 (N,), or rows of bytes, (N / 128, 68), whose scales are 0."""
    numbers = parameter.numel()
    if numbers < LEAST_NUMBERS or numbers % BLOCK_NUMBERS:
        return torch.zeros(numbers, dtype=torch.float32, device=parameter.device)
    return torch.zeros(numbers // BLOCK_NUMBERS, _BLOCK_BYTES, dtype=torch.uint8, device=parameter.device)


def _pieces(parameter: nn.Parameter) -> Iterator[tuple[Tensor, int, int]]:
    """Parts of a parameter, each with its range of numbers; the whole of one that is not contiguous."""
    numbers = parameter.numel()
    if not parameter.is_contiguous():
        yield parameter, 0, numbers
        return
    for begin in range(0, numbers, PIECE_NUMBERS):
        end = min(begin + PIECE_NUMBERS, numbers)
        yield parameter.view(-1)[begin:end], begin, end  # a new view: it has changed since
