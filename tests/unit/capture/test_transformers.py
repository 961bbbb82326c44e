"""Models of transformers run the ops under capture that a real step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.batches import BatchLayout, InputMover
from brimful.execution.hooks import StepHooks
from brimful.execution.step import StepParts, run_step
from brimful.job import Job
from brimful.optimizers import make_optimizer
from brimful.settings import Precision
from brimful.trace import Phase
from helpers.captured_jobs import A100, CPU, capture, job, ops

transformers = pytest.importorskip("transformers")

SAMPLES, TOKENS, VOCABULARY = 3, 16, 100


class RealOps(TorchDispatchMode):
    """The ops of real tensors, with the phase they run in; views and questions are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.seen: list[tuple[Phase, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        unseen = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._unsafe_view.default)
        if not is_view and func not in unseen and func.namespace == "aten":
            self.seen.append((self.phase, str(func)))
        return func(*args, **(kwargs or {}))


def gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64,
        vocab_size=VOCABULARY, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertModel(config)


def causal_batch(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, TOKENS))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def plain_batch(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_batch(samples: int) -> dict[str, Tensor]:
    batch = plain_batch(samples)
    batch["attention_mask"][0, -4:] = 0
    return batch


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def mean_state(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).last_hidden_state.mean()


def real_ops(the_job: Job) -> list[tuple[Phase, str]]:
    """Ops of the second of two real steps, up to the optimizer's."""
    model = the_job.model().train()  # type: ignore[operator, union-attr]
    optimizer = make_optimizer(the_job, model.parameters())
    batch = the_job.batch(SAMPLES)  # type: ignore[operator]
    recorder = RealOps()

    def observe(phase: Phase, micro_batch: int) -> None:
        recorder.phase = phase

    for _ in range(2):
        recorder.seen.clear()
        with recorder:
            parts = StepParts(
                model=model,
                loss=the_job.loss,
                optimizer=optimizer,
                precision=Precision.FP32,
                move=InputMover.copying_to("cpu"),
            )
            run_step(parts, BatchLayout().split(batch, SAMPLES), [1.0], hooks=StepHooks(observe=observe))
    return [(phase, name) for phase, name in recorder.seen if phase is not Phase.OPTIMIZER]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (gpt2, causal_batch, own_loss),
        (bert, plain_batch, mean_state),
        (bert, padded_batch, mean_state),
    ],
)
def test_the_captured_ops_are_those_of_a_real_step(
    model: Callable[[float], nn.Module],
    batch: Callable[[int], dict[str, Tensor]],
    loss: Callable[..., Tensor],
    dropout: float,
) -> None:
    the_job = job(lambda: model(dropout), loss, batch)
    trace = capture(the_job, CPU, samples=SAMPLES)
    captured = [
        (op.phase, op.name)
        for op in trace.ops
        if op.step == 1 and op.phase is not Phase.OPTIMIZER and op.name != "aten.empty_like.default"
    ]
    # the batch is copied by `aten._to_copy`, and captured as made by `aten.empty_like`
    copied = len(batch(1))
    expected = [each for each in real_ops(the_job) if each[1] != "aten.empty_like.default"]
    assert [name for _, name in expected[:copied]] == ["aten._to_copy.default"] * copied
    assert captured == expected[copied:]
    assert trace.uncertain_ops == ()


def test_a_causal_model_with_a_mask_of_ones_needs_no_mask_and_gets_flash_attention() -> None:
    the_job = job(lambda: gpt2(0.0), own_loss, causal_batch)
    trace = capture(the_job, A100, samples=SAMPLES, precision=Precision.BF16)
    assert len(ops(trace, "aten._scaled_dot_product_flash_attention.default")) == 2


def test_padding_needs_the_mask_that_a_real_step_makes() -> None:
    trace = capture(job(lambda: bert(0.0), mean_state, padded_batch), A100, samples=SAMPLES)
    assert len(ops(trace, "aten._scaled_dot_product_efficient_attention.default")) == 2
    sizes = {storage.size_bytes for storage in trace.storages}
    assert SAMPLES * TOKENS * TOKENS in sizes  # the mask of booleans for each pair of tokens
