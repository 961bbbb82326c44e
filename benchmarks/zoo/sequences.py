"""Recurrent networks and torch's own transformer."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model import CLASSES, VOCABULARY, ZooModel, classify, own

# B samples, T tokens, D width, V vocabulary

TOKENS = 32
WIDTH = 64


class RecurrentLM(nn.Module):
    """Token ids (B, T) → logits (B, T, V); input and output share their embedding."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.tokens(ids))[0])


class PackedTagger(nn.Module):
    """Token ids (B, T) and lengths (B,) → logits (B, T, classes), through packed sequences both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.tokens(ids), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(states)


class Recognizer(nn.Module):
    """Spectrograms (B, T, D) → log probabilities for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(40, WIDTH, 3, 2, 1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.recurrent(x)[0]).log_softmax(-1)


class Translator(nn.Module):
    """`nn.Transformer` between source and target ids (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.transformer(
            self.tokens(source) + self.positions, self.tokens(target) + self.positions, tgt_mask=causal
        )
        return self.head(states)


class AttentionClassifier(nn.Module):
    """Vectors (B, T, D) → logits, through attention that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=True)
        return self.head(self.norm(x + mixed).mean(1)) + weights.mean()


def token_batch(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, TOKENS + 1))
    return {"x": ids[:, :-1].clone(), "y": ids[:, 1:].clone()}


def predict_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def tagged_batch(samples: int) -> dict[str, Tensor]:
    lengths = TOKENS - 3 * (torch.arange(samples) % 5)
    tags = torch.randint(0, CLASSES, (samples, TOKENS))
    tags[torch.arange(TOKENS) >= lengths[:, None]] = -100
    return {"x": torch.randint(0, VOCABULARY, (samples, TOKENS)), "lengths": lengths, "y": tags}


def tag(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"], batch["lengths"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"][:, : logits.shape[1]].flatten())


def spoken_batch(samples: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(samples, 80, 40),
        "targets": torch.randint(1, 30, (samples, 10)),
        "lengths": 10 - torch.arange(samples) % 4,
    }


def align(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    log_probs = model(batch["x"]).transpose(0, 1)
    steps = torch.full((log_probs.shape[1],), log_probs.shape[0])
    return F.ctc_loss(log_probs, batch["targets"], steps, batch["lengths"])


def pair_batch(samples: int) -> dict[str, Tensor]:
    return {"source": torch.randint(0, VOCABULARY, (samples, TOKENS)), **token_batch(samples)}


def translate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["x"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def vector_batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, TOKENS, WIDTH), "y": torch.arange(samples) % CLASSES}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(TOKENS * WIDTH, CLASSES),
    )


SEQUENCES: tuple[ZooModel, ...] = (
    own("lstm lm", "recurrent", partial(RecurrentLM, nn.LSTM), token_batch, loss=predict_tokens),
    own("gru lm", "recurrent", partial(RecurrentLM, nn.GRU), token_batch, loss=predict_tokens),
    own("rnn lm", "recurrent", partial(RecurrentLM, nn.RNN), token_batch, loss=predict_tokens),
    own("bidirectional lstm, packed", "recurrent", PackedTagger, tagged_batch, loss=tag),
    own("speech, ctc", "recurrent", Recognizer, spoken_batch, loss=align),
    own("nn.Transformer", "attention", Translator, pair_batch, loss=translate),
    own("nn.TransformerEncoder", "attention", encoder, vector_batch, loss=classify),
    own("nn.MultiheadAttention", "attention", AttentionClassifier, vector_batch, loss=classify),
)
