"""Classifiers of images, texts, tables, sounds and points."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import TinyViT, classify, conv, convnet, images, mlp, vectors


@job_case(2048)
def mlp_classifier() -> bf.Job:
    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=classify,
        batch=vectors,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    )


@job_case(1024)
def label_smoothing_with_ignored_labels_and_count() -> bf.Job:
    def batch(n: int) -> dict[str, Tensor]:
        made = vectors(n)
        made["y"][: n // 3] = -100
        return made

    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1, ignore_index=-100),
        batch=batch,
        count=lambda b: (b["y"] != -100).sum(),
    )


@job_case(1024, refused=SPLIT)
def label_smoothing_with_ignored_labels_without_count() -> bf.Job:
    job = label_smoothing_with_ignored_labels_and_count()
    return bf.Job(model=job.model, loss=job.loss, batch=job.batch)


@job_case(1024, refused=SPLIT)
def class_weights() -> bf.Job:
    """torch divides by the sum of the labels' weights, which is another in each micro-batch."""
    weights = torch.linspace(0.2, 3.0, 10)
    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=weights),
        batch=vectors,
    )


@job_case(1024)
def class_weights_with_count() -> bf.Job:
    weights = torch.linspace(0.2, 3.0, 10)
    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=weights),
        batch=vectors,
        count=lambda b: weights[b["y"]].sum(),
    )


class BasicBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(x + self.bn2(self.conv2(y)), inplace=True)


@job_case(16)
def resnet_with_batch_norm() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            BasicBlock(16),
            BasicBlock(16),
            BasicBlock(16),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        ),
        loss=classify,
        batch=images,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    )


@job_case(32)
def group_norm_convnet() -> bf.Job:
    return bf.Job(model=convnet, loss=classify, batch=images, optimizer="sgd")


@job_case(32)
def channels_last_convnet() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"].to(memory_format=torch.channels_last)), batch["y"])

    return bf.Job(
        model=lambda: convnet().to(memory_format=torch.channels_last),
        loss=loss,
        batch=images,
        optimizer=lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    )


@job_case(32)
def vit_classifier() -> bf.Job:
    return bf.Job(model=TinyViT, loss=classify, batch=images)


@job_case(32)
def vit_with_mixup() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"]
        lam = float(np.random.beta(0.8, 0.8))
        other = torch.randperm(len(x))
        logits = model(lam * x + (1 - lam) * x[other])
        return lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[other])

    return bf.Job(model=lambda: TinyViT(dropout=0.1), loss=loss, batch=images)


@job_case(32)
def hf_bert_classifier() -> bf.Job:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=3,
    )

    def batch(n: int) -> dict[str, Tensor]:
        mask = (torch.arange(48) < torch.randint(20, 49, (n, 1))).long()
        ids = torch.randint(5, 200, (n, 48)) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (n,))}

    return bf.Job(
        model=lambda: BertForSequenceClassification(config),
        loss=lambda m, b: m(**b).loss,
        batch=batch,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=2e-5),
    )


@job_case(32)
def hf_vit_classifier() -> bf.Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    return bf.Job(
        model=lambda: ViTForImageClassification(config),
        loss=lambda m, b: m(pixel_values=b["x"], labels=b["y"] % 2).loss,
        batch=images,
    )


@job_case(64)
def multi_label_with_pos_weight() -> bf.Job:
    pos_weight = torch.full((14,), 3.0)

    def batch(n: int) -> dict[str, Tensor]:
        return {"image": torch.randn(n, 3, 32, 32), "findings": (torch.rand(n, 14) < 0.2).float()}

    return bf.Job(
        model=lambda: convnet(14, width=8),
        loss=lambda m, b: F.binary_cross_entropy_with_logits(
            m(b["image"]), b["findings"], pos_weight=pos_weight
        ),
        batch=batch,
    )


@job_case(64)
def frozen_backbone_and_head() -> bf.Job:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = TinyViT(classes=None).requires_grad_(False)
            self.head = mlp(64, 512, 512, 512, 10)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.backbone.tokens(x)
            return self.head(features).mean(1)

    return bf.Job(
        model=Tuned,
        loss=classify,
        batch=images,
        optimizer=lambda ps: torch.optim.Adam((p for p in ps if p.requires_grad), lr=1e-3),
    )


@job_case(64)
def fine_tuning_with_frozen_batch_norm() -> bf.Job:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet(norm="batch", width=8)
            self.net[0].requires_grad_(False)

        def train(self, mode: bool = True) -> Tuned:
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    return bf.Job(
        model=Tuned,
        loss=classify,
        batch=images,
        optimizer=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.01, momentum=0.9),
    )


@job_case(1024, named="oneDNN copies operands in bfloat16")
def bf16_weights() -> bf.Job:
    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10).bfloat16(),
        loss=lambda m, b: F.cross_entropy(m(b["x"].bfloat16()).float(), b["y"]),
        batch=vectors,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-2),
    )


@job_case(1024)
def float64_regression() -> bf.Job:
    return bf.Job(
        model=lambda: mlp(32, 256, 256, 256, 1, act=nn.Tanh).double(),
        loss=lambda m, b: F.huber_loss(m(b["x"]).squeeze(-1), b["y"]),
        batch=lambda n: {"x": torch.randn(n, 32).double(), "y": torch.randn(n).double()},
        optimizer=lambda ps: torch.optim.Adam(ps),
    )


@job_case(32)
def sounds_through_stft() -> bf.Job:
    class Recognizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(128))
            self.net = nn.Sequential(conv(1, 8), conv(8, 8), conv(8, 16, stride=2))
            self.head = nn.Linear(16, 10)

        def forward(self, wave: Tensor) -> Tensor:
            spectrum = torch.stft(wave, 128, hop_length=64, window=self.window, return_complex=True)
            x = (spectrum.abs() + 1e-6).log()[:, None]
            return self.head(self.net(x).mean((2, 3)))

    return bf.Job(
        model=Recognizer,
        loss=lambda m, b: F.cross_entropy(m(b["wave"]), b["word"]),
        batch=lambda n: {"wave": torch.randn(n, 4000), "word": torch.randint(0, 10, (n,))},
    )


@job_case(32)
def points() -> bf.Job:
    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = mlp(3, 32, 64, 128)
            self.all = mlp(128, 64, 10)

        def forward(self, points: Tensor) -> Tensor:
            return self.all(self.each(points).amax(1))

    return bf.Job(
        model=PointNet,
        loss=lambda m, b: F.cross_entropy(m(b["points"]), b["y"]),
        batch=lambda n: {"points": torch.randn(n, 128, 3), "y": torch.randint(0, 10, (n,))},
    )


@job_case(2048)
def recommender() -> bf.Job:
    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(8))
            self.net = mlp(8 * 16 + 13, 128, 128, 1)

        def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
            rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
            return self.net(torch.cat([dense, *rows], 1)).squeeze(1)

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "dense": torch.randn(n, 13),
            "sparse": torch.randint(0, 50, (n, 8)),
            "clicked": torch.randint(0, 2, (n,)).float(),
        }

    return bf.Job(
        model=Clicks,
        loss=lambda m, b: F.binary_cross_entropy_with_logits(m(b["dense"], b["sparse"]), b["clicked"]),
        batch=batch,
        optimizer=lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    )


@job_case(32)
def several_tasks_with_learned_weights() -> bf.Job:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(conv(3, 16), conv(16, 16))
            self.depth, self.labels = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 5, 1)
            self.log_variances = nn.Parameter(torch.zeros(2))

    def loss(model: Tasks, batch: dict[str, Tensor]) -> Tensor:
        features = model.trunk(batch["image"])
        depth = F.l1_loss(model.depth(features).squeeze(1), batch["depth"])
        labels = F.cross_entropy(model.labels(features), batch["labels"])
        s = model.log_variances
        return ((-s).exp() * torch.stack([depth, labels]) + s).sum()

    return bf.Job(
        model=Tasks,
        loss=loss,
        batch=lambda n: {
            "image": torch.randn(n, 3, 32, 32),
            "depth": torch.rand(n, 32, 32),
            "labels": torch.randint(0, 5, (n, 32, 32)),
        },
    )


@job_case(32)
def segmentation_with_dice_of_each_image() -> bf.Job:
    return _segmentation((1, 2))


@job_case(32, refused=SPLIT)
def segmentation_with_dice_of_the_batch() -> bf.Job:
    """Intersections and unions are summed over the batch before they are divided."""
    return _segmentation((0, 1, 2))


def _segmentation(summed: tuple[int, ...]) -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        p, y = model(batch["x"]).squeeze(1).sigmoid(), batch["y"]
        overlap, total = (p * y).sum(summed), p.sum(summed) + y.sum(summed)
        return (1 - (2 * overlap + 1) / (total + 1)).mean()

    def batch(n: int) -> dict[str, Tensor]:
        areas = torch.rand(n, 1, 1)
        return {"x": torch.randn(n, 3, 32, 32), "y": (torch.rand(n, 32, 32) < areas).float()}

    return bf.Job(
        model=lambda: nn.Sequential(conv(3, 16), conv(16, 16), nn.Conv2d(16, 1, 1)),
        loss=loss,
        batch=batch,
    )


@job_case(2048)
def focal_loss_by_hand() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = model(batch["x"]).log_softmax(-1).gather(1, batch["y"][:, None]).squeeze(1)
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=loss, batch=vectors)


@job_case(1024)
def sharpness_aware_noise_in_the_weights() -> bf.Job:
    """Noise is added to the weights of each forward, functionally."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        noisy = {name: p + 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
        logits = torch.func.functional_call(model, noisy, (batch["x"],))
        return F.cross_entropy(logits, batch["y"])

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=loss, batch=vectors)


@job_case(32)
def own_loop_with_moving_average() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(s / 100)))
        for batch in batches:
            loss = classify(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(now, 0.001)

    return bf.Job(model=convnet, loss=classify, batch=images, loop=loop)
