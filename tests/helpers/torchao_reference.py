"""What torchao's AdamW4bit computes, kept in torchao_adamw4bit.json beside this, for tests without torchao.

    pip install --no-deps torchao==0.18.0
    PYTHONPATH=tests python tests/helpers/torchao_reference.py

It is no requirement of the tests: where it is installed transformers loads it, and it says at every import what
it could not load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PATH = Path(__file__).with_name("torchao_adamw4bit.json")
SHAPES = [(64, 128), (40, 128, 3), (4097,), (3,), ()]
"""Two that are packed, one that is no multiple of a block, two that are small."""
STEPS = 30
DTYPES = ("float32", "bfloat16")
EVERY = 201
"""Of so many numbers one is kept."""
OPTIONS = {"lr": 1e-2}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of the shapes above, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def stepped(optimizer: torch.optim.Optimizer, steps: int, seed: int = 2) -> None:
    """Steps with gradients whose size changes from parameter to parameter and from step to step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                numbers = torch.randn(parameter.shape, generator=generator)
                parameter.grad = (numbers * torch.randn((), generator=generator).exp()).to(parameter.dtype)
        optimizer.step()


def some(tensor: Tensor) -> list[float]:
    """Those of a tensor's numbers that are kept."""
    kept: list[float] = tensor.detach().float().reshape(-1)[::EVERY].tolist()
    return kept


def main() -> None:
    """Write the file."""
    import torchao
    import torchao.optim

    torch.compile = lambda function, **_how: function  # compiled or not, it is the same code
    found: dict[str, Any] = {"torchao": torchao.__version__, "torch": torch.__version__}
    for dtype in DTYPES:
        made = parameters(getattr(torch, dtype))
        optimizer = torchao.optim.AdamW4bit(made, **OPTIONS)
        stepped(optimizer, STEPS)
        found[dtype] = []
        for parameter in made:
            kept = {"parameter": some(parameter)}
            for name in ("exp_avg", "exp_avg_sq"):
                value = optimizer.state[parameter][name]
                kept[name] = some(value.dequantize() if hasattr(value, "dequantize") else value)
            found[dtype].append(kept)
    PATH.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
