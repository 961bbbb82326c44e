"""A plan in TRL's trainers: the same training, inside a budget, that survives out-of-memory errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import brimful.integrations.transformers as bft
from brimful.errors import UsageError
from brimful.integrations.transformers.batches import join_pairs, split_pairs
from helpers.faults import OutOfMemoryAt
from helpers.trained_beside import (
    assert_same,
    check_out_of_memory,
    check_predicted_and_trained,
    larger_than,
    recomputing_plan,
)
from helpers.trainers import During, train
from helpers.trl_trainers import LONGEST, dpo, llama, questions, reward, sft

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def lora() -> Any:
    targets = ["q_proj", "v_proj"]
    return peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM")


KINDS = {
    "sft": sft,
    "lora": lambda folder, **changes: sft(folder, peft_config=lora(), **changes),
    "completions": lambda folder, **changes: sft(folder, dataset=questions(), bf16=True, **changes),
    "wrapped": partial(sft, packing=True, packing_strategy="wrapped", max_length=32),
    "dft": partial(sft, loss_type="dft"),
    "checkpointing": partial(sft, gradient_checkpointing=True),
    "dpo": lambda folder, **changes: dpo(folder, ref_model=llama(), **changes),
    "dpo, lora": lambda folder, **changes: dpo(folder, peft_config=lora(), **changes),
    "dpo, precomputed": partial(dpo, precompute_ref_log_probs=True),
    "reward": reward,
}
QUICK = ("lora", "completions", "dpo", "dpo, lora", "reward")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_memory_is_predicted_and_recomputation_trains_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check_predicted_and_trained(partial(KINDS[kind], tmp_path, max_steps=2))


def test_of_a_stream_the_first_samples_are_read(tmp_path: Path) -> None:
    make = partial(sft, tmp_path, dataset=questions().to_iterable_dataset(), max_steps=2)
    check_predicted_and_trained(make)
    assert any("is a stream" in note for note in recomputing_plan(make()).notes)
    assert bft.job(make()).batch(2)["input_ids"].shape == (2, LONGEST + 1)


def test_planning_leaves_the_trainer_s_metrics_alone(tmp_path: Path) -> None:
    own = sft(tmp_path)
    recomputing_plan(own)
    assert own._total_train_tokens == 0
    assert not own._metrics["train"]


def test_the_job_has_the_longest_text_and_counts_the_tokens_as_the_trainer_does(tmp_path: Path) -> None:
    own = sft(tmp_path, dataset=questions())
    job = bft.job(own)
    batch = job.batch(3)
    assert batch["input_ids"].shape == (3, LONGEST + 1)  # and the end-of-sequence token
    assert job.count is not None
    assert job.count(batch) == own._get_num_items_in_batch([batch], torch.device("cpu"))
    assert job.count(batch) < batch["attention_mask"].sum()


def test_pairs_are_divided_as_pairs(tmp_path: Path) -> None:
    batch = bft.job(dpo(tmp_path, precompute_ref_log_probs=True)).batch(4)
    assert batch["input_ids"].shape[0] == 8
    batch["ref_chosen_logps"] = torch.arange(4.0)  # one row for each sample
    first, *_, last = split_pairs(batch)
    assert torch.equal(first["input_ids"][1], batch["input_ids"][4])
    assert torch.equal(last["input_ids"][0], batch["input_ids"][3])
    joined = join_pairs(split_pairs(batch))
    assert all(torch.equal(joined[name], batch[name]) for name in batch)
    half = join_pairs(split_pairs(batch)[2:])
    assert torch.equal(half["input_ids"], batch["input_ids"][[2, 3, 6, 7]])
    assert half["ref_chosen_logps"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_a_divided_batch_trains_the_same_within_rounding(tmp_path: Path, kind: str) -> None:
    def made() -> Any:
        if kind == "reward":
            return reward(tmp_path, dropout=0.0, max_steps=2)
        if kind == "sft":
            return sft(tmp_path, llama(dropout=0.0), questions())
        return dpo(tmp_path, llama(dropout=0.0), llama(dropout=0.0))

    alone, planned = made(), made()
    bft.apply(recomputing_plan(planned, recompute="auto", micro_batch_size=2), planned, report=False)
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=False)


def test_the_reference_model_is_counted(tmp_path: Path) -> None:
    def peak(**changes: Any) -> int:
        own = dpo(tmp_path, llama(), changes.pop("ref_model", None), **changes)
        return bft.plan(own, "cpu", budget="1GiB", micro_batch_size=8).predicted_peak_allocated_bytes

    reference = llama()
    more = peak(ref_model=reference) - peak(precompute_ref_log_probs=True)
    stored = sum(parameter.nbytes for parameter in reference.parameters())
    assert more == pytest.approx(stored, abs=1024)  # the batch with precomputed values has more tensors


@pytest.mark.filterwarnings("ignore:each batch is split into:UserWarning")  # dropout hides what it changes
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_memory_may_run_out_in_a_step(tmp_path: Path, kind: str) -> None:
    """The metrics that the trainer logs are those of an undisturbed run too."""
    make = partial(KINDS[kind], tmp_path, max_steps=3)
    check_out_of_memory(make, 3, micro_batch_size=4, last=0)


@pytest.mark.filterwarnings("ignore:each batch is split into:UserWarning")  # dropout hides what it changes
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "points"), [("sft", 10), ("lora", 5), ("dpo", 5)])
def test_memory_may_run_out_at_any_point_of_a_step(tmp_path: Path, kind: str, points: int) -> None:
    """50 points of each take two minutes; they passed on 2026-11-25."""
    check_out_of_memory(partial(KINDS[kind], tmp_path, max_steps=4), points, micro_batch_size=4)


@pytest.mark.parametrize(("kind", "rows"), [("sft", 2), ("dpo", 4)])
def test_a_micro_batch_that_does_not_fit_twice_is_halved(tmp_path: Path, kind: str, rows: int) -> None:
    def made(**changes: Any) -> Any:
        if kind == "sft":
            return sft(tmp_path, llama(dropout=0.0), **changes)
        return dpo(tmp_path, llama(dropout=0.0), llama(dropout=0.0), **changes)

    calm = made()
    train(calm)
    own = made(callbacks=[During(2, OutOfMemoryAt(fails=larger_than(rows)))])
    plan = recomputing_plan(own, recompute="auto")
    applied = bft.apply(plan, own, report=False)
    with pytest.warns(UserWarning, match="samples at a time"):
        train(own)
    assert [each.after for each in applied.recoveries] == ["micro-batch 8", "micro-batch 4", "micro-batch 2"]
    assert_same(own, calm, exactly=False)


def test_samples_in_one_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packing_strategy='wrapped'"):
        bft.plan(sft(tmp_path, packing=True, max_length=32), "cpu", budget="1GiB")


def test_a_preference_loss_that_compares_samples_keeps_the_batch(tmp_path: Path) -> None:
    own = dpo(tmp_path, peft_config=lora(), loss_type=["aot"])
    plan = bft.plan(own, "cpu", budget="1GiB")
    assert plan.settings.micro_batch_size == 8
    assert any("the batch is not divided: loss_type='aot'" in note for note in plan.notes)
    with pytest.raises(UsageError, match="micro_batch_size=4 would change what is trained"):
        bft.plan(own, "cpu", budget="1GiB", micro_batch_size=4)
