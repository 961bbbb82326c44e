"""Losses that compare samples, views or models with each other."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import TinyGPT, TinyViT, classify, convnet, images, mlp

# B samples, D width


class TwoTowers(nn.Module):
    """CLIP: images and texts, each to a vector of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.image = TinyViT(classes=32, depth=2)
        self.text = TinyGPT(vocabulary=128, width=32, depth=2, length=16)
        self.text.head = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(ids)[:, -1], dim=1)


def captioned(n: int) -> dict[str, Tensor]:
    return {"images": torch.randn(n, 3, 32, 32), "ids": torch.randint(0, 128, (n, 16))}


def clip_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = scale.exp() * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@job_case(32, refused=SPLIT)
def clip_naive() -> bf.Job:
    return bf.Job(
        model=TwoTowers,
        loss=lambda m, b: clip_loss(*m(b["images"], b["ids"]), m.scale),
        batch=captioned,
    )


@job_case(32)
def clip_by_embed() -> bf.Job:
    return bf.Job(
        model=TwoTowers,
        embed=lambda m, b: (*m(b["images"], b["ids"]), m.scale),
        loss=lambda e: clip_loss(*e),
        batch=captioned,
    )


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each image flipped and shaded at random, twice."""

    def view() -> Tensor:
        flips = torch.rand(len(x), 1, 1, 1) < 0.5
        shades = 1 + 0.4 * (torch.rand(len(x), 1, 1, 1) - 0.5)
        return torch.where(flips, x.flip(3), x) * shades + 0.05 * torch.randn_like(x)

    return view(), view()


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    z = F.normalize(torch.cat([a, b]), dim=1)
    similarity = (z @ z.T / temperature).fill_diagonal_(float("-inf"))
    n = len(a)
    return F.cross_entropy(similarity, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def encoder() -> nn.Module:
    return nn.Sequential(convnet(64), nn.ReLU(), nn.Linear(64, 32))


@job_case(32, refused=SPLIT)
def simclr_with_augmentation_in_the_loss() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = two_views(batch["x"])
        return nt_xent(model(a), model(b))

    return bf.Job(model=encoder, loss=loss, batch=images)


@job_case(32)
def simclr_by_embed() -> bf.Job:
    def embed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(model(view) for view in two_views(batch["x"]))

    return bf.Job(model=encoder, embed=embed, loss=lambda e: nt_xent(*e), batch=images)


@job_case(32, refused=SPLIT)
def supervised_contrastive() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, y = F.normalize(model(batch["x"]), dim=1), batch["y"]
        itself = torch.eye(len(z), dtype=torch.bool)
        log_p = (z @ z.T / 0.1).masked_fill(itself, float("-inf")).log_softmax(1)
        same = (y[:, None] == y) & ~itself
        return -(log_p.masked_fill(~same, 0).sum(1) / same.sum(1).clamp_min(1)).mean()

    return bf.Job(model=encoder, loss=loss, batch=images)


@job_case(32, refused=SPLIT)
def barlow_twins_by_hand() -> bf.Job:
    """The correlations are over the batch; the views come with it, so that nothing is drawn."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = (model(batch[name]) for name in ("a", "b"))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (a, b))
        c = a.T @ b / len(a)
        return (c.diagonal() - 1).square().sum() + 5e-3 * (c - c.diagonal().diag()).square().sum()

    return bf.Job(
        model=encoder,
        loss=loss,
        batch=lambda n: {"a": torch.randn(n, 3, 32, 32), "b": torch.randn(n, 3, 32, 32)},
    )


@job_case(32)
def triplets() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        anchor, same, other = (F.normalize(model(batch[k]), dim=1) for k in ("anchor", "same", "other"))
        return F.triplet_margin_loss(anchor, same, other, margin=0.2)

    return bf.Job(
        model=encoder,
        loss=loss,
        batch=lambda n: {k: torch.randn(n, 3, 32, 32) for k in ("anchor", "same", "other")},
    )


@job_case(32)
def siamese_pairs() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        distance = F.pairwise_distance(model(batch["left"]), model(batch["right"]))
        same = batch["same"]
        return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()

    return bf.Job(
        model=encoder,
        loss=loss,
        batch=lambda n: {
            "left": torch.randn(n, 3, 32, 32),
            "right": torch.randn(n, 3, 32, 32),
            "same": torch.randint(0, 2, (n,)).float(),
        },
    )


@job_case(32, refused=SPLIT)
def hardest_triplets_of_the_batch() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, y = F.normalize(model(batch["x"]), dim=1), batch["y"]
        distance = torch.cdist(z, z)
        same = y[:, None] == y
        furthest = distance.masked_fill(~same, 0).amax(1)
        nearest = distance.masked_fill(same, 9).amin(1)
        return F.relu(furthest - nearest + 0.3).mean()

    return bf.Job(model=encoder, loss=loss, batch=images)


@job_case(32)
def distillation_with_teacher_inside() -> bf.Job:
    class Pupil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pupil = TinyViT(depth=2)
            self.teacher = TinyViT(width=128, depth=2).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                taught = self.teacher(x)
            return self.pupil(x), taught

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, taught = model(batch["x"])
        soft = F.kl_div((logits / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, batch["y"]) + 0.5 * 4 * soft

    return bf.Job(
        model=Pupil,
        loss=loss,
        batch=images,
        optimizer=lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-3),
    )


@job_case(32)
def distillation_with_teacher_as_global() -> bf.Job:
    teacher = TinyViT(width=128, depth=4).eval().requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        with torch.no_grad():
            taught = teacher(batch["x"])
        soft = F.kl_div((logits / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean")
        return 0.5 * classify(lambda _x: logits, batch) + 2 * soft

    return bf.Job(model=TinyViT, loss=loss, batch=images)


@job_case(32)
def perceptual_loss_through_frozen_network() -> bf.Job:
    """The gradient goes through the frozen network to the trained one, as with LPIPS."""
    judge = convnet(width=32)[:4].eval().requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = model(batch["x"])
        return F.l1_loss(judge(made), judge(batch["x"]).detach()) + F.l1_loss(made, batch["x"])

    return bf.Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)),
        loss=loss,
        batch=images,
    )


@job_case(32)
def byol_with_target_inside() -> bf.Job:
    """The target network is part of the model, and moves in each forward of training."""

    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = encoder()
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.predictor = mlp(32, 64, 32)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            p = F.normalize(self.predictor(self.online(a)), dim=1)
            with torch.no_grad():
                z = F.normalize(self.target(b), dim=1)
            return 2 - 2 * (p * z).sum(1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = two_views(batch["x"])
        return (model(a, b) + model(b, a)).mean()

    return bf.Job(model=Byol, loss=loss, batch=images)


@job_case(32)
def dino_with_moving_centre() -> bf.Job:
    class Dino(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(encoder(), nn.Linear(32, 64))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.register_buffer("centre", torch.zeros(64))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            with torch.no_grad():
                taught = self.teacher(b)
                target = ((taught - self.centre) / 0.04).softmax(1)
                self.centre.lerp_(taught.mean(0), 0.1)
            return -(target * (self.student(a) / 0.1).log_softmax(1)).sum(1).mean()

    return bf.Job(
        model=Dino,
        loss=lambda m, b: m(b["a"], b["b"]),
        batch=lambda n: {"a": torch.randn(n, 3, 32, 32), "b": torch.randn(n, 3, 32, 32)},
    )


@job_case(32)
def masked_autoencoder() -> bf.Job:
    """Three quarters of the patches of each image are hidden at random."""

    class MAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = TinyViT(classes=None)
            self.decoder = TinyViT(width=32, depth=1, classes=None).blocks
            self.narrow, self.out = nn.Linear(64, 32), nn.Linear(32, 48)
            self.hidden = nn.Parameter(torch.zeros(1, 1, 32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            tokens = self.encoder.patches(x).flatten(2).transpose(1, 2) + self.encoder.positions
            order = torch.rand(tokens.shape[:2]).argsort(1)
            kept, back = order[:, :16, None], order.argsort(1)[..., None]
            y = tokens.gather(1, kept.expand(-1, -1, 64))
            for block in self.encoder.blocks:
                y = block(y)
            y = torch.cat([self.narrow(y), self.hidden.expand(len(y), 48, 32)], 1)
            y = y.gather(1, back.expand(-1, -1, 32))
            for block in self.decoder:
                y = block(y)
            return self.out(y), (back.squeeze(-1) >= 16).float()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made, hidden = model(batch["x"])
        target = F.pixel_unshuffle(batch["x"], 4).flatten(2).transpose(1, 2)
        return ((made - target).square().mean(2) * hidden).sum() / hidden.sum()

    return bf.Job(model=MAE, loss=loss, batch=images)


@job_case(32, refused=SPLIT)
def sinkhorn_clusters() -> bf.Job:
    """SwAV: codes are assigned evenly over the batch."""

    class Swav(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.prototypes = encoder(), nn.Linear(32, 16, bias=False)

    def codes(scores: Tensor) -> Tensor:
        q = (scores / 0.5).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
        return q

    def loss(model: Swav, batch: dict[str, Tensor]) -> Tensor:
        a, b = (model.prototypes(F.normalize(model.encoder(batch[k]), dim=1)) for k in ("a", "b"))
        return -(codes(a.detach()) * (b / 0.1).log_softmax(1)).sum(1).mean()

    return bf.Job(
        model=Swav,
        loss=loss,
        batch=lambda n: {"a": torch.randn(n, 3, 32, 32), "b": torch.randn(n, 3, 32, 32)},
    )
