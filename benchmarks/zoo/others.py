"""What else training code does: shared or frozen weights, own autograd functions, shapes from data."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.model import CLASSES, ZooModel, image_batch, own

# B samples, T tokens, D width, E experts, N nodes, M edges

WIDTH = 128
TOKENS = 32


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def vectors(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.arange(samples) % CLASSES}


def token_vectors(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, TOKENS, WIDTH), "y": torch.arange(samples) % CLASSES}


class LowRank(nn.Module):
    """A frozen linear layer with a trained difference of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


def own_lora() -> nn.Module:
    layers = mlp(WIDTH, 4 * WIDTH, WIDTH, 4 * WIDTH, CLASSES)
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Linear):
            layers[index] = LowRank(layer)
    return layers


def peft_lora() -> nn.Module:
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        use_cache=False,
    )  # fmt: skip
    return get_peft_model(
        transformers.LlamaForCausalLM(config),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM"),
    )


def ids(samples: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, 512, (samples, TOKENS))
    return {"input_ids": drawn, "labels": drawn.clone()}


class Recurring(nn.Module):
    """One block called four times, as in a universal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), mlp(WIDTH, 4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.block(x)
        return self.head(x.mean(1))


class Tied(nn.Module):
    """A decoder that uses the encoder's weights transposed, and a classifier from the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 64)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return self.head(code), F.linear(code, self.encoder.weight.t(), self.bias)


def several_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, made = model(batch["x"])
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(logits, batch["y"]) + F.mse_loss(made, batch["x"]) + 1e-4 * decay


class CappedExp(torch.autograd.Function):
    """exp with a cap; keeps its result for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp(max=5).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class WithOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(WIDTH, 4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = CappedExp.apply(self.inner(x))
        return self.head(y / y.sum(-1, keepdim=True))


class Checkpointed(nn.Module):
    """Blocks that the model itself recomputes."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), mlp(WIDTH, 4 * WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x.mean(1))


class ReadsNumbers(nn.Module):
    """Scales by numbers that Python reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, 4 * WIDTH, 4 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().max().item()
        y = self.inner(x / (scale + 1))
        return y if y.detach().isfinite().all() else y.nan_to_num()


class Experts(nn.Module):
    """Tokens (B, T, D), each through its two best experts, by the rows that chose an expert."""

    def __init__(self, experts: int = 4, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(mlp(WIDTH, 2 * WIDTH, WIDTH) for _ in range(experts))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.best)
        mixed = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            mixed.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return self.head((rows + mixed).view(x.shape).mean(1))


class Picker(nn.Module):
    """Goes on with the vectors that a threshold on values picks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inputs, self.inner = nn.Linear(WIDTH, WIDTH), mlp(WIDTH, 2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inputs(x).flatten(0, 1)
        is_kept = y[:, 0] > -100.0  # all are: the worst case, which a capture assumes
        if self.how == "mask":
            return self.inner(y[is_kept])
        if self.how == "nonzero":
            return self.inner(y.index_select(0, is_kept.nonzero().squeeze(1)))
        return self.inner(torch.masked_select(y, is_kept[:, None]).view(-1, WIDTH))


def smallest(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class UniqueItems(nn.Module):
    """Embeds each item of a batch once, then hands it to whoever asked."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.inner = nn.Embedding(1000, WIDTH), mlp(WIDTH, 2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, items: Tensor) -> Tensor:
        each, back = torch.unique(items, return_inverse=True)
        return self.head(self.inner(self.items(each))[back].mean(1))


def item_batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randint(0, 1000, (samples, 16)), "y": torch.arange(samples) % CLASSES}


def frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
    ).requires_grad_(False)
    return nn.Sequential(backbone, nn.Flatten(), mlp(1024, 128, CLASSES))


class GraphNet(nn.Module):
    """Messages along edges, added up at their targets."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.messages = nn.ModuleList(mlp(2 * WIDTH, WIDTH) for _ in range(layers))
        self.updates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        samples, count, width = nodes.shape
        offsets = count * torch.arange(samples)[:, None, None]
        source, target = (edges + offsets).permute(2, 0, 1).flatten(1)
        x = nodes.flatten(0, 1)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[source], x[target]], -1))
            x = update(torch.zeros_like(x).index_add_(0, target, sent), x)
        pooled = x.new_zeros(samples, width).scatter_add_(
            0, torch.arange(samples).repeat_interleave(count)[:, None].expand(-1, width), x
        )
        return self.head(pooled)


def graph_batch(samples: int) -> dict[str, Tensor]:
    return {
        "nodes": torch.randn(samples, 20, WIDTH),
        "edges": torch.randint(0, 20, (samples, 60, 2)),
        "y": torch.arange(samples) % CLASSES,
    }


def classify_graph(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["nodes"], batch["edges"]), batch["y"])


class Siamese(nn.Module):
    """Two views through one network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, 4 * WIDTH, 64)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = (F.normalize(self.inner(each), dim=-1) for each in (a, b))
        return self.scale.exp() * left @ right.t()


def contrast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["a"], batch["b"])
    same = torch.arange(len(logits))
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2


def view_batch(samples: int) -> dict[str, Tensor]:
    return {"a": torch.randn(samples, WIDTH), "b": torch.randn(samples, WIDTH)}


def triplet(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a, b, c = (model(batch["x"][:, i]) for i in range(3))
    return F.triplet_margin_loss(a, b, c)


class Recommender(nn.Module):
    """DLRM: bags of categories and numbers, crossed."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(500, 32, mode="sum", sparse=False) for _ in range(4))
        self.numbers, self.top = mlp(13, 64, 32), mlp(10 + 32, 64, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        parts = [dense, *(bag(categories[:, i]) for i, bag in enumerate(self.bags))]
        x = torch.stack(parts, 1)
        rows, columns = torch.triu_indices(5, 5, 1)
        crossed = (x @ x.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([dense, crossed], 1)).squeeze(1)


def click_batch(samples: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(samples, 13),
        "categories": torch.randint(0, 500, (samples, 4, 5)),
        "y": (torch.arange(samples) % 2).float(),
    }


def predict_clicks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["categories"]), batch["y"])


class GradientPenalty(nn.Module):
    """Penalises the gradient of its own output: a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.inner(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (slope.norm(dim=-1) - 1).square().mean()


def own_value(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


class Reinforce(nn.Module):
    """An actor and a critic over drawn actions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.actor, self.critic = mlp(WIDTH, 256, 256), nn.Linear(256, 8), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.inner(x)
        policy = torch.distributions.Categorical(logits=self.actor(state), validate_args=False)
        action, value = policy.sample(), self.critic(state).squeeze(-1)
        advantage = (1 - value).detach()
        actor = -(policy.log_prob(action) * advantage).mean()
        return actor + (1 - value).square().mean() - 0.01 * policy.entropy().mean()


OTHERS: tuple[ZooModel, ...] = (
    own("mlp", "mlp", partial(mlp, WIDTH, 512, 512, 512, CLASSES), vectors, micro_batch_size=64),
    own("lora", "fine-tuning", own_lora, vectors, micro_batch_size=64),
    own(
        "lora, peft", "fine-tuning", peft_lora, ids, loss=lambda model, batch: model(**batch).loss,
        micro_batch_size=4, needs="peft",
    ),
    own("frozen backbone", "fine-tuning", frozen_backbone, partial(image_batch, 32)),
    own("module called 4 times", "shared weights", Recurring, token_vectors),
    own("tied, three losses", "shared weights", Tied, vectors, loss=several_losses, micro_batch_size=64),
    own("own autograd function", "own autograd", WithOwnFunction, vectors, micro_batch_size=64),
    own("own checkpoint", "own autograd", partial(Checkpointed, use_reentrant=False), token_vectors),
    own("own checkpoint, reentrant", "own autograd", partial(Checkpointed, use_reentrant=True), token_vectors),
    own("gradient penalty", "own autograd", GradientPenalty, vectors, loss=own_value, micro_batch_size=64),
    own("numbers read", "depends on data", ReadsNumbers, vectors, micro_batch_size=64),
    own("experts", "depends on data", Experts, token_vectors),
    own("boolean index", "depends on data", partial(Picker, "mask"), token_vectors, loss=smallest),
    own("nonzero", "depends on data", partial(Picker, "nonzero"), token_vectors, loss=smallest),
    own("masked select", "depends on data", partial(Picker, "select"), token_vectors, loss=smallest),
    own("unique", "depends on data", UniqueItems, item_batch),
    own("graph", "graph", GraphNet, graph_batch, loss=classify_graph),
    own("siamese", "contrastive", Siamese, view_batch, loss=contrast, micro_batch_size=64),
    own(
        "triplets", "contrastive", partial(mlp, WIDTH, 512, 64),
        lambda n: {"x": torch.randn(n, 3, WIDTH)}, loss=triplet, micro_batch_size=64,
    ),
    own("recommender", "recommender", Recommender, click_batch, loss=predict_clicks, micro_batch_size=64),
    own("actor and critic", "reinforcement", Reinforce, vectors, loss=own_value, micro_batch_size=64),
)  # fmt: skip
