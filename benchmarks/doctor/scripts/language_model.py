"""A small language model on random tokens: bf16 autocast, accumulation under DDP, clipping, a schedule."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint  # noqa: F401  # a planted fault uses it

VOCABULARY = 64
WIDTH, LENGTH, PARTS = 128, 128, 2
MASK = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (6, 64)).transpose(1, 2).chunk(3, dim=1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.blocks(self.embedding(tokens))
        return self.head(x)


model = DistributedDataParallel(LanguageModel())
teacher = None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
for step in range(7):
    mean = 0.0
    for index in range(PARTS):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
        with model.no_sync() if index < PARTS - 1 else nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                if teacher is not None:
                    loss = loss + (teacher(tokens[:, :-1]).detach() - logits).square().mean()
            (loss / PARTS).backward()
        del logits
        mean += loss.item() / PARTS
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step}: loss {mean:.3f}")
dist.destroy_process_group()
