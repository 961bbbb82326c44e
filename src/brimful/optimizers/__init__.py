"""Optimizers by name, each with its usual defaults.

| name | class in `torch.optim` | learning rate | other defaults | state, float32 parameters |
|---|---|---|---|---|
| `adamw` | `AdamW` | 1e-3 | betas (0.9, 0.999), eps 1e-8, weight decay 0.01 | 8 bytes a parameter |
| `adam` | `Adam` | 1e-3 | betas (0.9, 0.999), eps 1e-8 | 8 bytes a parameter |
| `sgd` | `SGD` | 1e-3 | momentum 0.9 | 4 bytes a parameter |
| `rmsprop` | `RMSprop` | 1e-2 | alpha 0.99, eps 1e-8 | 4 bytes a parameter |
| `adagrad` | `Adagrad` | 1e-2 | eps 1e-10 | 4 bytes a parameter |
| `adafactor` | `Adafactor` | 1e-2 | beta2 decay -0.8, d 1.0 | 4 bytes a row and a column of a matrix |
| `adamw8bit` | `AdamW8bit` of bitsandbytes | 1e-3 | as `adamw` | 2.03 bytes a parameter |
| `muon` | `Muon` of torch's | 1e-3 | momentum 0.95, weight decay 0.1; else `adamw` | 4 bytes, where AdamW 8 |

These are torch's own defaults (checked: torch 2.13), except for SGD's momentum, which is 0 in torch but
rarely in practice. AdamW, Adam, RMSprop, Adagrad and Adafactor also keep a 4-byte step count per
tensor. Adafactor's vectors are not factored and take 4 bytes a parameter. AdamW8bit keeps tensors of fewer
than 4096 parameters in float32, and two tables of 1 KiB (checked: bitsandbytes 0.50, which is an extra:
`brimful[bitsandbytes]`).

Muon is for hidden matrices, so `muon` is torch's Muon on those and torch's AdamW on the rest: embeddings, the
model's last linear layer, biases, norms, convolutions. Muon's learning rate is adjusted as Moonshot's ("Muon is
Scalable for LLM Training", arXiv:2502.16982), so that one serves both.
"""

from brimful.optimizers.by_name import (
    NOT_UNDER_FSDP2,
    ZERO_OPTIMIZERS,
    NamedOptimizer,
    make_optimizer,
    named_optimizer,
    optimizer_names,
)
from brimful.optimizers.closures import check_needs_no_closure
from brimful.optimizers.implementations import (
    check_gaps,
    has_gaps,
    has_implementation,
    kept_implementation,
    set_implementation,
)
from brimful.optimizers.muon import Muon
from brimful.optimizers.ownership import check_parameters, parameters_of
from brimful.optimizers.predicted_8bit import is_of_bitsandbytes
from brimful.optimizers.sparse import (
    SPARSE_ARGUMENT,
    check_dense_gradients,
    check_gradients_are_dense,
    check_op_makes_dense_gradient,
)

__all__ = [
    "NOT_UNDER_FSDP2",
    "SPARSE_ARGUMENT",
    "ZERO_OPTIMIZERS",
    "Muon",
    "NamedOptimizer",
    "check_dense_gradients",
    "check_gaps",
    "check_gradients_are_dense",
    "check_needs_no_closure",
    "check_op_makes_dense_gradient",
    "check_parameters",
    "has_gaps",
    "has_implementation",
    "is_of_bitsandbytes",
    "kept_implementation",
    "make_optimizer",
    "named_optimizer",
    "optimizer_names",
    "parameters_of",
    "set_implementation",
]
