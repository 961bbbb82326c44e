"""Compiled, scripted, wrapped: models that are not plain Python modules when they are trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import job_case
from job_zoo.parts import TinyGPT, classify, mlp, next_token, texts, vectors


@job_case(1024, named="fused kernels keep less than the eager ones that are predicted")
def compiled_model() -> bf.Job:
    return bf.Job(model=lambda: torch.compile(mlp(64, 256, 256, 256, 10)), loss=classify, batch=vectors)


@job_case(32, named="fused kernels keep less than the eager ones that are predicted")
def compiled_blocks() -> bf.Job:
    def model() -> nn.Module:
        gpt = TinyGPT(depth=2)
        for block in gpt.blocks:
            block.compile()
        return gpt

    return bf.Job(model=model, loss=next_token, batch=texts)


@job_case(1024, named="fused kernels keep less than the eager ones that are predicted")
def compiled_function_in_a_model() -> bf.Job:
    @torch.compile
    def act(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = act(layer(x))
            return self.layers[2](x)

    return bf.Job(model=Net, loss=classify, batch=vectors)


@job_case(1024, named="fused kernels keep less than the eager ones that are predicted")
def compiled_loss() -> bf.Job:
    @torch.compile
    def smooth(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=0.1)

    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=lambda m, b: smooth(m(b["x"]), b["y"]),
        batch=vectors,
    )


@job_case(1024)
def scripted_model() -> bf.Job:
    return bf.Job(model=lambda: torch.jit.script(mlp(64, 256, 256, 256, 10)), loss=classify, batch=vectors)


@job_case(1024)
def scripted_function_in_a_model() -> bf.Job:
    @torch.jit.script
    def fused(x: Tensor, bias: Tensor) -> Tensor:
        x = x + bias
        return x * 0.5 * (1.0 + torch.erf(x * 0.7071))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)])
            self.bias = nn.Parameter(torch.zeros(256))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = fused(layer(x), self.bias)
            return self.layers[2](x)

    return bf.Job(model=Net, loss=classify, batch=vectors)


@job_case(1024)
def traced_by_fx() -> bf.Job:
    return bf.Job(
        model=lambda: torch.fx.symbolic_trace(mlp(64, 256, 256, 256, 10)), loss=classify, batch=vectors
    )


@job_case(1024, refused="nn.DataParallel")
def in_data_parallel() -> bf.Job:
    return bf.Job(model=lambda: nn.DataParallel(mlp(64, 256, 256, 256, 10)), loss=classify, batch=vectors)


@job_case(1024)
def hooks_that_record() -> bf.Job:
    """Forward hooks keep what layers gave, for a penalty in the loss."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(64, 256, 256, 256, 10)
            self.seen: list[Tensor] = []
            for layer in self.net:
                if isinstance(layer, nn.ReLU):
                    layer.register_forward_hook(self.keep)

        def keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.seen.append(output)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.clear()
            return self.net(x)

    def loss(model: Watched, batch: dict[str, Tensor]) -> Tensor:
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        penalty = sum(kept.abs().mean() for kept in model.seen)
        model.seen.clear()
        return value + 1e-3 * penalty

    return bf.Job(model=Watched, loss=loss, batch=vectors)


@job_case(1024)
def weights_changed_in_forward() -> bf.Job:
    """Weights are quantised in place of the layer's own, and the gradient goes straight through."""

    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            step = self.weight.detach().abs().max() / 127
            rounded = (self.weight / step).round() * step
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    return bf.Job(
        model=lambda: nn.Sequential(
            Quantised(64, 256), nn.ReLU(), Quantised(256, 256), nn.ReLU(), Quantised(256, 10)
        ),
        loss=classify,
        batch=vectors,
    )


@job_case(4, gpu="RTX 3090", refused="flex_attention cannot be captured")
def flex_attention() -> bf.Job:
    from torch.nn.attention.flex_attention import flex_attention

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            y = flex_attention(q, k, v, score_mod=lambda score, _b, _h, i, j: score + (i - j) * 0.1)
            return self.head(y.transpose(1, 2).flatten(2).mean(1))

    return bf.Job(
        model=Net,
        loss=classify,
        batch=lambda n: {"x": torch.randn(n, 128, 64), "y": torch.randint(0, 10, (n,))},
    )


@job_case(8, refused="Jagged nested tensors cannot be captured")
def jagged_sequences() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        x = torch.nested.nested_tensor(batch["x"], layout=torch.jagged, requires_grad=False)
        return F.cross_entropy(model(x).to_padded_tensor(0.0).sum(1), batch["y"])

    return bf.Job(
        model=lambda: mlp(64, 256, 10),
        loss=loss,
        batch=lambda n: {
            "x": [torch.randn(40 + 10 * (i % 3), 64) for i in range(n)],
            "y": torch.randint(0, 10, (n,)),
        },
    )
