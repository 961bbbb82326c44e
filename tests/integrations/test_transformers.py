"""A plan in a Transformers Trainer: the same training, inside a budget, that survives out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import brimful as bf
import brimful.integrations.transformers as bft
from brimful.doctor import Watch
from brimful.doctor.findings import findings
from brimful.errors import UsageError
from brimful.execution import in_force
from brimful.settings import Action, Settings, UnitAction
from brimful.utils.quantities import format_bytes
from helpers.faults import OutOfMemoryAt
from helpers.torchrun import result_of_two_ranks
from helpers.trained_beside import check_out_of_memory
from helpers.trainers import (
    LONGEST,
    VOCABULARY,
    During,
    Texts,
    arguments,
    gpt2,
    losses,
    pad,
    train,
    trainer,
    weights,
)


def assert_same(first: Trainer, second: Trainer, *, exactly: bool) -> None:
    if exactly:
        assert losses(first) == losses(second)
    else:
        assert losses(first) == pytest.approx(losses(second), rel=1e-4)
    for name, value in weights(first).items():
        other = weights(second)[name]
        assert torch.equal(value, other) if exactly else torch.allclose(value, other, atol=2e-3), name


def assert_predicted(plan: bf.Plan, measured: bf.results.Measurement) -> None:
    peak = measured.measured_peak_allocated_bytes
    assert plan.predicted_peak_allocated_bytes == pytest.approx(peak, rel=0.01)


def test_the_job_has_the_longest_sample_the_labels_and_the_optimizer_of_the_trainer(tmp_path: Path) -> None:
    own = trainer(tmp_path, weight_decay=0.1)
    job = bft.job(own)
    batch = job.batch(3)
    assert batch["input_ids"].shape == (3, LONGEST)
    assert job.count is not None
    assert job.count(batch) == own._get_num_items_in_batch([batch], torch.device("cpu"))
    copy = gpt2()
    made = job.optimizer(copy)
    assert type(made) is torch.optim.AdamW
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert {id(p) for group in made.param_groups for p in group["params"]} == {id(p) for p in copy.parameters()}
    assert own.optimizer is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lomo", "updates parameters during backward"),
        ("galore_adamw_layerwise", "updates parameters during backward"),
        ("adamw_torch_8bit", "keeps its state in tensors of torchao's own class"),
        ("adamw_torch_npu_fused", "cannot be made here: .*torch_npu"),
    ],
)
def test_optimizers_of_the_arguments_that_cannot_be_captured_are_refused_by_name(
    tmp_path: Path, name: str, why: str
) -> None:
    own = trainer(tmp_path, optim=name)
    with pytest.raises(UsageError, match=rf'optim="{name}"\) {why}.*Take "adamw_bnb_8bit"'):
        bft.plan(own, "RTX 3090")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # transformers counts by it
@pytest.mark.parametrize(
    ("paged", "plain", "bytes_of_a_number"),
    [
        ("paged_adamw_8bit", "adamw_bnb_8bit", 8),
        ("paged_lion_32bit", "lion_32bit", 4),
        ("paged_ademamix_32bit", "ademamix", 12),
    ],
)
def test_the_state_of_a_paged_optimizer_is_outside_of_the_allocator(
    tmp_path: Path, paged: str, plain: str, bytes_of_a_number: int
) -> None:
    """That of 100,000 numbers or more: here an embedding, whose state Transformers keeps in 32 bits."""
    config = GPT2Config(vocab_size=4096, n_positions=LONGEST, n_embd=64, n_layer=1, n_head=2)
    paged_bytes = bytes_of_a_number * 4096 * 64

    def estimate(optim: str, model: GPT2LMHeadModel | None = None) -> bf.api.Estimate:
        return bf.estimate(bft.job(trainer(tmp_path, model, optim=optim)), "T4", micro_batch_size=4)

    found, unpaged = estimate(paged, GPT2LMHeadModel(config)), estimate(plain, GPT2LMHeadModel(config))
    assert found.predicted_paged_state_bytes == paged_bytes
    assert unpaged.predicted_peak_allocated_bytes - found.predicted_peak_allocated_bytes == paged_bytes
    (note,) = (each for each in found.uncertain if "paged" in each)
    assert f"{format_bytes(paged_bytes)} of CUDA's managed memory: outside of the allocator" in note
    assert "paged" not in str(estimate(paged).uncertain)


def test_an_optimizer_that_the_user_passed_is_made_again_with_its_groups(tmp_path: Path) -> None:
    model = gpt2()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    own = trainer(tmp_path, model)
    own.optimizer = optimizer
    made = bft.job(own).optimizer(gpt2())
    assert type(made) is torch.optim.SGD
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.1]
    assert made.param_groups[0]["momentum"] == 0.9
    assert own.optimizer is optimizer


def test_recomputation_trains_bit_for_bit_like_the_trainer_alone(tmp_path: Path) -> None:
    alone = trainer(tmp_path)
    alone.train()
    planned = trainer(tmp_path)  # seeds all generators; planning must not draw from them
    plan = bft.plan(planned, "cpu", budget="1GiB", recompute="all", micro_batch_size=8)
    applied = bft.apply(plan, planned, report=False)
    planned.train()
    assert {unit.action for unit in plan.settings.units} == {Action.RECOMPUTE}
    assert_same(planned, alone, exactly=True)
    assert len(applied.step_seconds) == 4
    assert applied.recoveries == ()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_split_batch_trains_as_the_trainer_s_own_does(tmp_path: Path, accumulation: int) -> None:
    changes: dict[str, Any] = {
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    alone = trainer(tmp_path, gpt2(dropout=0.0), **changes)
    planned = trainer(tmp_path, gpt2(dropout=0.0), **changes)
    plan = bft.plan(planned, "cpu", budget="1GiB", micro_batch_size=2)
    assert plan.settings.gradient_accumulation_steps == 4
    bft.apply(plan, planned, report=False)
    assert planned.args.per_device_train_batch_size == 8 // accumulation  # which checkpoints keep
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=False)


def test_the_predicted_peak_is_the_measured_one(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    plan = bft.plan(own, "cpu", budget="70%")
    measured = bf.measure(bft.job(own), plan.settings, "cpu")
    assert_predicted(plan, measured)
    assert measured.measured_peak_allocated_bytes <= plan.budget_bytes


def test_training_can_be_repeated_and_the_plan_removed(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    plan = bft.plan(own, "cpu", budget="1GiB", recompute="all", micro_batch_size=4)
    applied = bft.apply(plan, own, report=False)
    train(own)
    assert "forward" not in vars(own.model.transformer.h[0])
    train(own)
    applied.remove()
    assert not {"training_step", "compute_loss", "get_batch_samples", "prediction_step"} & set(vars(own))


def test_a_run_is_resumed_as_the_trainer_resumes(tmp_path: Path) -> None:
    def planned(folder: Path, **changes: Any) -> Trainer:
        own = trainer(folder, save_strategy="steps", save_steps=2, **changes)
        bft.apply(bft.plan(own, "cpu", budget="1GiB", recompute="all", micro_batch_size=4), own, report=False)
        return own

    whole, resumed = planned(tmp_path / "whole"), planned(tmp_path / "resumed")
    train(whole)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(whole, resumed, exactly=True)


@pytest.mark.slow
def test_memory_may_run_out_at_any_point_of_a_step(tmp_path: Path) -> None:
    """At 25 points of the third step of 4, of two blocks, and its last 30 ops: training ends the same."""

    def make(**changes: Any) -> Trainer:
        return trainer(tmp_path, gpt2(layers=2), **changes)

    check_out_of_memory(make, 25, micro_batch_size=4, last=30)


def test_a_micro_batch_that_does_not_fit_twice_is_halved(tmp_path: Path) -> None:
    calm = trainer(tmp_path, gpt2(dropout=0.0))
    train(calm)
    first_dim = {"aten.embedding.default"}

    def is_too_large(name: str, args: Any) -> bool:
        return name in first_dim and args[1].dim() == 2 and args[1].shape[0] > 2

    own = trainer(tmp_path, gpt2(dropout=0.0), callbacks=[During(2, OutOfMemoryAt(fails=is_too_large))])
    applied = bft.apply(bft.plan(own, "cpu", budget="1GiB", micro_batch_size=8), own, report=False)
    with pytest.warns(UserWarning, match="samples at a time"):
        train(own)
    assert [each.after for each in applied.recoveries] == ["micro-batch 8", "micro-batch 4", "micro-batch 2"]
    assert_same(own, calm, exactly=False)


def test_one_sample_that_does_not_fit_ends_in_an_error_that_is_explained(tmp_path: Path) -> None:
    fault = OutOfMemoryAt(fails=lambda name, _args: name == "aten.embedding.default")
    own = trainer(tmp_path, gpt2(dropout=0.0), callbacks=[During(1, fault)])
    bft.apply(bft.plan(own, "cpu", budget="1GiB", micro_batch_size=1), own, report=False)
    with pytest.raises(torch.OutOfMemoryError, match="one sample already") as error:
        train(own)
    fault.__exit__(None, None, None)
    (explanation,) = error.value.__notes__
    assert "optimizer state" in explanation
    assert "brimful plan … --global-batch-size" in explanation


def test_evaluation_survives_too(tmp_path: Path) -> None:
    own = trainer(tmp_path, per_device_eval_batch_size=5)
    calm = own.evaluate()

    def is_too_large(name: str, args: Any) -> bool:
        return name == "aten.embedding.default" and args[1].dim() == 2 and args[1].shape[0] > 3

    applied = bft.apply(bft.plan(own, "cpu", budget="1GiB"), own, report=False)
    with OutOfMemoryAt(fails=is_too_large):
        found = own.evaluate()
        predicted = own.predict(Texts(10))
    assert found["eval_loss"] == pytest.approx(calm["eval_loss"], rel=1e-5)
    assert predicted.predictions.shape[0] == 10
    assert {each.during for each in applied.recoveries} == {"evaluation"}


def test_a_run_that_raises_leaves_no_limit_and_no_action_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def limited(*_: object) -> Callable[[], None]:
        limits.append("limited")
        return limits.clear

    monkeypatch.setattr(in_force, "limit_reserved", limited)

    class Stops(TrainerCallback):
        def on_step_end(self, *_args: Any, **_named: Any) -> None:
            assert limits == ["limited"]
            raise KeyError("mine")

    own = trainer(tmp_path, callbacks=[Stops()])
    applied = bft.apply(bft.plan(own, "cpu", budget="1GiB", recompute="all"), own, report=False)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            train(own)
        assert limits == []
        assert "forward" not in vars(own.model.transformer.h[0])
    applied.remove()
    assert "_inner_training_loop" not in vars(own)


def test_without_recovery_the_error_is_raised(tmp_path: Path) -> None:
    own = trainer(tmp_path, callbacks=[During(1, fault := OutOfMemoryAt(5))])
    bft.apply(bft.plan(own, "cpu", budget="1GiB"), own, recover=False, report=False)
    with pytest.raises(torch.OutOfMemoryError):
        train(own)
    fault.__exit__(None, None, None)


def test_a_sequence_to_sequence_trainer_with_label_smoothing(tmp_path: Path) -> None:
    def made() -> Seq2SeqTrainer:
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=97, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            max_steps=3,
            label_smoothing_factor=0.1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        model = T5ForConditionalGeneration(config)
        return Seq2SeqTrainer(model=model, args=args, train_dataset=Texts(), data_collator=pad_shifted(model))

    alone, planned = made(), made()
    plan = bft.plan(planned, "cpu", budget="1GiB", recompute="all", micro_batch_size=8)
    measured = bf.measure(bft.job(planned), plan.settings, "cpu")
    assert_predicted(plan, measured)
    bft.apply(plan, planned, report=False)
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=True)


def pad_shifted(model: Any) -> Any:
    """As DataCollatorForSeq2Seq: label smoothing needs the decoder's inputs beside the labels."""

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = pad(samples)
        shifted = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return {**batch, "decoder_input_ids": shifted}

    return collate


def test_the_model_s_own_checkpointing_is_part_of_the_prediction(tmp_path: Path) -> None:
    plain = bft.plan(trainer(tmp_path), "cpu", budget="1GiB", micro_batch_size=8)
    own = trainer(tmp_path, activation_checkpointing=True)
    checkpointed = bft.plan(own, "cpu", budget="1GiB", micro_batch_size=8)
    assert checkpointed.predicted_peak_allocated_bytes < plain.predicted_peak_allocated_bytes
    bft.apply(checkpointed, own, report=False)
    train(own)


def test_bf16_is_predicted_with_the_outputs_that_accelerate_converts(tmp_path: Path) -> None:
    own = trainer(tmp_path, bf16=True)
    plan = bft.plan(own, "cpu", budget="1GiB")
    assert plan.settings.precision.value == "bf16"
    measured = bf.measure(bft.job(own), plan.settings, "cpu")
    assert_predicted(plan, measured)
    alone = trainer(tmp_path, bf16=True)
    bft.apply(plan, own, report=False)
    train(alone)
    train(own)
    assert_same(own, alone, exactly=plan.settings.micro_batch_size == 8)


def test_predicted_and_measured_are_printed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = trainer(tmp_path)
    bft.apply(bft.plan(own, "cpu", budget="1GiB"), own)
    train(own)
    printed = capsys.readouterr().out
    assert "peak memory" in printed
    assert "measured (median of 2)" in printed


def test_what_the_trainer_decides_is_not_an_option_of_the_plan(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    with pytest.raises(UsageError, match="bf16 or fp16 in TrainingArguments"):
        bft.plan(own, "cpu", precision="bf16")
    with pytest.raises(UsageError, match="offload_optimizer=True is not supported"):
        bft.plan(own, "cpu", offload_optimizer=True)


def test_a_plan_for_another_batch_is_refused(tmp_path: Path) -> None:
    plan = bft.plan(trainer(tmp_path), "cpu", budget="1GiB")
    with pytest.raises(UsageError, match=r"8 samples a step .* has 16"):
        bft.apply(plan, trainer(tmp_path, gradient_accumulation_steps=2))
    with pytest.raises(UsageError, match="for fp32, and the trainer's arguments for bf16"):
        bft.apply(plan, trainer(tmp_path, bf16=True))


def test_a_model_that_train_makes_anew_gets_the_plan_too(tmp_path: Path) -> None:
    args = TrainingArguments(**arguments(tmp_path))
    lazy = Trainer(model_init=lambda: gpt2(), args=args, train_dataset=Texts(), data_collator=pad)
    alone = Trainer(model_init=lambda: gpt2(), args=args, train_dataset=Texts(), data_collator=pad)
    train(alone)
    bft.apply(bft.plan(lazy, "cpu", budget="1GiB", recompute="all", micro_batch_size=8), lazy, report=False)
    train(lazy)
    assert_same(lazy, alone, exactly=True)


@pytest.mark.parametrize(
    ("has_labels", "message"),
    [
        (
            lambda _index: False,
            r"needs labels\. .* on a batch with input_ids and without labels\. Add the column",
        ),
        (lambda index: index % 2 == 0, "KeyError: 'labels'.*columns input_ids, labels and input_ids"),
    ],
)
def test_samples_without_labels_are_refused_by_name(tmp_path: Path, has_labels: Any, message: str) -> None:
    rows = [
        {"input_ids": sample["input_ids"][:6]}
        | ({"labels": sample["input_ids"][:6]} if has_labels(index) else {})
        for index, sample in enumerate(Texts())
    ]
    own = trainer(tmp_path)
    own.train_dataset, own.data_collator = rows, default_data_collator
    with pytest.raises(UsageError, match=message):
        bft.plan(own, "cpu")


def test_more_samples_a_step_than_there_are_is_noted(tmp_path: Path) -> None:
    few = len(Texts())
    plan = bft.plan(trainer(tmp_path, per_device_train_batch_size=few + 4), "cpu", micro_batch_size=4)
    assert any(f"has {few} samples, fewer than the effective batch of {few + 4}" in note for note in plan.notes)


class OwnLoss(Trainer):
    """With a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class UncheckedLoss(OwnLoss):
    """Of which it is not known what it is a mean over: it cannot be computed in evaluation mode."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        if not model.training:
            raise RuntimeError("this loss is for training")
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize("kind", [Trainer, OwnLoss, UncheckedLoss])
def test_advice_about_the_loss_is_for_who_has_a_trainer(tmp_path: Path, kind: type[Trainer]) -> None:
    own = trainer(tmp_path, kind=kind)
    own.model_accepts_loss_kwargs = False
    notes = bft.plan(own, "cpu", micro_batch_size=2).notes
    advice = [note for note in notes if "pass micro_batch_size=8 to plan()" in note]
    assert bool(advice) is (kind is UncheckedLoss)
    assert not any("Job(" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "is_noted"),
    [({}, True), ({"eval_accumulation_steps": 2}, False), ({"prediction_loss_only": True}, False)],
)
def test_what_evaluation_keeps_on_the_gpu_is_noted(
    tmp_path: Path, changes: dict[str, Any], is_noted: bool
) -> None:
    own = trainer(tmp_path, **changes)
    own.compute_metrics = lambda _: {}
    (*_, last) = bft.plan(own, "RTX 3090", micro_batch_size=8).notes
    kept_bytes = 10 * LONGEST * VOCABULARY * 4
    assert (f"all 10 samples on the device, up to {format_bytes(kept_bytes)}" in last) is is_noted


@pytest.mark.parametrize(("changes", "is_found"), [({}, True), ({"eval_accumulation_steps": 1}, False)])
def test_a_watched_evaluation_that_keeps_all_logits_on_the_device_is_found(
    tmp_path: Path, changes: dict[str, Any], is_found: bool
) -> None:
    own = trainer(tmp_path, per_device_eval_batch_size=1, **changes)
    own.compute_metrics = lambda _: {}
    with Watch() as watch:
        train(own)
        own.evaluate()
    seen = watch.evidence()
    on_gpu = replace(seen, trace=replace(seen.trace, device_kind="cuda"))  # of whose memory a little counts
    found = [each for each in findings(on_gpu) if each.check == "evaluation-gathered"]
    assert [each for each in findings(seen) if each.check == "evaluation-gathered"] == []
    assert [each.what.partition(" keeps")[0] for each in found] == ["all_preds.tensors"] * is_found
    if found:
        assert "test_transformers.py:" in found[0].line
        assert found[0].size_bytes == pytest.approx(LONGEST * VOCABULARY * 4, rel=0.5)


def test_a_trainer_without_samples_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(**arguments(tmp_path))
    with pytest.raises(UsageError, match="no train_dataset"):
        bft.job(Trainer(model=gpt2(), args=args, data_collator=pad))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft 0.21
def test_a_lora_adapter_trains_as_without_a_plan(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = gpt2()
        model.enable_input_require_grads()
        return peft.get_peft_model(model, config)

    alone, planned = trainer(tmp_path, adapted()), trainer(tmp_path, adapted())
    plan = bft.plan(planned, "cpu", budget="1GiB", recompute="all", micro_batch_size=8)
    assert_predicted(plan, bf.measure(bft.job(planned), plan.settings, "cpu"))
    bft.apply(plan, planned, report=False)
    train(alone)
    train(planned)
    assert plan.settings.units
    assert_same(planned, alone, exactly=True)


RANK = """
import sys
from pathlib import Path

import brimful.integrations.transformers as bft
from helpers.trainers import gpt2, losses, train, trainer

def trained(is_planned):
    own = trainer(Path(sys.argv[1]), gpt2(dropout=0.0), per_device_train_batch_size=4)
    if is_planned:
        plan = bft.plan(own, "cpu", budget="1GiB", recompute="all", micro_batch_size=2)
        assert plan.settings.world_size == 2
        bft.apply(plan, own, report=False)
    train(own)
    return losses(own)

report([trained(is_planned) for is_planned in (False, True)])
"""


@pytest.mark.slow
def test_two_processes_train_the_same_batch(tmp_path: Path) -> None:
    alone, planned = result_of_two_ranks(tmp_path, RANK, str(tmp_path))
    assert planned == pytest.approx(alone, rel=1e-4)


def scaled_trainer(folder: Path, **changes: Any) -> tuple[Trainer, torch.amp.GradScaler]:
    """A trainer in fp16, with the loss scaler that Accelerate makes on GPUs alone."""
    own = trainer(folder, fp16=True, **changes)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    own.accelerator.scaler, own.accelerator.native_amp = scaler, True
    return own, scaler


def train_scaled(
    folder: Path, context: Any, implementation: str, *, kind: type[Trainer] = Trainer, **changes: Any
) -> tuple[Trainer, float, Any]:
    own, scaler = scaled_trainer(folder, kind=kind, callbacks=[During(2, context)], **changes)
    units = tuple(UnitAction(fqn=f"transformer.h.{block}", action=Action.RECOMPUTE) for block in range(4))
    settings = Settings(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        precision="fp16",
        units=units,
        optimizer_implementation=implementation,
    )
    plan: Any = SimpleNamespace(settings=settings, sample_sizes=())
    applied = bft.apply(plan, own, report=False)
    train(own)
    applied.remove()
    assert not {"unscale_", "step", "update"} & set(vars(scaler))
    assert "_get_grad_norm" not in vars(own)
    return own, scaler.get_scale(), applied


@pytest.mark.parametrize(("implementation", "points"), [("for-loop", 6), ("fused", 3)])
def test_memory_may_run_out_in_the_update_of_fp16(tmp_path: Path, implementation: str, points: int) -> None:
    """In forward and backward, and from where gradients are unscaled to where the scale changes."""
    counting = OutOfMemoryAt()
    calm, scale, _ = train_scaled(tmp_path, counting, implementation)
    assert scale == 2.0**10  # it grew twice, so the scaler was in force
    ops = counting.ops
    unscaling = ops.index("aten._amp_foreach_non_finite_check_and_unscale_.default")
    assert ops[-1] == "aten._amp_update_scale_.default"
    update = range(unscaling - 2, len(ops))
    places = {unscaling // 2, *update[:5], *update[5 :: len(update) // points], *update[-2:]}
    for number in sorted(place for place in places if not ops[place].startswith("profiler.")):
        fault = OutOfMemoryAt(number)
        own, its_scale, applied = train_scaled(tmp_path, fault, implementation)
        assert fault.raised == 1
        assert its_scale == scale, ops[number]
        assert_same(own, calm, exactly=True)
        assert len(applied.recoveries) <= 1


def test_an_update_of_fp16_in_which_memory_runs_out_twice_ends_before_it(tmp_path: Path) -> None:
    fault = OutOfMemoryAt(fails=lambda name, _args: name.startswith("aten._amp_foreach_non_finite"))
    with pytest.raises(torch.OutOfMemoryError, match="ran out twice while gradients are unscaled or clipped"):
        train_scaled(tmp_path, fault, "for-loop")
    fault.__exit__(None, None, None)
    assert fault.raised == 2


class ClipsLater(Trainer):
    """Takes no norm, so that the scaler's step unscales, after a change of the scaled gradients."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        return None

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)


@pytest.mark.parametrize(
    ("kind", "norm"), [(Trainer, 0.0), (ClipsLater, 1.0)], ids=["the norm alone", "in the scaler's step"]
)
def test_memory_may_run_out_where_gradients_are_unscaled_without_clipping(
    tmp_path: Path, kind: type[Trainer], norm: float
) -> None:
    def run(context: Any) -> tuple[Trainer, float, Any]:
        return train_scaled(tmp_path, context, "for-loop", kind=kind, max_grad_norm=norm)

    counting = OutOfMemoryAt()
    calm, scale, _ = run(counting)
    unscaling = counting.ops.index("aten._amp_foreach_non_finite_check_and_unscale_.default")
    for number in (unscaling - 1, unscaling):
        fault = OutOfMemoryAt(number)
        own, its_scale, applied = run(fault)
        assert fault.raised == 1
        assert its_scale == scale
        assert_same(own, calm, exactly=True)
        assert len(applied.recoveries) == 1


def test_memory_may_run_out_where_a_norm_is_taken_in_fp32(tmp_path: Path) -> None:
    def run(context: Any) -> tuple[Trainer, Any]:
        own = trainer(tmp_path, max_grad_norm=0.0, callbacks=[During(2, context)])
        own.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
        plan: Any = SimpleNamespace(
            settings=Settings(micro_batch_size=4, gradient_accumulation_steps=2), sample_sizes=()
        )
        applied = bft.apply(plan, own, report=False)
        train(own)
        return own, applied

    counting = OutOfMemoryAt()
    calm, _ = run(counting)
    for number in (10, counting.ops.index("aten._foreach_norm.Scalar")):
        fault = OutOfMemoryAt(number)
        own, applied = run(fault)
        assert fault.raised == 1
        assert_same(own, calm, exactly=True)
        assert len(applied.recoveries) == 1
