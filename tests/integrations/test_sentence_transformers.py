"""A plan in the trainer of sentence-transformers: the same training; in-batch negatives stay in the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from sentence_transformers.sentence_transformer import losses

import brimful.integrations.transformers as bft
from brimful.errors import InfeasibleError, UsageError
from brimful.execution.out_of_memory import StepOutOfMemoryError
from brimful.integrations.transformers.coupling import _MEANS, why_not_divided
from brimful.profiling.splitting import compare_split_loss
from helpers.faults import OutOfMemoryAt
from helpers.sentence_trainers import LONGEST, pairs, scored, sentences, trainer
from helpers.trained_beside import (
    assert_same,
    check_out_of_memory,
    check_predicted_and_trained,
    larger_than,
    recomputing_plan,
)
from helpers.trainers import During, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def classes(count: int) -> Any:
    return sentences(("first", "second"), lambda generator: generator.randrange(count))


def triplets() -> Any:
    return sentences(("anchor", "positive", "negative"))


def margins() -> Any:
    return sentences(("query", "positive", "negative"), random.Random.random)


def cached(model: Any) -> Any:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)


def softmax(model: Any) -> Any:
    return losses.SoftmaxLoss(model, 32, 3)


def matryoshka(model: Any) -> Any:
    return losses.MatryoshkaLoss(model, losses.CosineSimilarityLoss(model), [32, 16])


KINDS: dict[str, Callable[..., Any]] = {
    "cosine": lambda folder, **changes: trainer(folder, losses.CosineSimilarityLoss, scored(), **changes),
    "negatives": lambda folder, **changes: trainer(
        folder, losses.MultipleNegativesRankingLoss, triplets(), bf16=True, **changes
    ),
    "cached": lambda folder, **changes: trainer(folder, cached, pairs(), **changes),
    "softmax": lambda folder, **changes: trainer(folder, softmax, classes(3), **changes),
    "matryoshka": lambda folder, **changes: trainer(folder, matryoshka, scored(), **changes),
}
MEANS: dict[str, Callable[..., Any]] = {
    "CosineSimilarityLoss": KINDS["cosine"],
    "SoftmaxLoss": KINDS["softmax"],
    "ContrastiveLoss": lambda folder, **changes: trainer(folder, losses.ContrastiveLoss, classes(2), **changes),
    "MarginMSELoss": lambda folder, **changes: trainer(folder, losses.MarginMSELoss, margins(), **changes),
    "TripletLoss": lambda folder, **changes: trainer(folder, losses.TripletLoss, triplets(), **changes),
    "MatryoshkaLoss": KINDS["matryoshka"],
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", ["cosine", "negatives", "cached", "softmax", pytest.param("matryoshka", marks=pytest.mark.slow)]
)
def test_memory_is_predicted_and_recomputation_trains_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check_predicted_and_trained(partial(KINDS[kind], tmp_path, max_steps=2))


def split_loss(own: Any) -> Any:
    """The loss of 8 different samples beside the mean of its parts."""
    job, samples = bft.job(own), [own.train_dataset[index] for index in range(8)]
    batch = own.data_collator(samples)
    return compare_split_loss(job, job.model, batch, samples=8, micro_batch_size=2)


@pytest.mark.parametrize("name", sorted(MEANS))
def test_losses_that_may_be_divided_are_means_over_samples(tmp_path: Path, name: str) -> None:
    assert {*_MEANS} <= {*MEANS}
    comparison = split_loss(MEANS[name](tmp_path))
    assert not comparison.why_not_compared
    assert comparison.holds


def test_a_divided_batch_trains_the_same_within_rounding(tmp_path: Path) -> None:
    def made() -> Any:
        return KINDS["softmax"](tmp_path, dropout=0.0)

    alone, planned = made(), made()
    plan = recomputing_plan(planned, recompute="auto", micro_batch_size=2)
    assert plan.settings.gradient_accumulation_steps == 4
    bft.apply(plan, planned, report=False)
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=False)
    assert torch.allclose(planned.loss.classifier.weight, alone.loss.classifier.weight, atol=2e-3)


def test_parameters_of_the_loss_are_trained_in_the_job_too(tmp_path: Path) -> None:
    own = KINDS["softmax"](tmp_path)
    job = bft.job(own)
    optimizer = job.optimizer(job.model)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert id(own.loss.classifier.weight) in trained
    assert own.optimizer is None


def test_in_batch_negatives_keep_the_batch_and_its_accumulation(tmp_path: Path) -> None:
    own = KINDS["negatives"](tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert not split_loss(own).holds
    plan = bft.plan(own, "cpu", budget="1GiB")
    assert (plan.settings.micro_batch_size, plan.settings.gradient_accumulation_steps) == (4, 2)
    assert any("CachedMultipleNegativesRankingLoss(model, mini_batch_size=…)" in note for note in plan.notes)
    with pytest.raises(UsageError, match=r"micro_batch_size=2 would change what is trained.*Cached"):
        bft.plan(own, "cpu", budget="1GiB", micro_batch_size=2)
    divided = replace(plan, settings=replace(plan.settings, micro_batch_size=2, gradient_accumulation_steps=4))
    with pytest.raises(UsageError, match="which must stay: MultipleNegativesRankingLoss"):
        bft.apply(divided, own)


def test_a_budget_that_is_too_small_names_the_cached_loss(tmp_path: Path) -> None:
    with pytest.raises(
        InfeasibleError, match=r"not divided: MultipleNegativesRankingLoss.*CachedMultiple"
    ) as raised:
        bft.plan(KINDS["negatives"](tmp_path), "cpu", budget="64KiB")
    assert "you asked for" not in str(raised.value)  # the loss did
    reason = why_not_divided(KINDS["cached"](tmp_path))
    assert reason is not None
    assert "Its own mini_batch_size divides the batch" in reason


def test_other_reasons_to_keep_the_batch(tmp_path: Path) -> None:
    def reason_of(own: Any) -> str:
        return why_not_divided(own) or ""

    several = {"one": scored(), "other": scored()}
    assert "one of several datasets" in reason_of(trainer(tmp_path, losses.CosineSimilarityLoss, several))
    unique = KINDS["cosine"](tmp_path, batch_sampler="no_duplicates")
    assert "batch sampler (no_duplicates)" in reason_of(unique)
    added = trainer(tmp_path, lambda model: losses.ContrastiveLoss(model, size_average=False), classes(2))
    assert "is a sum over the samples" in reason_of(added)
    weights = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    weighted = trainer(tmp_path, lambda model: losses.SoftmaxLoss(model, 32, 3, loss_fct=weights), classes(3))
    assert "SoftmaxLoss computes with CrossEntropyLoss()" in reason_of(weighted)


def test_the_longest_texts_are_those_of_most_tokens_in_each_column(tmp_path: Path) -> None:
    data = scored().to_dict()
    data["first"][3] = "w" * 500  # one unknown word
    own = trainer(tmp_path, losses.CosineSimilarityLoss, datasets.Dataset.from_dict(data))
    batch = bft.job(own).batch(8)
    assert batch["first_input_ids"].shape == (8, LONGEST + 2)  # and two special tokens
    assert batch["second_input_ids"].shape == (8, LONGEST + 2)


def test_memory_may_run_out_in_a_step(tmp_path: Path) -> None:
    check_out_of_memory(partial(KINDS["softmax"], tmp_path, max_steps=3), 3, micro_batch_size=4, last=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "points"), [("softmax", 10), ("negatives", 5), ("cached", 5)])
def test_memory_may_run_out_at_any_point_of_a_step(tmp_path: Path, kind: str, points: int) -> None:
    """50 points of each take five minutes; they passed on 2026-11-25."""
    size = 4 if kind == "softmax" else 8
    check_out_of_memory(partial(KINDS[kind], tmp_path, max_steps=4), points, micro_batch_size=size)


def test_a_micro_batch_that_does_not_fit_twice_is_halved(tmp_path: Path) -> None:
    calm = KINDS["cosine"](tmp_path, dropout=0.0)
    train(calm)
    fault = OutOfMemoryAt(fails=larger_than(2))
    own = KINDS["cosine"](tmp_path, dropout=0.0, callbacks=[During(2, fault)])
    applied = bft.apply(recomputing_plan(own, recompute="auto"), own, report=False)
    with pytest.warns(UserWarning, match="samples at a time"):
        train(own)
    assert [each.after for each in applied.recoveries] == ["micro-batch 8", "micro-batch 4", "micro-batch 2"]
    assert_same(own, calm, exactly=False)


def test_in_batch_negatives_are_not_halved(tmp_path: Path) -> None:
    fault = OutOfMemoryAt(fails=larger_than(2))
    own = KINDS["negatives"](tmp_path, callbacks=[During(1, fault)])
    bft.apply(recomputing_plan(own), own, report=False)
    with pytest.raises(StepOutOfMemoryError, match="its micro-batch is not divided: MultipleNegatives"):
        train(own)
    fault.__exit__(None, None, None)
