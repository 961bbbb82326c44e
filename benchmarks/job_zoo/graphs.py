"""Graphs: batches of them, one of them, and molecules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import job_case
from job_zoo.parts import mlp

# G graphs, N nodes, E edges, D width

TOO_MUCH = "a gradient that backward adds to in place is predicted as a block more"


class Convolution(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = mlp(2 * width, width, width), mlp(2 * width, width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = self.message(torch.cat([x[source], x[target]], 1))
        return x + self.update(torch.cat([x, torch.zeros_like(x).index_add(0, target, sent)], 1))


class GraphNet(nn.Module):
    def __init__(self, features: int = 8, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.layers = nn.ModuleList(Convolution(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, edges)
        return x


def graph_batch(n: int) -> dict[str, Tensor]:
    """Graphs of 6 to 12 nodes as one: nodes, edges (2, E), the graph of each node, a label of each graph."""
    sizes = [6 + i % 7 for i in range(n)]
    starts = [sum(sizes[:i]) for i in range(n)]
    edges = [start + torch.randint(0, size, (2, 4 * size)) for start, size in zip(starts, sizes, strict=True)]
    return {
        "x": torch.randn(sum(sizes), 8),
        "edges": torch.cat(edges, 1),
        "graph": torch.repeat_interleave(torch.arange(n), torch.tensor(sizes)),
        "y": torch.randint(0, 4, (n,)),
    }


@job_case(128, named=TOO_MUCH)
def graphs_as_one_graph() -> bf.Job:
    def loss(model: GraphNet, batch: dict[str, Tensor]) -> Tensor:
        x = model(batch["x"], batch["edges"])
        count = len(batch["y"])
        sums = torch.zeros(count, x.shape[1]).index_add(0, batch["graph"], x)
        return F.cross_entropy(model.head(sums / batch["graph"].bincount(minlength=count)[:, None]), batch["y"])

    return bf.Job(model=GraphNet, loss=loss, batch=graph_batch)


@job_case(128, needs=("torch_geometric",))
def torch_geometric_batch() -> bf.Job:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.head = GCNConv(8, 64), GCNConv(64, 64), nn.Linear(64, 4)

        def forward(self, data: Any) -> Tensor:
            x = self.conv1(data.x, data.edge_index).relu()
            x = self.conv2(x, data.edge_index).relu()
            return self.head(global_mean_pool(x, data.batch))

    def batch(n: int) -> Any:
        graphs, fixed = [], torch.Generator().manual_seed(0)  # how many edges are loops decides sizes
        for i in range(n):
            size = 6 + i % 7
            edges = torch.randint(0, size, (2, 4 * size), generator=fixed)
            graphs.append(Data(x=torch.randn(size, 8), edge_index=edges, y=torch.randint(0, 4, (1,))))
        return Batch.from_data_list(graphs)

    return bf.Job(model=Net, loss=lambda m, b: F.cross_entropy(m(b), b.y), batch=batch)


@job_case(128)
def padded_molecules_with_dense_edges() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, near = batch["x"], batch["near"]
        x = model.enter(x)
        for layer in model.layers:
            x = x + layer(near @ x)
        mask = batch["mask"][..., None]
        return F.l1_loss(model.head((x * mask).sum(1) / mask.sum(1))[:, 0], batch["energy"])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
            self.layers = nn.ModuleList(mlp(32, 64, 32, act=nn.SiLU) for _ in range(2))

    def batch(n: int) -> dict[str, Tensor]:
        mask = (torch.arange(16) < 8 + torch.arange(n)[:, None] % 8).float()
        near = (torch.rand(n, 16, 16) < 0.3).float() * mask[:, None] * mask[..., None]
        return {"x": torch.randn(n, 16, 8), "near": near, "mask": mask, "energy": torch.randn(n)}

    return bf.Job(model=Net, loss=loss, batch=batch)


@job_case(512, named=TOO_MUCH)
def nodes_of_one_graph() -> bf.Job:
    """The graph is in a global; a batch is the indices of the nodes whose labels count."""
    edges, x, y = torch.randint(0, 512, (2, 2048)), torch.randn(512, 8), torch.randint(0, 4, (512,))

    def loss(model: GraphNet, batch: dict[str, Tensor]) -> Tensor:
        logits = model.head(model(x, edges))
        return F.cross_entropy(logits[batch["nodes"]], y[batch["nodes"]])

    return bf.Job(model=GraphNet, loss=loss, batch=lambda n: {"nodes": torch.arange(n)})


@job_case(64)
def forces_of_molecules() -> bf.Job:
    """Forces are the energy's gradient, so the loss has a gradient in it."""

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = mlp(1, 64, 64, 1, act=nn.SiLU)

        def forward(self, places: Tensor) -> Tensor:
            apart = (places[:, :, None] - places[:, None] + torch.eye(3)[0]).norm(dim=-1, keepdim=True)
            return self.pair(apart).sum((1, 2, 3))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        places = batch["places"].clone().requires_grad_()
        energy = model(places)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return F.mse_loss(energy, batch["energy"]) + 10 * F.mse_loss(-slope, batch["forces"])

    return bf.Job(
        model=Potential,
        loss=loss,
        batch=lambda n: {
            "places": torch.randn(n, 9, 3),
            "energy": torch.randn(n),
            "forces": torch.randn(n, 9, 3),
        },
    )
