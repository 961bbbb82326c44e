"""Scripts that train on tables."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

import brimful as bf
from public.case import script
from public.texts import adam


@script("rixwew/pytorch-fm", "f74ad19771eda104e99874d19dc892e988ec53fa", "examples/main.py", 1024)
def clicks_by_deep_factors() -> bf.Job:
    """BatchNorm and dropout over a table of embeddings."""
    from torchfm.model.dfm import DeepFactorizationMachineModel

    fields = [500, 300, 200, 100, 50, 7]
    return bf.Job(
        model=lambda: DeepFactorizationMachineModel(fields, embed_dim=16, mlp_dims=(16, 16), dropout=0.2),
        loss=lambda model, batch: F.binary_cross_entropy(model(batch["fields"]), batch["target"].float()),
        batch=lambda n: {
            "fields": torch.stack([torch.randint(0, size, (n,)) for size in fields], 1),
            "target": torch.randint(0, 2, (n,)),
        },
        optimizer=partial(adam, lr=0.001, weight_decay=1e-6),
    )
