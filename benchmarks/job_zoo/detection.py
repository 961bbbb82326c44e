"""Objects, boxes and masks, with targets of different lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import Block, conv

# B samples, Q queries, N boxes of a sample


class Detr(nn.Module):
    """Images (B, 3, 32, 32) → class logits (B, Q, C + 1) and boxes (B, Q, 4)."""

    def __init__(self, classes: int = 5, queries: int = 12, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, width, 2), conv(width, width, 2))
        self.encoder = nn.Sequential(Block(width), Block(width))
        self.queries = nn.Parameter(torch.randn(1, queries, width))
        self.decoder = nn.TransformerDecoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.label, self.box = nn.Linear(width, classes + 1), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.backbone(images).flatten(2).transpose(1, 2))
        found = self.decoder(self.queries.expand(len(images), -1, -1), memory)
        return self.label(found), self.box(found).sigmoid()


def some_boxes(count: int) -> dict[str, Tensor]:
    return {"labels": torch.randint(0, 5, (count,)), "boxes": torch.rand(count, 4)}


def detection_batch(n: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """As torchvision's collate gives it: images, and a list of dicts of different lengths."""
    return torch.randn(n, 3, 32, 32), [some_boxes(1 + i % 4) for i in range(n)]


def matched_loss(model: nn.Module, batch: Any, to_host: Any) -> Tensor:
    """DETR's: the mean over images of classification and of the matched boxes' distances."""
    images, targets = batch
    logits, boxes = model(images)
    losses = []
    for i, target in enumerate(targets):
        cost = -logits[i].softmax(-1)[:, target["labels"]] + 5 * torch.cdist(boxes[i], target["boxes"], p=1)
        rows, columns = linear_sum_assignment(to_host(cost.detach()))
        rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
        labels = torch.full((logits.shape[1],), 5)
        labels[rows] = target["labels"][columns]
        distance = F.l1_loss(boxes[i][rows], target["boxes"][columns])
        losses.append(F.cross_entropy(logits[i], labels) + 5 * distance)
    return torch.stack(losses).mean()


@job_case(8)
def detr_with_hungarian_matching() -> bf.Job:
    return bf.Job(
        model=Detr, loss=lambda m, b: matched_loss(m, b, lambda cost: cost.numpy()), batch=detection_batch
    )


@job_case(8)
def detr_with_matching_of_lists() -> bf.Job:
    return bf.Job(
        model=Detr, loss=lambda m, b: matched_loss(m, b, lambda cost: cost.tolist()), batch=detection_batch
    )


@job_case(8)
def detr_with_padded_targets_in_numpy() -> bf.Job:
    """Four boxes in each image, so that the batch is plain; the matching asks NumPy."""

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "images": torch.randn(n, 3, 32, 32),
            "labels": torch.randint(0, 5, (n, 4)),
            "boxes": torch.rand(n, 4, 4),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        targets = [{"labels": a, "boxes": b} for a, b in zip(batch["labels"], batch["boxes"], strict=True)]
        return matched_loss(model, (batch["images"], targets), lambda cost: cost.cpu().numpy())

    return bf.Job(model=Detr, loss=loss, batch=batch)


@job_case(32)
def boxes_on_a_grid() -> bf.Job:
    """YOLO: each cell of a dense grid has its target and a mask of whether there is an object."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, target, here = model(batch["images"]), batch["grid"], batch["here"]
        objectness = F.binary_cross_entropy_with_logits(out[:, 4], here)
        boxes = ((out[:, :4].sigmoid() - target).square().sum(1) * here).sum((1, 2)) / here.sum((1, 2))
        return objectness + 5 * boxes.mean()

    def batch(n: int) -> dict[str, Tensor]:
        here = (torch.rand(n, 8, 8) < 0.2).float()
        here[:, 0, 0] = 1
        return {"images": torch.randn(n, 3, 32, 32), "grid": torch.rand(n, 4, 8, 8), "here": here}

    return bf.Job(
        model=lambda: nn.Sequential(conv(3, 16), conv(16, 16, 2), conv(16, 32, 2), nn.Conv2d(32, 5, 1)),
        loss=loss,
        batch=batch,
    )


@job_case(32, refused=SPLIT)
def ssd_normalised_by_positives_of_the_batch() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, positive = model(batch["images"]), batch["positive"]
        losses = F.smooth_l1_loss(out, batch["boxes"], reduction="none").sum(1)
        return (losses * positive).sum() / positive.sum()

    def batch(n: int) -> dict[str, Tensor]:
        share = torch.linspace(0.05, 0.6, n)[:, None, None]
        return {
            "images": torch.randn(n, 3, 32, 32),
            "boxes": torch.rand(n, 4, 8, 8),
            "positive": (torch.rand(n, 8, 8) < share).float(),
        }

    return bf.Job(
        model=lambda: nn.Sequential(conv(3, 16), conv(16, 16, 2), conv(16, 32, 2), nn.Conv2d(32, 4, 1)),
        loss=loss,
        batch=batch,
    )


@job_case(32)
def ssd_with_count_of_positives() -> bf.Job:
    job = ssd_normalised_by_positives_of_the_batch()
    return bf.Job(model=job.model, loss=job.loss, batch=job.batch, count=lambda b: b["positive"].sum())


@job_case(8)
def keypoints_in_a_batch_object() -> bf.Job:
    class Batch:
        def __init__(self, images: Tensor, points: Tensor) -> None:
            self.images, self.points = images, points

        def to(self, device: Any, **options: Any) -> Batch:
            return Batch(self.images.to(device, **options), self.points.to(device, **options))

        def __len__(self) -> int:
            return len(self.images)

    return bf.Job(
        model=lambda: nn.Sequential(conv(3, 32), conv(32, 32), nn.Conv2d(32, 7, 1)),
        loss=lambda m, b: F.mse_loss(m(b.images), b.points),
        batch=lambda n: Batch(torch.randn(n, 3, 32, 32), torch.rand(n, 7, 32, 32)),
    )
