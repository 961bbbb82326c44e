"""A loss that couples the samples has the loss and the gradients of the whole batch, however it is split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import brimful as bf
from brimful.batches import BatchLayout
from brimful.errors import EquivalenceError
from brimful.execution.coupled_loss import loss_of
from brimful.execution.hooks import StepHooks
from brimful.execution.precision import make_scaler
from brimful.execution.step import StepParts, run_step
from brimful.job import Data, Job
from brimful.optimizers import make_optimizer
from brimful.profiling import measure_step, verify
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trainer import LengthBuckets, Trainer, pad_batch
from brimful.trainer.step import fallback as lowering
from brimful.transforms import apply_units
from helpers.coupled_jobs import TwoTowers, contrast, contrast_of, coupled_job, embed, pairs

SAMPLES = 24
IN_FLOAT32 = 1e-5
"""Over the largest entry of a gradient: splitting sums samples in another order; float32 rounds to 6e-8."""
IN_BFLOAT16 = 0.02
"""The same under bf16 autocast, which rounds to 8e-3; a micro-batch's kernels may round otherwise."""


TRANSPOSING_BYTES = 60 * 60 * 4
"""What copying a transposed matrix, of similarities here, takes inside on a CPU (ATen/native/Copy.cpp,
BLOCK_SZ); not predicted."""


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_step(
    job: Job, model: nn.Module, batch: Any, micro_batch_size: int, precision: Precision = Precision.FP32
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step that makes no update."""
    found: dict[str, Tensor] = {}
    parts = BatchLayout().split(batch, micro_batch_size)
    outcome = run_step(
        StepParts(
            model=model,
            loss=loss_of(job),
            optimizer=torch.optim.SGD(model.parameters()),
            precision=precision,
            scaler=make_scaler(precision, "cpu"),
        ),
        parts,
        [1 / len(parts)] * len(parts),
        hooks=StepHooks(before_update=lambda _loss, _norm: bool(found.update(gradients(model)))),
    )
    return outcome.loss, found


def in_one_graph(model: nn.Module, batch: Any, micro_batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by plain autograd: micro-batches draw numbers one after another, and all graphs are kept."""
    parts = [embed(model, part) for part in BatchLayout().split(batch, micro_batch_size)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("image", "text")}
    loss = contrast(joined | {"temperature": parts[0]["temperature"]})
    loss.backward()
    return loss.detach(), gradients(model)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        off = (found[name].float() - gradient.float()).abs().max() / gradient.float().abs().max()
        assert off <= tolerance, (name, float(off))


@pytest.mark.parametrize("micro_batch_size", [1, 3, 7, 8, 12])
def test_with_dropout_it_is_the_whole_batch_with_the_same_masks(micro_batch_size: int) -> None:
    torch.manual_seed(0)
    model, batch = TwoTowers(), pairs(SAMPLES)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected_loss, expected = in_one_graph(other, batch, micro_batch_size)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    loss, found = of_step(coupled_job(), model, batch, micro_batch_size)
    assert torch.equal(torch.rand(3), drawn)  # what is drawn next is not what was drawn before
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert_alike(found, expected, IN_FLOAT32)


@pytest.mark.parametrize("micro_batch_size", [1, 5, 8, 24])
def test_without_dropout_it_is_the_whole_batch_at_once(micro_batch_size: int) -> None:
    torch.manual_seed(0)
    model, batch = TwoTowers(dropout=0.0), pairs(SAMPLES)
    expected_loss, expected = of_step(Job(model=model, loss=contrast_of, batch=batch), model, batch, SAMPLES)
    model.zero_grad()
    loss, found = of_step(coupled_job(), model, batch, micro_batch_size)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert_alike(found, expected, 0.0 if micro_batch_size == SAMPLES else IN_FLOAT32)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_under_autocast_and_loss_scaling_too(precision: Precision) -> None:
    torch.manual_seed(0)
    model, batch = TwoTowers(dropout=0.0), pairs(SAMPLES)
    expected_loss, expected = of_step(
        Job(model=model, loss=contrast_of, batch=batch), model, batch, SAMPLES, precision
    )
    model.zero_grad()
    loss, found = of_step(coupled_job(), model, batch, 6, precision)
    assert loss == pytest.approx(float(expected_loss), rel=1e-2)
    assert_alike(found, expected, IN_BFLOAT16)


def test_a_mean_over_samples_is_weighted_by_samples_and_labels_need_no_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(10, 4)
    batch = {"x": x, "y": torch.arange(10) % 2}

    def embed_with_labels(model: nn.Module, batch: Any) -> Any:
        made = model(batch["x"])
        return [made, {"labels": batch["y"]}, made.square().mean()]  # the last one is a mean over the batch

    def loss(embeddings: Any) -> Tensor:
        made, labels, penalty = embeddings
        alike = (labels["labels"][:, None] == labels["labels"]).float()
        return (made @ made.T - alike).square().mean() + penalty**2

    job = Job(model=model, embed=embed_with_labels, loss=loss, batch=batch)
    expected_loss, expected = of_step(job, model, batch, 10)
    model.zero_grad()
    found_loss, found = of_step(job, model, batch, 4)  # 4 + 4 + 2
    assert found_loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert_alike(found, expected, IN_FLOAT32)


def test_buffers_change_once_a_micro_batch() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    torch.manual_seed(0)
    model, batch = net(), torch.randn(12, 4)
    other = copy.deepcopy(model)
    job = Job(
        model=model,
        embed=lambda model, x: model(x),
        loss=lambda made: (made @ made.T).logsumexp(0).mean(),
        batch=batch,
    )
    of_step(job, model, batch, 3)
    for part in batch.split(3):
        other(part)
    assert model[1].num_batches_tracked == 4
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))


def test_units_are_recomputed_to_the_last_bit() -> None:
    units = tuple(
        UnitAction(fqn=f"{tower}.blocks.{i}", action=Action.RECOMPUTE)
        for tower in ("image", "text")
        for i in (0, 1)
    )
    torch.manual_seed(0)
    model, batch = TwoTowers(), pairs(SAMPLES)
    torch.manual_seed(1)
    expected_loss, expected = of_step(coupled_job(), model, batch, 8)
    model.zero_grad()
    applied = apply_units(model, Settings(micro_batch_size=8, gradient_accumulation_steps=3, units=units))
    torch.manual_seed(1)
    loss, found = of_step(coupled_job(), model, batch, 8)
    applied.remove()
    assert torch.equal(loss, expected_loss)
    assert_alike(found, expected, 0.0)


@pytest.mark.parametrize("micro_batch_size", [24, 12, 8, 3])
def test_the_peak_is_predicted_to_the_byte(micro_batch_size: int) -> None:
    steps = SAMPLES // micro_batch_size
    settings = Settings(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
    predicted = bf.estimate(
        coupled_job(), "cpu", micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps
    )
    measured = measure_step(coupled_job(), settings, steps=1)
    assert predicted.predicted_peak_allocated_bytes == measured.measured_peak_allocated_bytes


def test_a_plan_splits_the_batch_and_keeps_its_word() -> None:
    job = coupled_job(batch=lambda n: pairs(n), dropout=0.0)
    whole = bf.estimate(job, "cpu", micro_batch_size=256).predicted_peak_allocated_bytes
    plan = bf.plan(job, "cpu", global_batch_size=256, budget=int(whole * 0.7), recompute="none")
    assert plan.settings.gradient_accumulation_steps > 1
    assert plan.predicted_peak_allocated_bytes <= 0.7 * whole
    measured = bf.measure(job, plan)
    beyond = measured.measured_peak_allocated_bytes - plan.predicted_peak_allocated_bytes
    assert 0 <= beyond <= TRANSPOSING_BYTES
    assert any("forward runs twice" in note for note in plan.notes)
    certificate = bf.verify(job, plan)
    assert certificate.holds
    assert certificate.comparisons[-1].name == "splitting"
    assert not certificate.comparisons[-1].why_not_compared


def test_the_second_forward_is_in_the_predicted_time() -> None:
    """A step in parts takes at least one forward more than the same parts of a loss that couples nothing."""

    def in_parts(job: Job) -> bf.api.Estimate:
        return bf.estimate(job, "cpu", micro_batch_size=64, gradient_accumulation_steps=4)

    coupled = in_parts(coupled_job())
    alone = in_parts(Job(model=TwoTowers, loss=contrast_of, batch=pairs))
    assert coupled.step_time.forward_seconds > 1.7 * alone.step_time.forward_seconds
    assert coupled.step_time.backward_seconds == pytest.approx(alone.step_time.backward_seconds, rel=0.3)


def trained(job: Job, micro_batch_size: int, **options: Any) -> tuple[nn.Module, Any]:
    settings = Settings(micro_batch_size=micro_batch_size, gradient_accumulation_steps=8 // micro_batch_size)
    trainer = Trainer(job, settings, device="cpu", show_progress=False, **options)
    result = trainer.fit()
    return trainer.model, result


def test_training_split_is_training_whole_and_so_is_validation() -> None:
    def metrics(found: dict[str, Tensor]) -> dict[str, Tensor]:
        """How often a text is the nearest of its image: it depends on how many there are to choose from."""
        nearest = (found["image"] @ found["text"].T).argmax(1)
        return {"accuracy": (nearest == torch.arange(len(nearest))).float().mean()}

    job = replace(coupled_job(dropout=0.0), metrics=metrics)
    _, whole = trained(job, 8, epochs=2)
    _, split = trained(job, 2, epochs=2)
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert whole.losses[-1] < whole.losses[0]
    pairs_of = zip(whole.validations, split.validations, strict=True)
    assert all(a.loss == pytest.approx(b.loss, rel=1e-4) and a.samples == 20 for a, b in pairs_of)
    assert split.validations[-1].metrics == whole.validations[-1].metrics
    assert 0 < whole.validations[-1].metrics["accuracy"] < 1


LONGEST_TEXT = 16


def pair_of_texts(text: int, pair: int) -> dict[str, Tensor]:
    """Tokens of two texts of these lengths; `pad_batch` adds the mask of the first."""
    tokens = {"text": torch.randint(1, 20, (text,)), "pair": torch.randint(1, 20, (pair,))}
    return tokens | {"pair_mask": torch.ones(pair, dtype=torch.int64)}


COLLATE = partial(pad_batch, pad_values={"text": 0, "pair": 0, "pair_mask": 0}, multiple_of=4)


def text_job() -> Job:
    """Texts of 3 to 16 tokens by a BERT without dropout, each side of a batch padded by itself."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def embed_texts(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {"temperature": torch.tensor(10.0)}
        for name, side, mask in (("image", "text", "attention_mask"), ("text", "pair", "pair_mask")):
            hidden = model(input_ids=batch[side], attention_mask=batch[mask]).last_hidden_state
            found[name] = F.normalize((hidden * batch[mask][:, :, None]).sum(1), dim=1)
        return found

    def data() -> Data:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            lengths = torch.randint(3, LONGEST_TEXT + 1, (40, 2)).tolist()
            samples = [pair_of_texts(*both) for both in lengths]
        buckets = LengthBuckets([sum(both) for both in lengths], 8, seed=1)
        loader = DataLoader(samples, batch_sampler=buckets, collate_fn=COLLATE)  # type: ignore[arg-type]
        return Data(train=loader, longest=longest(8))

    def longest(samples: int) -> dict[str, Tensor]:
        return COLLATE([pair_of_texts(LONGEST_TEXT, LONGEST_TEXT)] * samples)

    return Job(
        model=lambda: transformers.BertModel(config, add_pooling_layer=False),
        embed=embed_texts,
        loss=contrast,
        batch=longest,
        optimizer="adamw",
        data=data,
    )


def test_texts_of_different_lengths_are_contrasted_in_any_micro_batches() -> None:
    job = text_job()
    plan = bf.plan(job, "cpu", global_batch_size=8, micro_batch_size=2)
    split = Trainer(job, plan, device="cpu", show_progress=False, epochs=2).fit()
    _, whole = trained(job, 8, epochs=2)
    assert len(whole.steps) == 10
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.measured_peak_allocated_bytes == pytest.approx(plan.predicted_peak_allocated_bytes, rel=0.02)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Any) -> None:
    expected, _ = trained(coupled_job(), 2, steps=6)
    trained(coupled_job(), 2, steps=3, run_dir=tmp_path / "run")
    model, result = trained(coupled_job(), 2, steps=6, run_dir=tmp_path / "run", resume=True)
    assert len(result.steps) == 6
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def takes_at_most(samples: int) -> Callable[[nn.Module, dict[str, Tensor]], Any]:
    def embed_few(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if type(batch["image"]) is torch.Tensor and len(batch["image"]) > samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return embed(model, batch)

    return embed_few


def test_less_is_planned_for_each_time_though_a_smaller_micro_batch_is_to_take_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random states are kept for each micro-batch: where they are most of all, a plan led back and forth."""
    budgets = []

    def nothing_fits(_capture: Any, request: Any) -> Any:
        budgets.append(request.budget_bytes)
        raise bf.InfeasibleError("nothing", budget_bytes=request.budget_bytes, smallest_peak_bytes=0)

    monkeypatch.setattr(lowering, "search", nothing_fits)
    lower = lowering.MemoryFallback(coupled_job(), None, torch.device("cpu"))
    settings = Settings(micro_batch_size=8)
    while settings.micro_batch_size > 1:
        settings = lower(settings)
    assert settings.gradient_accumulation_steps == 8
    assert budgets == sorted(budgets, reverse=True)
    assert len(budgets) == 3


def test_where_memory_runs_out_smaller_micro_batches_have_the_same_losses() -> None:
    _, expected = trained(coupled_job(dropout=0.0), 8, epochs=1)
    _, lowered = trained(coupled_job(dropout=0.0, embed=takes_at_most(4)), 8, epochs=1)
    assert lowered.settings.micro_batch_size <= 4
    assert lowered.settings.global_batch_size == 8
    assert lowered.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_coupled_loss_that_does_not_say_so_is_refused(dropout: float, precision: Precision) -> None:
    job = coupled_job(dropout, embed=None, loss=contrast_of)
    settings = Settings(micro_batch_size=4, gradient_accumulation_steps=2, precision=precision)
    with pytest.raises(EquivalenceError, match=r"Job\(embed=…"):
        Trainer(job, settings, device="cpu", show_progress=False).fit()
    assert verify(coupled_job(dropout), settings).holds


def test_an_embedding_that_depends_on_other_samples_is_refused() -> None:
    def centred(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        made = embed(model, batch)
        return made | {"image": F.normalize(made["image"] - made["image"].mean(0), dim=-1)}

    settings = Settings(micro_batch_size=4, gradient_accumulation_steps=2)
    for dropout in (0.0, 0.1):
        assert not verify(coupled_job(dropout, embed=centred), settings).holds


def test_in_a_loop_of_ones_own(tmp_path: Any) -> None:
    torch.manual_seed(0)
    whole = TwoTowers(dropout=0.0)
    split, batch = copy.deepcopy(whole), pairs(SAMPLES)
    for model, size in ((whole, SAMPLES), (split, 5)):
        settings = Settings(micro_batch_size=size, gradient_accumulation_steps=-(-SAMPLES // size))
        step = bf.apply(settings, coupled_job(), model, make_optimizer(coupled_job(), model.parameters()))
        outcome = step(batch)
        step.remove()
    assert outcome.updated
    for name, parameter in whole.named_parameters():  # AdamW's first update is 1e-3 times the sign
        assert torch.allclose(parameter, split.get_parameter(name), atol=2e-4), name


def test_a_parameter_may_be_among_the_embeddings() -> None:
    """Without a warning of torch's, and its gradient is that of the whole batch."""

    def with_parameter(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return embed(model, batch) | {"temperature": model.temperature}

    job = coupled_job(dropout=0.0, embed=with_parameter)
    batch, model = pairs(SAMPLES, seed=1), TwoTowers(0.0)
    loss, whole = of_step(job, copy.deepcopy(model), batch, SAMPLES)
    split_loss, split = of_step(job, model, batch, SAMPLES // 4)
    assert split_loss == pytest.approx(float(loss), rel=IN_FLOAT32)
    assert split["temperature"] == pytest.approx(float(whole["temperature"]), rel=IN_FLOAT32)


def test_a_batch_is_copied_only_if_it_is_embedded_twice() -> None:
    """On a CPU, where the loss works on the batch itself."""
    seen: list[bool] = []
    batch = pairs(SAMPLES, seed=1)

    def watching(model: nn.Module, part: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = batch["image"]
        seen.append(part["image"].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr())
        return embed(model, part)

    job, model = coupled_job(embed=watching), TwoTowers()
    for micro_batches in (1, 2):
        settings = Settings(
            micro_batch_size=SAMPLES // micro_batches, gradient_accumulation_steps=micro_batches
        )
        step = bf.apply(settings, job, model, torch.optim.SGD(model.parameters()))
        step(batch)
        step.remove()
    assert seen == [True, *[False] * 4]
