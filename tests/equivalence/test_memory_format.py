"""A step in another memory format computes the same within rounding, and all lies as before afterwards."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import CaptureError, InfeasibleError, UsageError
from brimful.profiling import measure_step
from brimful.profiling.equivalence import verify
from brimful.settings import (
    Action,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    UnitAction,
)
from brimful.trainer import Trainer
from brimful.transforms import apply_memory_format
from helpers.ranks import on_ranks
from helpers.small_cnns import Images, Volumes, batch, job, loss, losses_of, planned

LAST, CONTIGUOUS = MemoryFormat.CHANNELS_LAST, MemoryFormat.CONTIGUOUS
IN_LAST = Settings(micro_batch_size=8, memory_format=LAST)
FLOAT64_ROUNDING = 1e-12
"""In float64, where rounding decides no ReLU: thousands of roundings, of sums over some thousand terms."""
FLOAT32_ROUNDING = 1e-4
"""In float32 over four steps of AdamW, which divides gradients by their own size."""


def strides(tensors: Any) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in tensors]


def stepped(
    memory_format: MemoryFormat | None, make: Any, dims: int, dtype: torch.dtype, *, units: Any = ()
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, gradients and buffers of a step, by the model's own names."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    gradients: dict[str, Tensor] = {}

    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

    settings = Settings(micro_batch_size=8, memory_format=memory_format, units=units)
    step = planned(settings, model, Keeping(model.parameters(), lr=0.1))
    found = step(batch(8, dims=dims, dtype=dtype)).loss
    step.remove()
    return found, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


RECOMPUTED = tuple(UnitAction(fqn=f"blocks.{i}", action=Action.RECOMPUTE) for i in range(3))


@pytest.mark.parametrize(
    ("make", "dims", "units"),
    [(Images, 2, ()), (Images, 2, RECOMPUTED), (Volumes, 3, ())],
    ids=["2-d", "2-d recomputed", "3-d"],
)
def test_loss_gradients_and_batch_norm_are_those_of_the_other_format(make: Any, dims: int, units: Any) -> None:
    own = stepped(CONTIGUOUS, make, dims, torch.float64, units=units)
    found = stepped(LAST, make, dims, torch.float64, units=units)
    torch.testing.assert_close(found, own, rtol=FLOAT64_ROUNDING, atol=FLOAT64_ROUNDING)
    names = {name for name in own[2] if name.endswith("running_var")}
    assert names, "buffers that a step changes"


def test_contiguous_changes_nothing_of_a_contiguous_model() -> None:
    own = stepped(None, Images, 2, torch.float32)
    found = stepped(CONTIGUOUS, Images, 2, torch.float32)
    torch.testing.assert_close(found, own, rtol=0, atol=0)


def test_what_is_computed_truly_lies_in_the_format() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watched(Images):
        def forward(self, x: Tensor) -> Tensor:
            stem = self.stem(x)
            last = torch.channels_last
            seen.append((x.is_contiguous(memory_format=last), stem.is_contiguous(memory_format=last)))
            return super().forward(x)

    for memory_format in (None, LAST):
        stepped(memory_format, Watched, 2, torch.float32)
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_training_follows_the_same_curve(precision: Precision) -> None:
    own, weights = losses_of(CONTIGUOUS, precision=precision)
    found, found_weights = losses_of(LAST, precision=precision)
    rounding = FLOAT32_ROUNDING if precision is Precision.FP32 else 2e-2
    assert found == pytest.approx(own, rel=rounding)
    assert found_weights.keys() == weights.keys()
    assert strides(found_weights.values()) == strides(weights.values())


def test_everything_lies_as_before_once_the_step_is_removed() -> None:
    model = Images().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss(model, batch(8)).backward()
    optimizer.step()  # a state, and gradients that are still there
    before = strides(model.parameters())
    state_before = [
        strides(state[name] for name in ("exp_avg", "exp_avg_sq")) for state in optimizer.state.values()
    ]
    values = [value.clone() for value in model.state_dict().values()]
    gradients = [(p.grad.clone(), p.grad.stride()) for p in model.parameters() if p.grad is not None]
    step = planned(IN_LAST, model, optimizer)
    assert strides(model.parameters()) != before
    assert all(state["exp_avg"].stride() == p.stride() for p, state in optimizer.state.items())
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.dim() == 4 and p.grad is not None)
    step.remove()
    step.remove()
    assert strides(model.parameters()) == before
    assert [
        strides(state[name] for name in ("exp_avg", "exp_avg_sq")) for state in optimizer.state.values()
    ] == state_before
    assert all(map(torch.equal, model.state_dict().values(), values))
    found = [(p.grad, p.grad.stride()) for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) and s == t for (a, s), (b, t) in zip(found, gradients, strict=True))


def test_a_step_that_cannot_be_applied_leaves_the_layout() -> None:
    model = Images().train()
    before = strides(model.parameters())
    unknown = replace(IN_LAST, units=(UnitAction(fqn="nowhere", action=Action.RECOMPUTE),))
    with pytest.raises(UsageError):
        planned(unknown, model, torch.optim.AdamW(model.parameters()))
    assert strides(model.parameters()) == before


@pytest.mark.parametrize("loads", [False, True], ids=["made before", "loaded later"])
@pytest.mark.parametrize("implementation", OptimizerImplementation)
def test_state_of_the_optimizer_follows_its_parameters(
    implementation: OptimizerImplementation, loads: bool
) -> None:
    """Fused kernels of a CPU silently update wrong numbers where a state lies otherwise than its parameter."""
    torch.manual_seed(0)
    model = Images().double().train()
    ways = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **ways)
    for _ in range(2):
        loss(model, batch(8, dtype=torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    other = copy.deepcopy(model)
    stepping = torch.optim.AdamW(other.parameters(), lr=1e-2, **ways)
    if not loads:
        stepping.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = planned(IN_LAST, other, stepping)
    if loads:
        stepping.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(batch(8, dtype=torch.float64))
    step.remove()
    loss(model, batch(8, dtype=torch.float64)).backward()
    optimizer.step()
    for found, own in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-9)


def test_fused_kernels_of_a_cpu_do_need_that() -> None:
    """So the test above can fail; if this one does, torch has mended its kernels."""
    updated = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(4, 3, 3, 3))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
        for gradient in torch.randn(2, 4, 3, 3, 3):
            parameter.grad = None
            parameter.grad = gradient.to(memory_format=layout)
            optimizer.step()
            parameter.data = parameter.data.to(memory_format=layout)
        updated.append(parameter.detach().contiguous())
    assert not torch.allclose(*updated)


@pytest.mark.parametrize(("saved", "resumed"), [(CONTIGUOUS, LAST), (LAST, CONTIGUOUS), (LAST, LAST)])
def test_a_run_resumes_under_another_format(saved: MemoryFormat, resumed: MemoryFormat, tmp_path: Path) -> None:
    def run(steps: int, memory_format: MemoryFormat) -> list[float]:
        trainer = Trainer(
            job(),
            Settings(
                micro_batch_size=8,
                memory_format=memory_format,
                optimizer_implementation=OptimizerImplementation.FUSED,
            ),
            steps=steps,
            run_dir=tmp_path,
            resume=True,
            ema_decay=0.9,
            device="cpu",
            show_progress=False,
            verify=False,
        )
        return list(trainer.fit().losses)

    first = run(2, saved)
    whole = run(4, resumed)
    own, _weights = losses_of(saved, optimizer_implementation=OptimizerImplementation.FUSED)
    assert whole[:2] == first == own[:2]
    rounding = 0.0 if saved is resumed else FLOAT32_ROUNDING
    assert whole == pytest.approx(own, rel=rounding, abs=0)


@pytest.mark.parametrize(("make", "dims"), [(Images, 2), (Volumes, 3)])
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST])
def test_the_peak_on_a_cpu_is_predicted_in_both(make: Any, dims: int, memory_format: MemoryFormat) -> None:
    settings = Settings(micro_batch_size=16, gradient_accumulation_steps=2, memory_format=memory_format)
    predicted = bf.estimate(
        job(make, dims=dims),
        "cpu",
        micro_batch_size=16,
        gradient_accumulation_steps=2,
        memory_format=memory_format,
    )
    measured = measure_step(job(make, dims=dims), settings, steps=1)
    assert predicted.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=0.01
    )


def test_an_input_on_a_gpu_is_converted_there() -> None:
    trace = capture_step(job(), replace(IN_LAST, micro_batch_size=16), find_device("RTX 3090"))
    image_bytes = batch(16)["x"].nbytes
    inputs = [storage.size_bytes for storage in trace.storages if storage.category == "inputs"]
    assert inputs.count(image_bytes) == 2 * trace.captured_steps, "as copied, and as converted"


def test_the_report_compares_formats_in_float64() -> None:
    report = verify(job(), IN_LAST)
    (comparison,) = [each for each in report.comparisons if each.name == "the memory format"]
    assert comparison.holds
    assert not comparison.is_bitwise
    assert 0 < comparison.largest_difference < FLOAT64_ROUNDING


class ReadsMemory(Images):
    """Takes what is in memory for what is in the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided(x.shape, (x[0].numel(), x[0, 0].numel(), x.shape[-1], 1)))


def test_a_model_that_reads_the_order_of_memory_is_not_trained() -> None:
    report = verify(job(ReadsMemory), IN_LAST)
    assert not report.holds
    assert "memory_format='preserve'" in report.way_out
    with pytest.raises(bf.errors.EquivalenceError, match="Nothing was trained"):
        Trainer(job(ReadsMemory), IN_LAST, steps=1, device="cpu", show_progress=False).fit()


def test_random_numbers_are_not_compared() -> None:
    report = verify(job(lambda: Images(dropout=0.5)), IN_LAST)
    (comparison,) = [each for each in report.comparisons if each.name == "the memory format"]
    assert report.holds
    assert "random numbers" in comparison.why_not_compared


def test_tensors_that_share_memory_stay_shared() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(2, 4, 3, 3, 3)
            self.a, self.b = nn.Parameter(whole[0]), nn.Parameter(whole[1])
            self.c = nn.Conv2d(3, 4, 3)

    model = Views()
    a, b = model.a.data_ptr(), model.b.data_ptr()
    applied = apply_memory_format(model, IN_LAST)
    assert (model.a.data_ptr(), model.b.data_ptr()) == (a, b)
    assert model.c.weight.is_contiguous(memory_format=torch.channels_last)
    applied.remove()


@pytest.mark.parametrize("parallelism", [Parallelism.FSDP2, Parallelism.ZERO3])
def test_what_shards_parameters_refuses_channels_last(parallelism: Parallelism) -> None:
    settings = replace(IN_LAST, parallelism=parallelism, world_size=2)
    with pytest.raises(UsageError, match="contiguous"):
        apply_memory_format(Images(), settings)
    with pytest.raises(UsageError, match="contiguous"):
        capture_step(job(), settings, find_device("RTX 3090"))


def test_a_choice_among_formats_does_not_stand_in_the_way_of_fsdp2() -> None:
    found = bf.plan(
        job(), "RTX 3090", global_batch_size=16, world_size=2, parallelism="fsdp2", memory_format="auto"
    )
    assert found.settings.memory_format is CONTIGUOUS


def test_bitsandbytes_would_undo_it() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = Images()
    with pytest.raises(UsageError, match="contiguous before it updates"):
        planned(IN_LAST, model, bitsandbytes.optim.AdamW8bit(model.parameters()))
    assert model.stem.weight.is_contiguous()


def of_rank(memory_format: MemoryFormat | None) -> tuple[list[float], dict[str, Tensor], list[tuple[int, ...]]]:
    """What training among ranks finds on this one, and how the weights lie afterwards."""
    settings = Settings(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        world_size=2,
        memory_format=memory_format,
        optimizer_implementation=OptimizerImplementation.FUSED,
    )
    trainer = Trainer(job(), settings, steps=4, device="cpu", show_progress=False, verify=False)
    losses = list(trainer.fit().losses)
    values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return losses, values, strides(trainer.model.parameters())


@pytest.mark.slow
def test_ranks_under_ddp_train_the_same_in_both() -> None:
    """DDP's buckets take the layout that the parameters have when they are made."""
    own, last = on_ranks(of_rank, CONTIGUOUS), on_ranks(of_rank, LAST)
    for (losses, weights, lay), (found, found_weights, found_lay) in zip(own, last, strict=True):
        assert found == pytest.approx(losses, rel=FLOAT32_ROUNDING)
        assert lay == found_lay
        assert found_weights.keys() == weights.keys()
    assert all(torch.equal(last[0][1][name], last[1][1][name]) for name in last[0][1] if "running" not in name)


# What plans do.


def test_the_faster_format_by_prediction_is_chosen_and_kept(tmp_path: Path) -> None:
    images = job(optimizer="adamw")
    found = bf.plan(images, "RTX 3090", global_batch_size=64, precision="bf16", memory_format="auto")
    times = {
        each: bf.plan(
            images, "RTX 3090", global_batch_size=64, precision="bf16", memory_format=each
        ).predicted_step_seconds
        for each in MemoryFormat
    }
    assert found.settings.memory_format is min(times, key=times.__getitem__)
    assert found.predicted_step_seconds == min(times.values())
    assert found.plain.settings.memory_format is None
    found.save(tmp_path / "plan.json")
    assert bf.Plan.load(tmp_path / "plan.json").settings == found.settings
    estimated = bf.estimate(images, "RTX 3090", micro_batch_size=64, precision="bf16", memory_format="auto")
    one = {
        each: bf.estimate(images, "RTX 3090", micro_batch_size=64, precision="bf16", memory_format=each)
        for each in MemoryFormat
    }
    assert estimated.settings.memory_format is min(one, key=lambda each: one[each].predicted_step_seconds)


def test_a_plan_in_channels_last_says_what_that_changes() -> None:
    found = bf.plan(job(), "RTX 3090", global_batch_size=16, memory_format=torch.channels_last)
    assert found.settings.memory_format is LAST
    assert "channels_last" in found.settings.describe()
    assert any("equal within rounding" in note for note in found.notes)


def test_what_fails_in_both_formats_is_not_held_against_one() -> None:
    """An optimizer of one's own stays on the device, in either format."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                state.setdefault("squares", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.sub_(state["sum"] * state["squares"])

    wide = job(
        lambda: nn.Sequential(Images(), nn.Linear(5, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 5)),
        optimizer=lambda parameters: Own(parameters),
    )
    budget = find_device("RTX 3090").context_bytes + 320 * 2**20
    with pytest.raises(InfeasibleError) as refused:
        bf.plan(wide, "RTX 3090", global_batch_size=16, memory_format="auto", budget=budget)
    assert "stays on the device" in str(refused.value)
    assert "channels_last is not considered" not in str(refused.value)


def test_a_choice_on_a_cpu_says_what_it_does_not_rest_on() -> None:
    found = bf.plan(job(), "cpu", global_batch_size=16, memory_format="auto")
    assert any("timed alike in both memory formats" in note for note in found.notes)
    pinned = bf.plan(job(), "cpu", global_batch_size=16, memory_format="contiguous")
    assert not any("timed alike" in note for note in pinned.notes)


class Viewing(Images):
    """Flattens by `view`, which takes contiguous tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.avg_pool2d(self.norm(self.stem(x)), 4).view(x.shape[0], -1)[:, :16])


def test_a_model_that_views_its_activations_stays_contiguous() -> None:
    found = bf.plan(job(Viewing), "RTX 3090", global_batch_size=16, memory_format="auto")
    assert found.settings.memory_format is CONTIGUOUS
    assert any("channels_last is not considered" in note for note in found.notes)
    with pytest.raises(CaptureError, match="view"):
        bf.plan(job(Viewing), "RTX 3090", global_batch_size=16, memory_format="channels_last")


def test_a_model_without_convolutions_over_images_has_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that cannot matter takes no time."""
    from brimful.capture import cautious

    captured: list[Settings] = []
    real = cautious.capture_step
    monkeypatch.setattr(
        cautious,
        "capture_step",
        lambda job, settings, *args, **kwargs: (
            captured.append(settings) or real(job, settings, *args, **kwargs)
        ),
    )

    def sequences() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 5, 3))

    counts = []
    for memory_format in ("preserve", "auto"):
        captured.clear()
        found = bf.plan(
            bf.Job(
                model=sequences,
                loss=lambda model, x: model(x).square().mean(),
                batch=lambda n: torch.randn(n, 3, 20),
                optimizer="adamw",
            ),
            "RTX 3090",
            global_batch_size=16,
            memory_format=memory_format,
        )
        counts.append(len(captured))
    assert counts[0] == counts[1]
    assert found.settings.memory_format is CONTIGUOUS


def test_a_loop_of_its_own_decides_its_layout() -> None:
    own = job(loop=lambda model, batches: None)
    with pytest.raises(UsageError, match="its own training loop"):
        bf.estimate(own, "cpu", memory_format="channels_last")
