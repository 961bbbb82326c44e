"""Jobs whose batches are not tensors with samples first: graphs, targets of a detector, time first, objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from brimful.job import Job

FEATURES = 6


class Graph:
    """One graph, with the methods of PyTorch Geometric's `Data` that brimful uses."""

    def __init__(self, **entries: Any) -> None:
        self._store = entries

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._store:
            raise AttributeError(name)
        return self._store[name]

    def __copy__(self) -> Graph:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        copied._store = dict(self._store)
        return copied

    def __call__(self) -> Any:
        return iter(self._store.items())

    def to_dict(self) -> dict[str, Any]:
        return dict(self._store)

    def apply(self, change: Callable[[Any], Any]) -> Graph:
        for name, value in self._store.items():
            self._store[name] = change(value)
        return self

    def to(self, device: str) -> Graph:
        return self.apply(lambda value: value.to(device))


class GraphBatch(Graph):
    """Several graphs as one large graph, as PyTorch Geometric's `Batch`."""

    @property
    def num_graphs(self) -> int:
        return len(self._nodes)

    @classmethod
    def from_data_list(cls, graphs: list[Graph]) -> GraphBatch:
        nodes = [len(graph.x) for graph in graphs]
        starts = [sum(nodes[:index]) for index in range(len(nodes))]
        batch = cls(
            x=torch.cat([graph.x for graph in graphs]),
            edge_index=torch.cat(
                [graph.edge_index + start for graph, start in zip(graphs, starts, strict=True)], 1
            ),
            y=torch.cat([graph.y for graph in graphs]),
            batch=torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(nodes)),
        )
        batch._nodes, batch._edges = nodes, [graph.edge_index.shape[1] for graph in graphs]
        return batch

    def to_data_list(self) -> list[Graph]:
        xs, edges = self.x.split(self._nodes), self.edge_index.split(self._edges, 1)
        starts = [sum(self._nodes[:index]) for index in range(len(self._nodes))]
        return [
            Graph(x=x, edge_index=edge - start, y=y)
            for x, edge, start, y in zip(xs, edges, starts, self.y.split(1), strict=True)
        ]


class Device:
    """A batch of a class of one's own, which can be brought to a device."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.source = x, y, "sensors"

    def to(self, device: str) -> Device:
        moved = copy.copy(self)
        moved.x, moved.y = self.x.to(device), self.y.to(device)
        return moved


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def graph(index: int) -> Graph:
    nodes = 3 + index % 2
    edges = torch.tensor([[node, (node + 1) % nodes] for node in range(nodes)]).T
    return Graph(x=_random(nodes, FEATURES, seed=index), edge_index=edges, y=_random(1, seed=100 + index))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch.x)
        source, target = batch.edge_index
        hidden = torch.tanh(hidden.index_add(0, target, hidden[source]))
        pooled = hidden.new_zeros(batch.num_graphs, 8).index_add(0, batch.batch, hidden)
        return self.head(pooled).squeeze(1)


def graph_loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - batch.y).square().mean()


def image(index: int) -> Tensor:
    return _random(3, 8 + 2 * (index % 2), 10, seed=index)


def target(index: int) -> dict[str, Tensor]:
    boxes = 1 + index % 2
    return {"boxes": _random(boxes, 4, seed=index), "labels": torch.arange(boxes) % 5}


class Detector(nn.Module):
    """Losses of each image with its own boxes, as torchvision's detectors take them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.boxes, self.classes = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, images: Any, targets: Any) -> Tensor:
        losses = []
        for image, target in zip(images, targets, strict=True):
            features = torch.relu(self.conv(image[None])).mean((2, 3))
            boxes = (self.boxes(features) - target["boxes"]).square().mean()
            logits = self.classes(features).expand(len(target["labels"]), -1)
            losses.append(boxes + nn.functional.cross_entropy(logits, target["labels"]))
        return torch.stack(losses).mean()


def images_and_targets(indices: range) -> tuple[tuple[Tensor, ...], tuple[dict[str, Tensor], ...]]:
    """A batch as torchvision's examples collate it: `tuple(zip(*samples))`."""
    samples = [(image(index), target(index)) for index in indices]
    return tuple(zip(*samples, strict=True))  # type: ignore[return-value]


def _dicts(samples: int) -> list[dict[str, Tensor]]:
    return [{"image": image(index)} | target(index) for index in range(samples)]


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0]).squeeze(2)


def _time_first_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["x"])
    is_there = torch.arange(len(found))[:, None] < batch["lengths"]
    return ((found - batch["y"]).square() * is_there).sum(0).div(batch["lengths"]).mean()


def _time_first(samples: int) -> dict[str, Tensor]:
    return {
        "x": _random(7, samples, FEATURES, seed=1),
        "y": _random(7, samples, seed=2),
        "lengths": torch.arange(samples) % 5 + 3,
    }


def _packed(samples: int) -> dict[str, Any]:
    return collate_rows([_random(2 + index % 2, FEATURES, seed=index) for index in range(samples)])


def split_rows(batch: dict[str, Any]) -> list[Tensor]:
    return list(batch["rows"].split(batch["lengths"]))


def collate_rows(rows: list[Tensor]) -> dict[str, Any]:
    return {"rows": torch.cat(rows), "lengths": [len(each) for each in rows]}


def _packed_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    parts = model(batch["rows"]).split(batch["lengths"])
    return torch.stack([part.square().mean() for part in parts]).mean()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def _object_loss(model: nn.Module, batch: Device) -> Tensor:
    assert batch.source == "sensors"
    return (model(batch.x) - batch.y).square().mean()


def _jobs() -> dict[str, Job]:
    return {
        "a batch of graphs": Job(
            model=GraphNet,
            loss=graph_loss,
            batch=lambda n: GraphBatch.from_data_list([graph(index) for index in range(n)]),
        ),
        "a real batch of graphs": Job(
            model=GraphNet,
            loss=graph_loss,
            batch=GraphBatch.from_data_list([graph(index) for index in range(4)]),
        ),
        "a list of graphs": Job(
            model=GraphNet,
            loss=lambda model, graphs: graph_loss(model, GraphBatch.from_data_list(graphs)),
            batch=lambda n: [graph(index) for index in range(n)],
        ),
        "images and targets": Job(
            model=Detector,
            loss=lambda model, batch: model(*batch),
            batch=lambda n: images_and_targets(range(n)),
        ),
        "images in one tensor and targets": Job(
            model=Detector,
            loss=lambda model, batch: model(batch["images"], batch["targets"]),
            batch=lambda n: {
                "images": _random(n, 3, 8, 8, seed=3),
                "targets": [target(index) for index in range(n)],
                "files": [f"{index}.png" for index in range(n)],
            },
        ),
        "a list of dicts": Job(
            model=Detector,
            loss=lambda model, batch: model([each["image"] for each in batch], batch),
            batch=_dicts,
        ),
        "time first": Job(model=TimeFirst, loss=_time_first_loss, batch=_time_first, batch_dim=1),
        "an object": Job(
            model=_mlp,
            loss=_object_loss,
            batch=lambda n: Device(_random(n, FEATURES, seed=1), _random(n, 1, seed=2)),
        ),
        "split and collate": Job(
            model=_mlp, loss=_packed_loss, batch=_packed, split=split_rows, collate=collate_rows
        ),
    }


JOBS = _jobs()
"""By what a batch is. Losses are means over samples; those at even places have one size, others another."""

WHOLE = Job(
    model=_mlp,
    loss=lambda model, batch: (model(batch["x"]) * batch["weights"]).square().mean(),
    batch=lambda n: {"x": _random(3 * n, FEATURES, seed=1), "weights": _random(1, 1, seed=2)},
    name="whole",
)
"""A job whose batches cannot be split."""
