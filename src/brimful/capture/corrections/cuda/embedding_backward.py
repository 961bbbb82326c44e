"""The gradient of an embedding is added up over sorted tokens on CUDA, in float32 and in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.trace import Kernel

# n tokens, V rows of the table, D their width

aten = torch.ops.aten


class EmbeddingBackward(Rule):
    """Count the temporaries of `embedding_dense_backward` for more than 3072 tokens; the gradient is (V, D).

    For n tokens these are their sorted values and positions, the beginnings of runs, counts and positions of at
    most min(n, V) runs, and a float32 sum for every ten tokens of a run. There are at most n/10 + min(n, V)
    such sums; the kernel allocates that number for any tokens. The temporaries of sorting are freed before, and
    the table is allocated later. A gradient that is not contiguous is copied.
    """

    name = "embedding_backward"
    source = (
        "torch aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu (with max_partial_segment: "
        "about 2.0 and later; a newer variant in two steps was not read)"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op is the backward of an embedding."""
        return func is aten.embedding_dense_backward.default

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        grad, indices, rows, _padding, by_frequency = args
        kernel = Kernel(
            name="embedding backward",
            numbers=(
                self.target.sm_count or 0,
                self.target.threads_per_multiprocessor or 0,
                indices.numel(),
                rows,
                grad.size(-1),
                indices.element_size(),
                max(grad.element_size(), 4),
                int(by_frequency),
            ),
        )
        self.add(kernel.size_bytes(), f"inside {func}", kernel=kernel)
        copied_bytes = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
        self.add(copied_bytes, f"copy inside {func}")
