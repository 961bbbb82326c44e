"""Suggestions: each is predicted as a plan or an estimate with the change is, and nothing unasked is done."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import CautiousCapture
from brimful.devices import find_device
from brimful.integrations.suggestions import for_trainer, translated
from brimful.memory import most_held_bytes
from brimful.models.resolve import resolve_job
from brimful.planner import Plan
from brimful.planner.candidate import estimate_of
from brimful.planner.explain.changed_steps import _on_one_rank
from brimful.results import Suggestion
from brimful.settings import Parallelism, Precision, Settings
from brimful.trace import Category, Trace
from helpers import compared_jobs
from helpers.models import GPT
from helpers.planned_jobs import language_job

GPU = "RTX 3090"


def bert(**options: Any) -> bf.Job:
    return bf.find_architecture(
        "bert-base", **{"sequence_length": 256, "num_hidden_layers": 6, **of_architecture(options)}
    )


def of_architecture(asked: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line that `find_architecture` takes, under its names."""
    names = {"seq-len": "sequence_length", "seq_len": "sequence_length"}
    taken = ("sequence_length", "dtype", "lora", "quantize")
    named = {names.get(name, name): value for name, value in asked.items()}
    return {name: int(value) if name == taken[0] else value for name, value in named.items() if name in taken}


def llama(**options: Any) -> bf.Job:
    return bf.find_architecture(
        "llama-3.2-1b", sequence_length=256, num_hidden_layers=3, vocab_size=16_000, **options
    )


@pytest.fixture(scope="module")
def limited() -> Plan:
    """A plan that recomputes, as its budget is small."""
    return bf.plan(bert(), GPU, global_batch_size=32, budget="1.8GiB")


def by_flag(suggestions: tuple[Suggestion, ...]) -> dict[str, Suggestion]:
    return {each.flag: each for each in suggestions}


def test_a_limited_plan_suggests_what_is_faster(limited: Plan) -> None:
    assert limited.settings.changed
    assert limited.settings.precision is Precision.FP32
    found = by_flag(limited.suggestions)
    assert {"--precision bf16", "--optimizer adamw8bit", "--world-size 2"} <= found.keys()
    seconds = [each.predicted_step_seconds for each in limited.suggestions]
    assert seconds == sorted(seconds)
    for each in limited.suggestions:
        assert each.predicted_peak_device_bytes <= limited.budget_bytes
        assert each.predicted_step_seconds < limited.predicted_step_seconds
        assert each.predicted_difference_interval_seconds is not None
        assert each.predicted_difference_interval_seconds[1] < 0


def test_a_suggestion_is_what_its_own_capture_predicts(limited: Plan) -> None:
    device = find_device(GPU)
    capture = CautiousCapture(bert(), device)
    assert limited.suggestions
    for each in limited.suggestions:
        if of_architecture(adapted(each.flag)):
            continue
        own = estimate_of(each.settings, capture, device)
        assert each.predicted_peak_device_bytes == pytest.approx(own.predicted_peak_device_bytes, rel=0.01)
        assert each.predicted_step_seconds == pytest.approx(own.predicted_step_seconds, rel=0.01)


def test_a_plan_with_the_change_is_at_least_as_fast(limited: Plan) -> None:
    for flag, asked in {
        "--precision bf16": {"precision": "bf16"},
        "--optimizer adamw8bit": {"optimizer": "adamw8bit"},
    }.items():
        plan = bf.plan(bert(), GPU, global_batch_size=32, budget="1.8GiB", **asked)  # type: ignore[arg-type]
        suggested = by_flag(limited.suggestions)[flag].predicted_step_seconds
        assert plan.predicted_step_seconds <= suggested * 1.03  # the simplest of equal ones


def test_a_plan_that_fits_whole_suggests_no_optimizer() -> None:
    plan = bf.plan(bert(), GPU, global_batch_size=4)
    assert not plan.settings.changed
    flags = by_flag(plan.suggestions).keys()
    assert "--precision bf16" in flags
    assert not any("optimizer" in flag or "lora" in flag for flag in flags)


def test_what_is_permitted_is_not_suggested() -> None:
    plan = bf.plan(bert(), GPU, global_batch_size=32, budget="1.8GiB", precision="bf16", optimizer="sgd")
    assert not any("precision" in each.flag or "optimizer" in each.flag for each in plan.suggestions)


def test_a_plan_with_suggestions_is_read_as_it_was_written(limited: Plan) -> None:
    assert Plan.from_json(limited.to_json()) == limited
    older = limited.to_json()
    del older["suggestions"]
    assert Plan.from_json(older).suggestions == ()


def test_the_text_of_a_plan_says_how_to_ask_and_what_changes(limited: Plan) -> None:
    assert re.search(r"with your permission: peak, step time", str(limited))
    assert re.search(r"-\d.*--precision bf16: products have 8 significant bits", str(limited))


def test_flags_of_a_command_come_before_how_it_is_started(limited: Plan) -> None:
    """`torchrun … --precision bf16` would give the flag to torchrun."""
    pair = replace(limited.suggestions[0], flag="--world-size 2 --precision bf16")
    known = {"--world-size 2": "torchrun --nproc-per-node 2", "--precision bf16": "--precision bf16"}
    (found,) = translated([pair], known.get)
    assert found == replace(pair, flag="--precision bf16 and torchrun --nproc-per-node 2")
    del known["--precision bf16"]
    assert not list(translated([pair], known.get))
    of_trainer = {"--world-size 2": "Trainer(devices=2)", "--precision bf16": "Trainer(precision='bf16-mixed')"}
    (found,) = for_trainer([pair], of_trainer)
    assert found.option == found.flag == "Trainer(devices=2) and Trainer(precision='bf16-mixed')"


def adapted(flag: str) -> dict[str, Any]:
    """The options of a model that a flag means."""
    words = iter(flag.split())
    return {word[2:]: next(words) for word in words}


def test_where_nothing_fits_adapters_are_suggested_as_they_are_planned() -> None:
    with pytest.raises(bf.InfeasibleError) as caught:
        bf.plan(llama(), GPU, global_batch_size=8, budget="1.6GiB")
    found = [each for each in caught.value.suggestions if "--lora" in each.flag]
    assert len(found) == 1
    assert f"would fit: {found[0].flag}" in str(caught.value)
    plan = bf.plan(llama(**adapted(found[0].flag)), GPU, global_batch_size=8, budget="1.6GiB")
    assert plan.predicted_step_seconds <= found[0].predicted_step_seconds * 1.03


def test_two_changes_are_suggested_where_none_suffices() -> None:
    estimate = bf.estimate(llama(), GPU, micro_batch_size=8, budget="1.6GiB")
    assert estimate.suggestions
    assert all(each.flag.count("--") >= 2 for each in estimate.suggestions)
    assert any("--recompute all" in each.flag for each in estimate.suggestions)


def test_where_one_change_suffices_others_are_suggested_with_it() -> None:
    """Only accumulation fits alone: logits take most, which recomputation and bf16 autocast keep."""
    job = bf.find_architecture("gpt2", num_hidden_layers=3)
    estimate = bf.estimate(job, GPU, micro_batch_size=4, budget="2.6GiB")
    found = by_flag(estimate.suggestions)
    accumulated = "--micro-batch-size 1 --gradient-accumulation-steps 4"
    assert len(found) >= 3
    assert accumulated in found
    assert f"{accumulated} --recompute all" in found
    for flag, each in found.items():
        again = bf.estimate(job, GPU, budget="2.6GiB", **dict(asked_of_estimate(flag)))
        assert again.settings == each.settings
        assert again.verdict != "does not fit"
        assert each.predicted_peak_device_bytes == pytest.approx(again.predicted_peak_device_bytes, rel=0.01)


def asked_of_estimate(flag: str) -> Iterator[tuple[str, Any]]:
    words = iter(flag.split())
    for word in words:
        value = next(words)
        yield word[2:].replace("-", "_"), int(value) if value.isdecimal() else value


def test_what_an_estimate_suggests_is_what_it_predicts_with_it() -> None:
    estimate = bf.estimate(bert(), GPU, micro_batch_size=16, budget="2GiB")
    assert estimate.verdict == "does not fit"
    found = by_flag(estimate.suggestions)
    assert "--recompute all" in found
    assert any(flag.startswith("--micro-batch-size") for flag in found)
    for flag, each in found.items():
        asked: dict[str, Any] = {"micro_batch_size": 16, **dict(asked_of_estimate(flag))}
        job = bert(**asked)
        for name in ("seq_len", "dtype", "lora", "quantize"):
            asked.pop(name, None)
        again = bf.estimate(job, GPU, budget="2GiB", **asked)
        assert again.verdict != "does not fit"
        assert each.predicted_peak_device_bytes == pytest.approx(again.predicted_peak_device_bytes, rel=0.01)
        assert each.predicted_step_seconds == pytest.approx(again.predicted_step_seconds, rel=0.01)


def test_an_estimate_that_recomputes_suggests_steps_that_do() -> None:
    options: dict[str, Any] = {"budget": "2GiB", "recompute": "all"}
    estimate = bf.estimate(bert(), GPU, micro_batch_size=64, **options)
    assert estimate.verdict == "does not fit"
    split = next(each for each in estimate.suggestions if "--micro-batch-size" in each.flag)
    again = bf.estimate(bert(), GPU, **{**options, **dict(asked_of_estimate(split.flag))})
    assert again.verdict != "does not fit"
    assert again.settings == split.settings
    assert split.predicted_step_seconds == pytest.approx(again.predicted_step_seconds, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"micro_batch_size": 32}, "--world-size"),
        ({"offload_optimizer": True}, "--world-size"),
        ({"offload_optimizer": True}, "adamw8bit"),
        ({"optimizer_in_backward": True, "budget": None}, "--world-size"),
    ],
)
def test_nothing_is_suggested_that_does_not_go_with_what_is_pinned(asked: dict[str, Any], refused: str) -> None:
    plan = bf.plan(bert(), GPU, global_batch_size=32, **{"budget": "2.4GiB", **asked})
    assert plan.suggestions
    assert not any(refused in each.flag for each in plan.suggestions)


def test_a_half_precision_model_with_adapters_is_not_made_so_again() -> None:
    job = llama(dtype="bf16", lora="r=4")
    plan = bf.plan(job, GPU, global_batch_size=8, budget="70%")
    assert not any("--dtype" in each.flag or "--lora" in each.flag for each in plan.suggestions)


def test_shorter_sequences_are_suggested_as_a_plan_with_them_is_predicted(limited: Plan) -> None:
    shorter = by_flag(limited.suggestions)["--seq-len 128"]
    job = bert(sequence_length=128)
    own = estimate_of(shorter.settings, CautiousCapture(job, find_device(GPU)), find_device(GPU))
    assert shorter.predicted_peak_device_bytes == pytest.approx(own.predicted_peak_device_bytes, rel=0.01)
    assert shorter.predicted_step_seconds == pytest.approx(own.predicted_step_seconds, rel=0.01)
    assert "128 tokens a sample in place of 256" in shorter.effect


def of_images(model: nn.Module, size: int = 64) -> bf.Job:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples, 3, size, size), torch.zeros(samples, dtype=torch.long)

    return bf.Job(model=lambda: model, loss=loss, batch=batch, optimizer="sgd")


def test_smaller_images_of_a_job_of_ones_own_are_suggested_in_words() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    estimate = bf.estimate(of_images(model), GPU, micro_batch_size=1024, budget="2.5GiB")
    found = next(each for each in estimate.suggestions if "32×32 pixels" in each.flag)
    assert found.flag == found.option == "32×32 pixels a sample in Job(batch=…)"
    smaller = bf.estimate(of_images(model, 32), GPU, micro_batch_size=1024)
    assert found.predicted_peak_device_bytes == pytest.approx(smaller.predicted_peak_device_bytes, rel=0.01)


def test_a_model_that_a_job_returns_and_did_not_build_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2048), nn.ReLU(), nn.Linear(2048, 10))
    estimate = bf.estimate(of_images(model), GPU, micro_batch_size=16, budget="450MiB")
    assert estimate.verdict == "does not fit"
    assert not any("--dtype" in each.flag for each in estimate.suggestions)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_a_model_that_takes_no_smaller_images_is_given_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 62 * 62, 10))
    estimate = bf.estimate(of_images(model), GPU, micro_batch_size=1024, budget="2.5GiB")
    assert estimate.suggestions
    assert not any("pixels" in each.flag for each in estimate.suggestions)
    assert not any("smaller images" in note for note in estimate.notes)


def test_a_change_whose_step_cannot_be_captured_is_noted_once() -> None:
    def no_half(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("float32 only")
        return compared_jobs.loss(model, given)

    job = compared_jobs.job(loss=no_half)
    noted = bf.estimate(job, "cpu", micro_batch_size=64, budget="225KiB").notes
    assert [note.partition(":")[0] for note in noted if "float32 only" in note] == ["bf16 autocast"]
    with pytest.raises(bf.InfeasibleError) as caught:
        bf.plan(job, "cpu", global_batch_size=64, budget="225KiB")
    assert str(caught.value).count("note: bf16 autocast: not suggested, as its step cannot be predicted") == 1


def test_an_estimate_that_fits_suggests_nothing() -> None:
    assert bf.estimate(bert(), GPU, micro_batch_size=2).suggestions == ()


def test_splitting_under_batch_norm_is_suggested_with_what_it_changes() -> None:
    resnet = bf.find_architecture("resnet18", image_size=64)
    estimate = bf.estimate(resnet, GPU, micro_batch_size=512, budget="1.6GiB")
    (split,) = [each for each in estimate.suggestions if "--gradient-accumulation-steps" in each.flag]
    assert split.effect == "BatchNorm has statistics of micro-batches"


@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_under_ddp_run_what_one_runs(steps: int) -> None:
    """So their step is predicted from captures of one."""
    device = find_device(GPU)
    capture = CautiousCapture(bert(), device)
    one = Settings(micro_batch_size=2, gradient_accumulation_steps=steps)
    two = Settings(
        micro_batch_size=2, gradient_accumulation_steps=steps, world_size=2, parallelism=Parallelism.DDP
    )
    assert capture(one).with_settings(two) == capture(two)


def test_variants_are_options_of_any_model(tmp_path: Any) -> None:
    half, plain = (bf.estimate(bert(dtype=dtype), GPU, micro_batch_size=1) for dtype in ("bf16", "fp32"))
    one = Settings(micro_batch_size=1)
    traces = [CautiousCapture(bert(dtype=dtype), find_device(GPU))(one) for dtype in ("bf16", "fp32")]
    for kept in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE):
        in_half, whole = (most_held_bytes(trace, kept) for trace in traces)
        assert in_half == pytest.approx(whole / 2, rel=1e-3)  # numbers of steps stay float32
    assert half.uncertain == plain.uncertain
    assert half.predicted_peak_allocated_bytes < 0.55 * plain.predicted_peak_allocated_bytes
    file = tmp_path / "own.py"
    file.write_text(
        "import torch, brimful as bf\n"
        "def job():\n"
        "    return bf.Job(model=lambda: torch.nn.Linear(8, 8), batch=lambda n: torch.zeros(n, 8),\n"
        "        loss=lambda model, x: model(x).sum())\n"
    )
    any_options = tmp_path / "any.py"
    any_options.write_text(
        "import brimful as bf\n"
        "def job(**options):\n"
        "    assert options == {'dtype': 'own'}\n"
        "    return bf.Job(model=lambda: None, batch=lambda n: n, loss=lambda model, x: x)\n"
    )
    resolve_job(f"{any_options}:job", dtype="own")
    own = resolve_job(f"{file}:job", dtype="bf16")
    assert {str(each.dtype) for each in own.model().parameters()} == {"torch.bfloat16"}  # type: ignore[operator]
    with pytest.raises(bf.errors.UsageError, match="adapters are added to models of transformers"):
        bf.estimate(resolve_job(f"{file}:job", lora="r=4"), GPU)
    with pytest.raises(bf.errors.UsageError, match="quantised weights are frozen"):
        resolve_job(f"{file}:job", quantize="nf4")
    with pytest.raises(bf.errors.UnknownNameError, match="type of weights"):
        resolve_job(f"{file}:job", dtype="fp8")


def test_a_rank_of_two_gpus_runs_what_was_captured_of_the_plan() -> None:
    """Micro-batches after the second repeat it, so half as many are not captured again."""
    asked: list[Settings] = []
    captured = CautiousCapture(language_job(lambda: GPT(layers=1)), find_device(GPU))

    def capture(settings: Settings, steps: int = 1) -> Trace:
        asked.append(settings)
        return captured(settings, steps)

    chosen = Settings(micro_batch_size=4, gradient_accumulation_steps=4)
    half = replace(chosen, gradient_accumulation_steps=2)
    of_rank = replace(half, world_size=2)
    assert _on_one_rank(capture, chosen)(of_rank) == captured(half, 1).with_settings(of_rank)
    assert asked == [chosen]
