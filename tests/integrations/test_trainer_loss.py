"""Losses that ignore the count of labels train as without a plan, however the plan divides the batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

import brimful.integrations.transformers as bft
from brimful.errors import UsageError
from helpers.faults import OutOfMemoryAt
from helpers.trained_beside import assert_same, recomputing_plan
from helpers.trainers import VOCABULARY, During, gpt2, losses, pad, train, trainer


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForTokenClassification(config)


def pad_tags(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Texts of unequal numbers of labels, none of the first token."""
    batch = pad(samples)
    batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["labels"] % 3)
    batch["labels"][:, 0] = -100
    return batch


def pad_short(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Texts of one length."""
    return pad([{name: tokens[:6] for name, tokens in sample.items()} for sample in samples])


class OwnLoss(transformers.Trainer):
    """Its loss is a mean over the batch that it is given, as many people write it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = mean_over_labels(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def mean_over_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def tagger(folder: Path, **changes: Any) -> Any:
    own = trainer(folder, bert(), max_steps=2, **changes)
    own.data_collator = pad_tags
    return own


def with_own_loss(folder: Path, **changes: Any) -> Any:
    own = trainer(folder, gpt2(dropout=0.0), kind=OwnLoss, max_steps=2, **changes)
    own.data_collator = pad_short
    return own


def of_texts(folder: Path, **changes: Any) -> Any:
    return trainer(folder, gpt2(dropout=0.0), max_steps=2, **changes)


KINDS = {
    "tagger": tagger,
    "own loss": with_own_loss,
    "own function": partial(of_texts, compute_loss_func=mean_over_labels),
    "counted": of_texts,
}


def applied(own: Any, size: int) -> Any:
    plan = recomputing_plan(own, recompute="auto", micro_batch_size=size)
    return bft.apply(plan, own, report=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_batch_has_the_loss_of_the_whole_one(tmp_path: Path, kind: str) -> None:
    make = partial(KINDS[kind], tmp_path)
    alone, planned = make(), make()
    applied(planned, 2)
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=False)


@pytest.mark.parametrize(("accumulation", "size", "planned_size"), [(2, 4, 2), (2, 4, 1), (4, 2, 1)])
def test_the_sum_of_the_users_own_micro_batches_stays(
    tmp_path: Path, accumulation: int, size: int, planned_size: int
) -> None:
    """The trainer adds up their means, with a plan as without."""
    changes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": size}
    make = partial(KINDS["own loss"], tmp_path, **changes)
    alone, planned, whole = make(), make(), KINDS["own loss"](tmp_path)
    ended = applied(planned, planned_size)
    assert any("adds up the means" in note for note in ended.plan.notes)
    for each in (alone, planned, whole):
        train(each)
    assert_same(planned, alone, exactly=False)
    assert losses(alone)[0] == pytest.approx(accumulation * losses(whole)[0], rel=1e-4)
    ended.remove()
    assert planned.loss_is_scaled_for_ga is None


def test_batches_are_not_joined(tmp_path: Path) -> None:
    """Means of batches with unequal numbers of labels are not that of their union, which is another loss."""
    own = with_own_loss(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=2)
    with pytest.raises(UsageError, match="micro_batch_size=8 is larger than the trainer's batches of 2"):
        bft.plan(own, "cpu", micro_batch_size=8)
    plan = bft.plan(own, "cpu", budget="1GiB")
    assert plan.settings.micro_batch_size == 2
    assert any("set per_device_train_batch_size=8" in note for note in plan.notes)


def test_parts_of_a_micro_batch_that_ran_out_of_memory_have_its_loss(tmp_path: Path) -> None:
    alone = tagger(tmp_path)
    train(alone)
    left = iter(range(2))
    fault = OutOfMemoryAt(
        fails=lambda name, _args: name == "aten.embedding.default" and next(left, None) is not None
    )
    planned = tagger(tmp_path, callbacks=[During(1, fault)])
    found = applied(planned, 8)
    with pytest.warns(UserWarning, match="From now on it takes 4 samples"):
        train(planned)
    assert found.recoveries[-1].after == "micro-batch 4"
    assert_same(planned, alone, exactly=False)


def test_a_plan_from_a_file_finds_what_the_loss_uses(tmp_path: Path) -> None:
    planning, alone, planned = (tagger(tmp_path) for _ in range(3))
    plan = recomputing_plan(planning, recompute="auto", micro_batch_size=2)
    bft.apply(plan, planned, report=False)  # which was not planned for
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=False)


def test_what_the_trainer_decides_and_what_is_not_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="global_batch_size is decided by the trainer"):
        bft.plan(tagger(tmp_path), "cpu", global_batch_size=8)
    with pytest.raises(
        UsageError, match=r"takes a transformers\.Trainer, and got a transformers\.models\.bert\..*Bert"
    ):
        bft.plan(bert(), "cpu")


def test_a_transformers_whose_trainer_cannot_be_asked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 ended in an AttributeError."""
    own = tagger(tmp_path)
    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")
    with pytest.raises(UsageError, match=r"Plans need 5\.19 or later: pip install 'transformers>=5\.19,<6'"):
        bft.plan(own, device="RTX 3090")
