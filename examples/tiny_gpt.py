"""A byte-level GPT on the English text that Python itself comes with: the help topics of `pydoc`.

brimful plan examples/tiny_gpt.py:job --global-batch-size 32 --budget 50%
"""

import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import brimful as bf

# B samples, T bytes of each, D width of the model, H heads
BYTES = 256  # every byte is a token
CONTEXT = 256  # T
VALIDATION_EVERY = 20  # windows


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        qkv = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class TinyGPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) → (B, T, BYTES)
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def random_batch(samples: int) -> torch.Tensor:
    return torch.randint(BYTES, (samples, CONTEXT + 1))


def data() -> bf.Data:
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    validation = torch.arange(len(windows)) % VALIDATION_EVERY == 0
    return bf.Data(train=windows[~validation], validation=windows[validation])


def job() -> bf.Job:
    return bf.Job(
        name="tiny-gpt",
        model=TinyGPT,
        loss=loss,
        batch=random_batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        count=lambda tokens: tokens[:, 1:].numel(),
        counted="tokens",
        data=data,
    )
