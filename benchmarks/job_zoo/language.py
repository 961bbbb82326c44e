"""Language models, translators, taggers and recognizers."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import Block, TinyGPT, mlp, next_token, texts

# B samples, T tokens, D width, E experts, V vocabulary

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "use_cache": False,
}


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of Transformers computes from its labels."""
    return model(**batch).loss


def hf_texts(n: int, length: int = 48) -> dict[str, Tensor]:
    ids = torch.randint(3, 256, (n, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def instructions(n: int) -> dict[str, Tensor]:
    """Only answers have labels, and they have different lengths."""
    batch = hf_texts(n)
    prompts = torch.randint(4, 40, (n, 1))
    batch["labels"][torch.arange(48) < prompts] = -100
    return batch


def answers_counted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


@job_case(32)
def hf_gpt2() -> bf.Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    return bf.Job(
        model=lambda: GPT2LMHeadModel(config),
        loss=hf_loss,
        batch=hf_texts,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    )


@job_case(32)
def hf_llama_instructions_with_count() -> bf.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    return bf.Job(
        model=lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        loss=hf_loss,
        batch=instructions,
        count=answers_counted,
    )


@job_case(32, refused=SPLIT)
def hf_llama_instructions_without_count() -> bf.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    return bf.Job(model=lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), loss=hf_loss, batch=instructions)


@job_case(32)
def hf_t5_with_adafactor() -> bf.Job:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )

    def batch(n: int) -> dict[str, Tensor]:
        made = hf_texts(n, 32)
        return made | {"labels": torch.randint(3, 256, (n, 24))}

    return bf.Job(
        model=lambda: T5ForConditionalGeneration(config),
        loss=hf_loss,
        batch=batch,
        optimizer=lambda ps: torch.optim.Adafactor(ps, lr=1e-3),
    )


@job_case(32)
def hf_modernbert_masked_words() -> bf.Job:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )

    def batch(n: int) -> dict[str, Tensor]:
        made = hf_texts(n)
        masked = torch.zeros(n, 48, dtype=torch.bool)
        masked[:, ::6] = True  # as many in each sample
        made["labels"][~masked] = -100
        made["input_ids"][masked] = 2
        return made

    return bf.Job(model=lambda: ModernBertForMaskedLM(config), loss=hf_loss, batch=batch)


@job_case(16)
def large_vocabulary() -> bf.Job:
    """The logits take most of the memory."""
    return bf.Job(
        model=lambda: TinyGPT(vocabulary=4096, width=32, depth=1),
        loss=next_token,
        batch=lambda n: texts(n, vocabulary=4096),
    )


@job_case(32)
def gpt_with_dropout_and_z_loss() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        z = logits.logsumexp(-1)
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + 1e-4 * z.square().mean()

    return bf.Job(model=lambda: TinyGPT(dropout=0.1), loss=loss, batch=texts)


class RoutedBlock(nn.Module):
    """Tokens go to two of four experts, found by `torch.where`, as in many a notebook."""

    def __init__(self, width: int, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.attention = Block(width, causal=True)
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, 4 * width, width, act=nn.GELU) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        tokens = self.norm(x).flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.chosen, dim=-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(ids == index)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return x + out.view_as(x)


@job_case(32)
def mixture_of_experts_by_where() -> bf.Job:
    def model() -> nn.Module:
        gpt = TinyGPT()
        gpt.blocks = nn.ModuleList(RoutedBlock(64) for _ in range(2))
        return gpt

    return bf.Job(model=model, loss=next_token, batch=texts)


@job_case(64)
def mixture_of_experts_with_capacity() -> bf.Job:
    """As in Switch and GShard: einsums over one-hot places, and a loss that balances the experts."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.router, self.leave = nn.Linear(32, 64), nn.Linear(64, 4), nn.Linear(64, 10)
            self.up = nn.Parameter(torch.randn(4, 64, 128) * 0.1)
            self.down = nn.Parameter(torch.randn(4, 128, 64) * 0.1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.enter(x)  # (B, T, D): each sample is routed by itself
            chances = self.router(x).softmax(-1)
            best, expert = chances.max(-1)
            chosen = F.one_hot(expert, 4).to(x.dtype)
            place = (chosen.cumsum(1) - 1) * chosen
            kept = F.one_hot(place.sum(-1).long().clamp(max=11), 12).to(x.dtype) * (place.sum(-1, True) < 12)
            sent = chosen[..., None] * kept[..., None, :]  # (B, T, E, C)
            y = torch.einsum("btec,btd->becd", sent, x)
            y = torch.einsum("becf,efd->becd", torch.einsum("becd,edf->becf", y, self.up).relu(), self.down)
            y = torch.einsum("btec,becd->btd", sent * best[..., None, None], y)
            balance = 4 * (chances.mean(1) * chosen.mean(1)).sum(-1).mean()
            return self.leave((x + y).mean(1)), balance

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, balance = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]) + 0.01 * balance

    return bf.Job(
        model=Switch,
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, 32, 32), "y": torch.randint(0, 10, (n,))},
    )


MIXTRAL = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}


@job_case(32)
def hf_mixtral_grouped() -> bf.Job:
    from transformers import MixtralConfig, MixtralForCausalLM

    return bf.Job(model=lambda: MixtralForCausalLM(MixtralConfig(**MIXTRAL)), loss=hf_loss, batch=hf_texts)


@job_case(32)
def hf_mixtral_eager_experts() -> bf.Job:
    from transformers import MixtralConfig, MixtralForCausalLM

    def model() -> nn.Module:
        config = MixtralConfig(**MIXTRAL)
        config._experts_implementation = "eager"
        return MixtralForCausalLM(config)

    return bf.Job(model=model, loss=hf_loss, batch=hf_texts)


@job_case(32)
def lstm_language_model() -> bf.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 64)
            self.lstm = nn.LSTM(64, 64, 2, batch_first=True, dropout=0.1)
            self.head = nn.Linear(64, 256)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(ids))[0])

    return bf.Job(model=Model, loss=next_token, batch=lambda n: texts(n, 32))


@job_case(64, budget="95%")
def gru_with_time_first() -> bf.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(16, 64), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[1][-1])

    return bf.Job(
        model=Model,
        loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        batch=lambda n: {"x": torch.randn(40, n, 16), "y": torch.randint(0, 5, (n,))},
    )


@job_case(64, named="packed sequences free blocks earlier than the capture does")
def tagger_of_packed_sequences() -> bf.Job:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 32)
            self.gru = nn.GRU(32, 64, batch_first=True, bidirectional=True)
            self.head = nn.Linear(128, 9)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths, batch_first=True, enforce_sorted=False
            )
            states, _ = nn.utils.rnn.pad_packed_sequence(
                self.gru(packed)[0], batch_first=True, total_length=ids.shape[1]
            )
            return self.head(states)

    def batch(n: int) -> dict[str, Tensor]:
        lengths = 16 - torch.arange(n) % 8
        tags = torch.randint(0, 9, (n, 16))
        tags[torch.arange(16) >= lengths[:, None]] = -100
        return {"ids": torch.randint(0, 256, (n, 16)), "lengths": lengths, "tags": tags}

    return bf.Job(
        model=Tagger,
        loss=lambda m, b: F.cross_entropy(m(b["ids"], b["lengths"]).flatten(0, 1), b["tags"].flatten()),
        batch=batch,
        count=lambda b: (b["tags"] != -100).sum(),
    )


@job_case(64)
def translator_with_teacher_forcing() -> bf.Job:
    """Python's own random numbers decide whether the decoder sees the truth or its own guess."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 64)
            self.encoder, self.decoder = nn.GRU(64, 64, batch_first=True), nn.GRUCell(64, 64)
            self.head = nn.Linear(64, 256)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            state = self.encoder(self.embed(source))[1][0]
            word, logits = target[:, 0], []
            for position in range(1, target.shape[1]):
                state = self.decoder(self.embed(word), state)
                logits.append(self.head(state))
                word = target[:, position] if random.random() < 0.5 else logits[-1].argmax(-1)
            return torch.stack(logits, 1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["source"], batch["target"])
        return F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())

    return bf.Job(
        model=Translator,
        loss=loss,
        batch=lambda n: {
            "source": torch.randint(0, 256, (n, 12)),
            "target": torch.randint(0, 256, (n, 12)),
        },
    )


@job_case(16)
def speech_with_ctc() -> bf.Job:
    class Recognizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(40, 64, 5, stride=2, padding=2)
            self.blocks = nn.Sequential(Block(64), Block(64))
            self.head = nn.Linear(64, 30)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.conv(x).relu().transpose(1, 2))).log_softmax(-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["spectrogram"])
        steps = torch.full((len(log_probs),), log_probs.shape[1])
        # the mean over samples of each sample's loss by length
        return F.ctc_loss(log_probs.transpose(0, 1), batch["letters"], steps, batch["lengths"])

    return bf.Job(
        model=Recognizer,
        loss=loss,
        batch=lambda n: {
            "spectrogram": torch.randn(n, 40, 160),
            "letters": torch.randint(1, 30, (n, 20)),
            "lengths": 20 - torch.arange(n) % 8,
        },
    )


@job_case(64)
def conditional_random_field() -> bf.Job:
    """The forward algorithm over tags, written as a loop."""

    class Crf(nn.Module):
        def __init__(self, tags: int = 9) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 32)
            self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
            self.emit = nn.Linear(64, tags)
            self.moves = nn.Parameter(torch.zeros(tags, tags))

        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            emitted = self.emit(self.lstm(self.embed(ids))[0])
            alpha = emitted[:, 0]
            for t in range(1, ids.shape[1]):
                alpha = (alpha[:, :, None] + self.moves).logsumexp(1) + emitted[:, t]
            gold = emitted.gather(2, tags[..., None]).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
            return alpha.logsumexp(1) - gold

    return bf.Job(
        model=Crf,
        loss=lambda m, b: m(b["ids"], b["tags"]).mean(),
        batch=lambda n: {"ids": torch.randint(0, 256, (n, 20)), "tags": torch.randint(0, 9, (n, 20))},
    )


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.gpt = TinyGPT(dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        gpt = self.gpt
        x = gpt.tokens(ids) + gpt.positions(torch.arange(ids.shape[1]))
        for block in gpt.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return gpt.head(gpt.norm(x))


@job_case(32)
def own_checkpointing() -> bf.Job:
    return bf.Job(model=lambda: Checkpointed(use_reentrant=False), loss=next_token, batch=texts)


@job_case(32)
def own_reentrant_checkpointing() -> bf.Job:
    return bf.Job(model=lambda: Checkpointed(use_reentrant=True), loss=next_token, batch=texts)


@job_case(32)
def hf_gradient_checkpointing_enabled() -> bf.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    def model() -> nn.Module:
        llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
        llama.gradient_checkpointing_enable()
        return llama

    return bf.Job(model=model, loss=hf_loss, batch=hf_texts)


def preferences(n: int) -> dict[str, Tensor]:
    return {"chosen": torch.randint(0, 256, (n, 48)), "rejected": torch.randint(0, 256, (n, 48))}


@job_case(16)
def reward_model_of_pairs() -> bf.Job:
    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = TinyGPT()
            self.gpt.head = nn.Linear(64, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.gpt(ids)[:, -1, 0]

    return bf.Job(
        model=Reward,
        loss=lambda m, b: -F.logsigmoid(m(b["chosen"]) - m(b["rejected"])).mean(),
        batch=preferences,
    )


@job_case(16)
def direct_preferences_with_reference_model() -> bf.Job:
    policy = TinyGPT(width=128, depth=2)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def log_p(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        gains = []
        for ids in (batch["chosen"], batch["rejected"]):
            with torch.no_grad():
                before = log_p(reference, ids)
            gains.append(log_p(model, ids) - before)
        return -F.logsigmoid(0.1 * (gains[0] - gains[1])).mean()

    return bf.Job(model=policy, loss=loss, batch=preferences)


@job_case(16)
def selective_scan() -> bf.Job:
    """A state-space block as Mamba's, its scan a loop over time."""

    class Scan(nn.Module):
        def __init__(self, width: int = 32, states: int = 8) -> None:
            super().__init__()
            self.enter = nn.Linear(width, 2 * width)
            self.select = nn.Linear(width, 2 * states + 1)
            self.rates = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
            self.leave = nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:
            u, gate = self.enter(self.norm(x)).chunk(2, -1)
            b, c, step = self.select(u).split([8, 8, 1], -1)
            step = F.softplus(step)
            decay = torch.exp(-step[..., None] * self.rates.exp())
            state, out = torch.zeros_like(decay[:, 0]), []
            for t in range(x.shape[1]):
                state = state * decay[:, t] + (step * u)[:, t, :, None] * b[:, t, None]
                out.append((state * c[:, t, None]).sum(-1))
            return x + self.leave(torch.stack(out, 1) * F.silu(gate))

    def model() -> nn.Module:
        gpt = TinyGPT(width=32)
        gpt.blocks = nn.ModuleList(Scan() for _ in range(2))
        return gpt

    return bf.Job(model=model, loss=next_token, batch=lambda n: texts(n, 24))


@job_case(32)
def linear_state_space_by_fft() -> bf.Job:
    class S4(nn.Module):
        def __init__(self, width: int = 32, length: int = 128) -> None:
            super().__init__()
            self.length = length
            self.decay = nn.Parameter(-torch.rand(width, 16))
            self.turn = nn.Parameter(torch.randn(width, 16))
            self.mix = nn.Parameter(torch.randn(width, 16, 2) * 0.1)
            self.out = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            rates = torch.complex(self.decay, self.turn)
            times = torch.arange(self.length)
            kernel = (torch.view_as_complex(self.mix)[..., None] * (rates[..., None] * times).exp()).sum(1).real
            n = 2 * self.length
            y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), n) * torch.fft.rfft(kernel, n), n)
            return x + self.out(F.gelu(y[..., : self.length].transpose(1, 2)))

    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(1, 32), S4(), S4(), nn.Linear(32, 10)),
        loss=lambda m, b: F.cross_entropy(m(b["x"]).mean(1), b["y"]),
        batch=lambda n: {"x": torch.randn(n, 128, 1), "y": torch.randint(0, 10, (n,))},
    )


@job_case(32)
def sequence_of_ragged_texts() -> bf.Job:
    """A list of tensors with different lengths, padded in the loss; what is split is the list."""

    def batch(n: int) -> dict[str, Any]:
        return {"texts": [torch.randint(0, 256, (24 + 8 * (i % 4),)) for i in range(n)]}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(batch["texts"], batch_first=True, padding_value=-1)
        logits = model(ids[:, :-1].clamp(min=0))
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=-1, reduction="none")
        return (losses.sum(1) / (ids[:, 1:] >= 0).sum(1)).mean()

    return bf.Job(model=TinyGPT, loss=loss, batch=batch)
