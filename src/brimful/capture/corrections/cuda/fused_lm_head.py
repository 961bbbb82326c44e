"""TRL's language-model head folds its tiles of logits in Triton kernels on CUDA, which allocate nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.torch_utils.replaced import replaced

_KERNELS = "trl.kernels.chunked_logprob"
_HEAD = "trl.trainer.utils"
_CHECKED = ("_use_triton", "_addmm_fp32", "_forward_kernel", "_backward_kernel")


class FusedLmHead(Rule):
    """Take the path of a GPU with Triton in the head of `SFTTrainer` and `DPOTrainer`.

    A CPU folds each tile with torch's ops, which copy it several times. On CUDA one kernel reads it once, only
    tokens whose label counts are projected, and gradients in 16 bits are added to float32 sums without copies.
    The time of these kernels is not predicted; that of the matrix products is.
    """

    name = "fused_lm_head"
    source = f"{_KERNELS}, _ChunkedLogProbFunction; {_HEAD}, add_fused_lm_head (checked: trl 1.16)"

    @contextmanager
    def context(self) -> Iterator[None]:
        """Let the head take that path while the context is open, if TRL is loaded and has this head."""
        kernels: Any = sys.modules.get(_KERNELS)
        if not all(hasattr(kernels, name) for name in _CHECKED):
            yield
            return
        stand_ins = {
            "_use_triton": lambda _device: True,
            "_forward_kernel": _OnGrid(self._folded),
            "_backward_kernel": _OnGrid(self._folded),
            "_addmm_fp32": _add_product,
            "triton": SimpleNamespace(cdiv=lambda whole, part: -(-whole // part)),
        }
        with ExitStack() as stack:
            for name, stand_in in stand_ins.items():
                stack.enter_context(replaced(kernels, name, stand_in))
            head = sys.modules.get(_HEAD)
            if hasattr(head, "_use_triton"):
                stack.enter_context(replaced(head, "_use_triton", stand_ins["_use_triton"]))
            yield

    def watches_op(self, func: Any) -> bool:
        """No op is watched: the kernels are not ops of torch."""
        return False

    def _folded(self, tile: Tensor, *_args: Any, **_options: Any) -> None:
        """A kernel that reads a tile, and in backward writes it."""
        self.count(0)


class _OnGrid:
    """A Triton kernel, launched as ``kernel[grid](…)``, which calls `launch` with its arguments."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._launch


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`; operands of 16 bits are added in float32 by cuBLAS."""
    if left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
