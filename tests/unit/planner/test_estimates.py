"""What an estimate says: the interval, the verdict, where memory is made, and any micro-batch size."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brimful as bf
from brimful.cost import StepTime, step_seconds
from brimful.devices import Device
from brimful.errors import InfeasibleError, UnknownNameError, UsageError
from brimful.memory import AllocatorSettings, predict_memory, smallest_surviving_capacity_bytes
from brimful.models.variants import with_dtype
from brimful.planner import GpuFit
from brimful.prediction import Verdict, estimate_trace
from brimful.prediction.estimator import MOST_SAMPLES
from brimful.settings import Action, MemoryFormat
from brimful.trace import Category, Phase, Trace
from brimful.utils.quantities import GIB, MIB

DEVICE = "RTX 3090"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
        self.head = nn.Linear(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.blocks(x), 0.1))


def wide_job() -> bf.Job:
    return bf.Job(
        model=Wide,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 512, 1024),
        optimizer="sgd",
        name="wide",
    )


def convolution_job(memory_format: torch.memory_format = torch.contiguous_format) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 16, 128, 128).to(memory_format=memory_format),
        optimizer="sgd",
        name="convolutions",
    )


def test_the_interval_holds_the_likely_size_and_begins_with_what_survives() -> None:
    found = bf.estimate(wide_job(), DEVICE, micro_batch_size=8)
    low, high = found.predicted_device_interval_bytes
    assert low <= found.predicted_peak_device_bytes < high
    device = bf.devices.find_device(DEVICE)
    trace = bf.api.capture_trace(wide_job(), bf.Settings(micro_batch_size=8), DEVICE)
    assert low == smallest_surviving_capacity_bytes(trace) + device.context_low_bytes


def test_workspaces_of_unknown_size_widen_the_interval_less_for_channels_last_in_half_types() -> None:
    """In float32 both layouts may be transformed or copied."""

    def width(job: bf.Job, precision: str = "bf16") -> int:
        found = bf.estimate(job, DEVICE, micro_batch_size=16, precision=precision)
        return found.predicted_device_interval_bytes[1] - found.predicted_peak_device_bytes

    activation_bytes = 16 * 16 * 128 * 128 * 4
    assert width(convolution_job(), "fp32") > activation_bytes
    assert width(convolution_job(torch.channels_last)) < width(convolution_job())


def test_the_verdict_is_fits_tight_or_does_not_fit_as_the_capacity_falls() -> None:
    trace = bf.api.capture_trace(wide_job(), bf.Settings(micro_batch_size=8), DEVICE)
    device = bf.devices.find_device(DEVICE)
    likely = estimate_trace(trace, device)
    low, high = likely.predicted_device_interval_bytes

    def verdict(capacity_bytes: int) -> Verdict:
        return estimate_trace(trace, device, capacity_bytes=capacity_bytes).verdict

    assert verdict(high) is Verdict.FITS
    assert verdict(high - 1) is Verdict.TIGHT
    assert verdict(likely.predicted_peak_device_bytes) is Verdict.TIGHT
    assert verdict(low - device.context_low_bytes + device.context_bytes - 2 * MIB) is Verdict.DOES_NOT_FIT


def test_large_blocks_and_a_failure_are_placed_at_the_line_that_made_them() -> None:
    found = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, budget="460MiB")
    made = [block for block in found.largest if block.category is Category.SAVED_TENSORS]
    assert made
    assert all("test_estimates.py:" in block.line for block in made)
    assert found.out_of_memory_at is not None
    assert "test_estimates.py:" in found.out_of_memory_at.line


def test_a_block_made_in_backward_is_placed_at_the_line_of_its_forward_op() -> None:
    trace = bf.api.capture_trace(wide_job(), bf.Settings(micro_batch_size=8), DEVICE)
    forward = next(op for op in trace.ops if op.name == "aten.addmm.default")
    backward = [op for op in trace.ops if op.phase is Phase.BACKWARD and op.name == "aten.mm.default"]
    assert forward.line
    assert forward.line in {op.line for op in backward}


def test_the_module_tree_sums_to_what_modules_hold() -> None:
    found = bf.estimate(wide_job(), DEVICE, micro_batch_size=8)
    shares = {share.fqn: share for share in found.modules}
    assert shares["blocks"].held_bytes >= sum(shares[f"blocks.{i}"].held_bytes for i in range(6))
    assert shares["blocks"].class_name == "Sequential"
    assert shares["blocks.0"].depth == 2
    assert shares[""].held_bytes <= found.predicted_peak_allocated_bytes
    assert shares["blocks.3"].held_bytes > 2 * 1024 * 1024 * 4  # its weight and what SGD keeps


def test_evaluation_takes_less_than_training_and_is_told_when_asked_for() -> None:
    phases = {phase.name: phase for phase in bf.estimate(wide_job(), DEVICE, micro_batch_size=8).phases}
    assert "evaluation" not in phases
    found = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, evaluate=True)
    phases = {phase.name: phase.predicted_peak_allocated_bytes for phase in found.phases}
    parameters = dict(found.breakdown)[Category.PARAMETERS]
    assert parameters < phases["evaluation"] < phases["steady step"] == found.predicted_peak_allocated_bytes
    assert phases["loading weights"] == pytest.approx(2 * parameters, rel=0.01)


def test_an_estimate_says_which_size_and_optimizer_it_counts_where_they_are_not_given() -> None:
    given = bf.estimate(wide_job(), DEVICE, micro_batch_size=1)
    assert given.notes == ()
    without = replace(wide_job(), optimizer=bf.Job.__dataclass_fields__["optimizer"].default)
    (size, optimizer) = bf.estimate(without, DEVICE).notes
    assert size.startswith("The micro-batch is 1 sample, as no size is given")
    assert "--micro-batch-size" in size
    assert optimizer.startswith("The optimizer is AdamW")
    assert bf.estimate(without, DEVICE, micro_batch_size=2, optimizer="sgd").notes == ()
    largest = bf.estimate(without, DEVICE).at(2)
    assert largest.notes == (optimizer,)
    assert f"\n  note: {optimizer}" in str(largest)
    assert optimizer in bf.plan(without, DEVICE, global_batch_size=2).notes
    assert optimizer not in bf.plan(wide_job(), DEVICE, global_batch_size=2).notes
    assert optimizer not in bf.plan(without, DEVICE, global_batch_size=2, optimizer="sgd").notes
    stated = replace(wide_job(), optimizer="adamw")
    assert optimizer not in bf.estimate(stated, DEVICE, micro_batch_size=1).notes
    assert optimizer not in bf.plan(stated, DEVICE, global_batch_size=2).notes


def test_fp32_in_the_settings_is_explained_where_the_weights_are_in_half_precision() -> None:
    half = with_dtype(wide_job(), "bf16")
    (note,) = bf.estimate(half, DEVICE, micro_batch_size=1).notes
    assert note.startswith("fp32 in the settings says that autocast is off: the weights are bfloat16")
    assert note in bf.plan(half, DEVICE, global_batch_size=1).notes
    assert bf.estimate(half, DEVICE, micro_batch_size=1, precision="bf16").notes == ()


def test_two_captures_tell_any_micro_batch_size_exactly() -> None:
    estimate = bf.estimate(wide_job(), DEVICE)
    for size in (1, 5, 64):
        scaled, captured = estimate.at(size), bf.estimate(wide_job(), DEVICE, micro_batch_size=size)
        assert scaled.predicted_peak_reserved_bytes == captured.predicted_peak_reserved_bytes
        assert scaled.predicted_device_interval_bytes == captured.predicted_device_interval_bytes
        assert scaled.predicted_step_seconds == pytest.approx(captured.predicted_step_seconds)


def test_an_estimate_from_elsewhere_says_that_it_predicts_no_other_size() -> None:
    estimate = bf.estimate(wide_job(), DEVICE, micro_batch_size=2)
    again = pickle.loads(pickle.dumps(estimate))
    assert again == estimate
    with pytest.raises(UsageError, match=r"bf\.estimate\(job"):
        again.at(3)
    with pytest.raises(UsageError, match="micro_batch_size"):
        estimate.at(0)
    with pytest.raises(UsageError, match="micro_batch_size"):
        bf.estimate(wide_job(), DEVICE, micro_batch_size="biggest")  # type: ignore[arg-type]


def test_other_sizes_leave_random_numbers_as_they_are() -> None:
    estimate = bf.estimate(wide_job(), DEVICE, micro_batch_size=2)
    before = torch.get_rng_state()
    estimate.at(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_size_that_fits_is_asked_with_everything_else(tmp_path: Path) -> None:
    found = bf.estimate(
        wide_job(),
        DEVICE,
        micro_batch_size="largest",
        budget="2GiB",
        optimizer_in_backward=True,
        compare_allocators=True,
        save_trace=tmp_path / "trace.json",
    )
    assert found.settings.optimizer_in_backward
    assert found.allocators
    assert Trace.load(tmp_path / "trace.json").settings == found.settings
    assert found.at(3).settings.optimizer_in_backward


def in_batch_job() -> bf.Job:
    """A loss of the similarities of all samples with all, which take the square of the batch."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        embedded = model(batch)
        return F.cross_entropy(embedded @ embedded.T, torch.arange(len(batch)))

    return bf.Job(
        model=lambda: nn.Linear(64, 64), loss=loss, batch=lambda n: torch.randn(n, 64), optimizer="sgd"
    )


def test_bytes_that_grow_with_the_square_are_not_put_on_a_line() -> None:
    job = in_batch_job()
    estimate = bf.estimate(job, DEVICE, micro_batch_size=1000)
    for size in (500, 30_000):
        whole = bf.estimate(job, DEVICE, micro_batch_size=size)
        assert estimate.at(size).predicted_peak_allocated_bytes == whole.predicted_peak_allocated_bytes
    largest = bf.estimate(job, DEVICE, micro_batch_size="largest", budget="2GiB")
    assert largest.verdict is Verdict.FITS
    assert largest.at(largest.settings.micro_batch_size + 1).verdict is not Verdict.FITS


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    largest = bf.estimate(wide_job(), DEVICE, micro_batch_size="largest", budget="2GiB")
    assert largest.verdict is Verdict.FITS
    assert largest.at(largest.settings.micro_batch_size + 1).verdict is not Verdict.FITS


def test_where_not_even_one_sample_fits_the_shortfall_is_told() -> None:
    with pytest.raises(InfeasibleError, match="not even one sample") as caught:
        bf.estimate(wide_job(), DEVICE, micro_batch_size="largest", budget="310MiB")
    assert caught.value.shortfall_bytes > 0


def test_a_correction_can_be_left_out_by_name() -> None:
    whole = bf.estimate(wide_job(), DEVICE, micro_batch_size=8)
    without = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, without=["cublas_workspace"])
    assert whole.predicted_peak_allocated_bytes > without.predicted_peak_allocated_bytes
    assert "cublas_workspace" not in {rule.name for rule in without.corrections}
    with pytest.raises(UnknownNameError, match="cublas_workspace"):
        bf.estimate(wide_job(), DEVICE, without=["cublas"])


def test_other_settings_of_the_allocator_can_be_asked_for_and_compared() -> None:
    asked = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, allocator="expandable_segments:True")
    compared = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, compare_allocators=True)
    found = {what_if.settings: what_if for what_if in compared.allocators}
    expandable = found[AllocatorSettings(expandable_segments=True)]
    assert asked.predicted_peak_reserved_bytes == expandable.peak_reserved_bytes
    assert found[AllocatorSettings()].peak_reserved_bytes == compared.predicted_peak_reserved_bytes


def test_settings_beside_a_loop_of_ones_own_are_refused() -> None:
    job = replace(wide_job(), loop=lambda model, batches: None)
    with pytest.raises(UsageError, match="own training loop"):
        bf.estimate(job, DEVICE, precision="bf16")


def test_the_survey_of_gpus_agrees_with_an_estimate_of_each() -> None:
    names = ["T4", "RTX 3090", "H100 SXM"]
    for name, fit in zip(names, bf.gpus(wide_job(), global_batch_size=16, devices=names), strict=True):
        plain = bf.estimate(wide_job(), name, micro_batch_size=16)
        assert fit.device == plain.device
        assert fit.predicted_plain_peak_device_bytes == plain.predicted_peak_device_bytes
        assert fit.plain_fits
        assert fit.settings is not None
        best = bf.estimate(wide_job(), name, micro_batch_size=fit.settings.micro_batch_size,
                           gradient_accumulation_steps=fit.settings.gradient_accumulation_steps)  # fmt: skip
        assert fit.predicted_peak_device_bytes == best.predicted_peak_device_bytes
        assert fit.predicted_step_seconds == pytest.approx(best.predicted_step_seconds)


def test_a_gpu_too_small_for_plain_training_gets_smaller_micro_batches_and_then_a_change() -> None:
    def fit_of(capacity_bytes: int) -> GpuFit:
        device = replace(bf.devices.find_device("RTX 3090"), capacity_bytes=capacity_bytes)
        return bf.gpus(wide_job(), global_batch_size=64, devices=[device])[0]

    split = fit_of(GIB)
    assert not split.plain_fits
    assert split.settings is not None
    assert split.settings.gradient_accumulation_steps > 1 or split.settings.recomputed
    assert fit_of(330 * MIB).settings is None


def even_batches(job: bf.Job) -> bf.Job:
    """The job, which refuses batches of odd sizes but 1."""

    def batch(samples: int) -> Any:
        if samples % 2 and samples > 1:
            raise ValueError("pairs of samples only")
        return job.batch(samples)

    return replace(job, batch=batch)


def test_a_job_that_makes_no_batch_of_some_size_is_captured_at_each_size_asked_for() -> None:
    job, plain = even_batches(wide_job()), wide_job()
    (fit,) = bf.gpus(job, global_batch_size=16, devices=["RTX 3090"])
    assert fit == bf.gpus(plain, global_batch_size=16, devices=["RTX 3090"])[0]
    found = bf.estimate(job, DEVICE).at(4).predicted_peak_reserved_bytes
    assert found == bf.estimate(plain, DEVICE).at(4).predicted_peak_reserved_bytes


def test_the_largest_micro_batch_is_looked_for_up_to_a_limit() -> None:
    tiny = bf.Job(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["x"]).mean(),
        batch=lambda samples: {"x": torch.zeros(samples, 1)},
    )
    for compares in (False, True):
        largest = bf.estimate(tiny, "H200", micro_batch_size="largest", compare_allocators=compares)
        assert largest.settings.micro_batch_size == MOST_SAMPLES
        assert "The search ends at 1,048,576 samples, which fit; more may fit too." in largest.notes


def test_the_largest_micro_batch_is_found_without_a_capture_of_its_size() -> None:
    made: list[int] = []

    def batch(samples: int) -> torch.Tensor:
        made.append(samples)
        return torch.zeros(samples, 64 if samples > 64 else 32)  # longer in a larger batch

    job = bf.Job(
        model=lambda: nn.Conv1d(1, 8, 3),
        loss=lambda model, batch: model(batch[:, None]).mean(),
        batch=batch,
        optimizer="sgd",
    )
    largest = bf.estimate(job, DEVICE, micro_batch_size="largest", budget="1GiB", compare_allocators=True)
    assert largest.verdict is Verdict.FITS
    assert sorted(set(made))[-2] <= 32 < largest.settings.micro_batch_size
    assert largest.allocators
    assert "dimension 1 of batch is 64, and 32 in one of 32, which is predicted" in largest.notes[0]


def test_the_largest_micro_batch_of_data_that_make_no_such_batch_is_noted() -> None:
    def batch(samples: int) -> torch.Tensor:
        if samples > 100:
            raise ValueError("there are 100 samples")
        return torch.zeros(samples, 32)

    job = bf.Job(
        model=lambda: nn.Linear(32, 32),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=batch,
        optimizer="sgd",
    )
    largest = bf.estimate(job, DEVICE, micro_batch_size="largest", budget="1GiB")
    assert largest.verdict is Verdict.FITS
    assert "could be made" in largest.notes[0]
    assert "there are 100 samples" in largest.notes[0]


def test_other_sizes_have_the_memory_format_that_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(trace: Trace, device: Device) -> StepTime:
        is_last = trace.settings.memory_format is MemoryFormat.CHANNELS_LAST
        is_fast = is_last == (trace.settings.micro_batch_size > 8)  # the other one for few samples
        return replace(step_seconds(trace, device), forward_seconds=0.0 if is_fast else 9.0)

    monkeypatch.setattr("brimful.api.estimates.step_seconds", seconds)
    for size in (3, 64, "largest"):
        estimate = bf.estimate(convolution_job(), DEVICE, micro_batch_size=size, memory_format="auto")
        expected = MemoryFormat.CONTIGUOUS if size == 3 else MemoryFormat.CHANNELS_LAST
        assert estimate.settings.memory_format is expected
        for other in (1, 5, 40):
            assert estimate.at(other).settings.memory_format is expected


def test_all_units_are_recomputed_at_sizes_that_a_model_accepts() -> None:
    job = bf.Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 64),
        optimizer="sgd",
    )
    estimate = bf.estimate(job, DEVICE, micro_batch_size=8, recompute="all")
    assert len(estimate.settings.units) == 3
    assert estimate.at(16).settings.units == estimate.settings.units
    largest = bf.estimate(job, DEVICE, micro_batch_size="largest", recompute="all", budget="1GiB")
    assert largest.settings.units == estimate.settings.units


def test_a_memory_format_that_cannot_be_used_is_noted() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(16, 16, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.convolution(images).view(-1)  # no view of a channels_last tensor

    job = replace(convolution_job(), model=Refuses, loss=lambda model, batch: model(batch).mean())
    for found in (
        bf.estimate(job, DEVICE, memory_format="auto"),
        bf.estimate(job, DEVICE, memory_format="auto", micro_batch_size="largest"),
        bf.estimate(job, DEVICE, memory_format="auto").at(4),
    ):
        assert any(note.startswith("The memory format channels_last is not considered") for note in found.notes)


def test_an_estimate_recomputes_all_or_nothing() -> None:
    with pytest.raises(UnknownNameError, match="'auto'"):
        bf.estimate(wide_job(), DEVICE, recompute="auto")
    for action in (Action.OFFLOAD, Action.SAVE, Action.NEST):
        with pytest.raises(UnknownNameError, match="unknown value of recompute"):
            bf.estimate(wide_job(), DEVICE, recompute=action)
        with pytest.raises(UnknownNameError, match="unknown value of recompute"):
            bf.estimate(wide_job(), DEVICE, micro_batch_size="largest", recompute=action)
    assert bf.estimate(wide_job(), DEVICE, recompute=Action.KEEP).settings.units == ()


def test_units_that_match_a_pattern_are_recomputed() -> None:
    job = bf.find_architecture("bert-base", sequence_length=128, num_hidden_layers=4)
    some = bf.estimate(job, DEVICE, micro_batch_size=64, recompute="*.layer.[01]")
    assert some.settings.recomputed == ("bert.encoder.layer.0", "bert.encoder.layer.1")
    assert "2 of 5 units recomputed" in some.settings.describe()
    peaks = [
        bf.estimate(job, DEVICE, micro_batch_size=64, recompute=each).predicted_peak_allocated_bytes
        for each in ("none", "*.layer.[01]", "all")
    ]
    assert peaks[0] > peaks[1] > peaks[2]
    with pytest.raises(UnknownNameError, match=r"unknown unit 'decoder\.\*'.*layer"):
        bf.estimate(job, DEVICE, micro_batch_size=64, recompute="decoder.*")


def test_settings_chosen_by_hand_are_estimated_as_their_options_are() -> None:
    job = bf.find_architecture("bert-base", sequence_length=32, num_hidden_layers=2)
    by_option = bf.estimate(
        job, DEVICE, micro_batch_size=4, gradient_accumulation_steps=2, precision="bf16", recompute="all"
    )
    by_hand = bf.estimate(job, DEVICE, settings=by_option.settings)
    assert by_hand == by_option
    plan = bf.plan(job, DEVICE, global_batch_size=8, budget="70%")
    again = bf.estimate(job, DEVICE, settings=plan.settings)
    assert again.predicted_peak_device_bytes == plan.predicted_peak_device_bytes
    two = replace(by_option.settings, world_size=2)
    assert bf.estimate(job, DEVICE, settings=two).settings.world_size == 2
    with pytest.raises(UsageError, match="settings say how the step runs; give precision, optimizer in them"):
        bf.estimate(job, DEVICE, settings=plan.settings, precision="bf16", optimizer="sgd")


def test_a_loop_with_all_units_recomputed_says_so() -> None:
    def loop(model: Any, batches: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        for batch in batches:
            wide_job().loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = bf.estimate(replace(wide_job(), loop=loop), DEVICE, micro_batch_size=8, recompute="all")
    assert "units recomputed" in str(found).splitlines()[1]


def test_the_trace_that_is_saved_is_the_one_estimated(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    found = bf.estimate(wide_job(), DEVICE, micro_batch_size=8, without=["cublas_workspace"], save_trace=path)
    again = predict_memory(bf.trace.Trace.load(path))
    assert again.peak_reserved_bytes == found.predicted_peak_reserved_bytes


def test_a_job_whose_sizes_depend_on_its_values_is_captured_at_each_size() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.lstm(packed)[0].data

    job = bf.Job(
        model=Packed,
        loss=lambda model, batch: model(batch["x"], batch["lengths"]).square().mean(),
        batch=lambda n: {"x": torch.randn(n, 50, 8), "lengths": torch.randint(1, 51, (n,))},
        optimizer="sgd",
    )
    torch.manual_seed(1)
    found = [bf.estimate(job, DEVICE).at(64).predicted_peak_allocated_bytes for _ in range(3)]
    whole = bf.estimate(
        replace(job, batch=lambda n: {"x": torch.randn(n, 50, 8), "lengths": torch.full((n,), 50)}),
        DEVICE,
        micro_batch_size=64,
    )
    assert all(0 < size <= whole.predicted_peak_allocated_bytes for size in found)
