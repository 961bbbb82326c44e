"""Scripts that train on graphs and molecules."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from public.case import script
from public.texts import adam

NODES = 400


def graph(features: int) -> dict[str, Tensor]:
    """One graph, some of whose nodes are labelled."""
    edges = (torch.rand(NODES, NODES) < 0.01).float()
    edges = ((edges + edges.T + torch.eye(NODES)) > 0).float()
    return {
        "features": torch.rand(NODES, features),
        "edges": edges / edges.sum(1, keepdim=True),
        "labels": torch.randint(0, 7, (NODES,)),
        "train": torch.arange(140),
    }


def nodes_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["features"], batch["edges"])
    return F.nll_loss(output[batch["train"]], batch["labels"][batch["train"]])


@script("tkipf/pygcn", "1600b5b748b3976413d1e307540ccc62605b4d6d", "pygcn/train.py", 1)
def nodes_by_a_gcn() -> bf.Job:
    """The batch is one graph, with a sparse matrix of edges."""
    from pygcn.models import GCN

    torch.manual_seed(0)
    one = graph(128)
    one["edges"] = one["edges"].to_sparse()
    return bf.Job(
        model=lambda: GCN(nfeat=128, nhid=16, nclass=7, dropout=0.5),
        loss=nodes_loss,
        batch=lambda _: one,
        optimizer=partial(adam, lr=0.01, weight_decay=5e-4),
    )


@script("Diego999/pyGAT", "3664f2dc90cbf971564c0bf186dc794f12446d0c", "train.py", 1)
def nodes_by_attention() -> bf.Job:
    """The batch is one graph, with a matrix of all pairs of nodes."""
    from models import GAT

    torch.manual_seed(0)
    one = graph(64)
    return bf.Job(
        model=lambda: GAT(nfeat=64, nhid=8, nclass=7, dropout=0.6, alpha=0.2, nheads=4),
        loss=nodes_loss,
        batch=lambda _: one,
        optimizer=partial(adam, lr=0.005, weight_decay=5e-4),
    )


@script("lucidrains/egnn-pytorch", "d3ba97d5b2540085cf8e02c838ebf5e42071697f", "denoise_sparse.py", 8)
def molecules_without_noise() -> bf.Job:
    """Noise is added to coordinates in the loss, and taken away by an equivariant network."""
    from egnn_pytorch import EGNN_Network

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        noised = batch["coordinates"] + torch.randn_like(batch["coordinates"])
        _, denoised = model(batch["atoms"], noised, mask=batch["mask"])
        return F.mse_loss(denoised[batch["mask"]], batch["coordinates"][batch["mask"]])

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "atoms": torch.randint(0, 21, (n, 16)),
            "coordinates": torch.randn(n, 16, 3),
            "mask": torch.ones(n, 16, dtype=torch.bool),
        }

    return bf.Job(
        model=lambda: EGNN_Network(num_tokens=21, dim=16, depth=3, num_nearest_neighbors=8, norm_coors=True),
        loss=loss,
        batch=batch,
        optimizer=partial(adam, lr=1e-3),
    )
