"""Does the layout of attention's output explain what published peaks of ViT-L/16 exceed predictions by?

    python benchmarks/published_vit.py

S. Raschka's pytorch-memory-optim (logs.md, commit f6eddcd) has the reserved memory of six scripts on an A100
with torch 2.1.0.dev20230623. Its flash attention returned (B, S, H, D), which `nn.MultiheadAttention` then
copies; today's returns the layout of its inputs, which needs no copy. Its foreach Adam held a second list of
temporaries, which explains what is left of one script. Each is predicted as today, with the former, and with
both. Needs torchvision; a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torchvision_on_cpu  # noqa: F401  # before torchvision

# isort: split
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import vit_l_16

import brimful as bf
from machine import keep

CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One of the scripts, and what its log says."""

    name: str
    reserved_gb: float
    """`torch.cuda.max_memory_reserved() / 1e9`."""
    dtype: torch.dtype
    samples: int = 64
    is_mixed: bool = False
    accumulates: int = 0
    """Micro-batches in a step; 0: gradients are cleared between forward and backward."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam


BF16 = torch.bfloat16
SCRIPTS = (
    Script(name="01_pytorch-vit", reserved_gb=26.79, dtype=torch.float32),
    Script(name="02_mixed-precision", reserved_gb=18.21, dtype=torch.float32, is_mixed=True),
    Script(name="03_bfloat16", reserved_gb=13.82, dtype=BF16),
    Script(name="04_lower-batchsize", reserved_gb=5.69, dtype=BF16, samples=16),
    Script(name="05_gradient-accum", reserved_gb=3.91, dtype=BF16, samples=4, accumulates=4),
    Script(
        name="06_sgd-with-scheduler",
        reserved_gb=2.02,
        dtype=BF16,
        samples=4,
        accumulates=4,
        optimizer=torch.optim.SGD,
    ),
)


class BatchFirst(nn.MultiheadAttention):
    """`nn.MultiheadAttention` over an attention that returns (B, S, H, D)."""

    def forward(self, query: Tensor, *_others: Tensor, **_options: Any) -> tuple[Tensor, None]:
        """(B, S, E); source: torch/nn/functional.py, multi_head_attention_forward (2.13)."""
        x = query.transpose(0, 1)
        length, samples, width = x.shape
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, width))
        projected = projected.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        heads = (length, samples * self.num_heads, self.head_dim)
        q, k, v = (
            each.view(heads).transpose(0, 1).view(samples, self.num_heads, length, self.head_dim)
            for each in projected
        )
        found = F.scaled_dot_product_attention(q, k, v)
        if found.dtype is not torch.float32:  # whose kernel is another
            found = found.transpose(1, 2).contiguous().transpose(1, 2)
        found = found.permute(2, 0, 1, 3).contiguous().view(length * samples, width)
        return self.out_proj(found).view(length, samples, width).transpose(0, 1), None


def job_of(script: Script, *, is_batch_first: bool, has_second_list: bool) -> bf.Job:
    """What a script trains."""

    def build() -> nn.Module:
        model = vit_l_16()
        model.heads.head = nn.Linear(1024, CLASSES)
        for layer in model.encoder.layers if is_batch_first else ():
            layer.self_attention.__class__ = BatchFirst
        return model.to(script.dtype)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, 224, 224, dtype=script.dtype), torch.randint(CLASSES, (n,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=script.is_mixed):
            logits = model(batch[0])
        return F.cross_entropy(logits.float() if script.is_mixed else logits, batch[1])

    def loop(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        optimizer = script.optimizer(model.parameters(), lr=5e-5)
        for index, each in enumerate(batches):
            found = loss(model, each)
            if not script.accumulates:
                optimizer.zero_grad()
            (found / (script.accumulates or 1)).backward()
            if index % (script.accumulates or 1) == 0:
                second_list = [torch.empty_like(each) for each in model.parameters() if has_second_list]
                optimizer.step()
                del second_list
            if script.accumulates and index % script.accumulates == 0:
                optimizer.zero_grad()

    return bf.Job(model=build, loss=loss, loop=loop, batch=batch, optimizer="adam", name=script.name)


VARIANTS = (("today", False, False), ("batch_first", True, False), ("and_second_list", True, True))


def main() -> None:
    """Predict each script as today, with the other layout, and with Adam's second list too."""
    rows = []
    for script in SCRIPTS:
        row: dict[str, object] = {"script": script.name, "published_reserved_gb": script.reserved_gb}
        for name, is_batch_first, has_second_list in VARIANTS:
            has_list = has_second_list and script.optimizer is torch.optim.Adam
            job = job_of(script, is_batch_first=is_batch_first, has_second_list=has_list)
            estimate = bf.estimate(job, "A100-SXM4-40GB", micro_batch_size=script.samples)
            predicted = estimate.predicted_peak_reserved_bytes / 1e9
            row[f"predicted_{name}_gb"] = round(predicted, 3)
            row[f"error_{name}"] = round(predicted / script.reserved_gb - 1, 4)
        rows.append(row)
        print(row, flush=True)
    keep("published_vit.json", "python benchmarks/published_vit.py", {"rows": rows}, "torchvision")


if __name__ == "__main__":
    main()
