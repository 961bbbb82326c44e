"""Sizes that a model's choices decide: experts together take rows × k, evenly, and at most, and at least."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.trace import Guess, Trace
from helpers.captured_jobs import CPU

SAMPLES, TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 8, 32, 32, 128, 8, 2
ROWS = SAMPLES * TOKENS


class Experts(nn.Module):
    """A mixture of experts; `gather` is how an expert's rows are found and given back."""

    def __init__(self, gather: Callable[[Experts, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, indices = self.router(rows).softmax(-1).topk(CHOSEN)
        return (rows + self.gather(self, rows, weights, indices)).view_as(x)


def by_where(module: Experts, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for number, expert in enumerate(module.experts):
        row, place = torch.where(indices == number)
        if row.numel():
            out = out.index_add(0, row, expert(rows[row]) * weights[row, place, None])
    return out


def by_one_hot(module: Experts, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """As Transformers' eager experts do."""
    out = torch.zeros_like(rows)
    with torch.no_grad():
        mask = F.one_hot(indices, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        place, row = torch.where(mask[number[0]])
        out.index_add_(0, row, module.experts[number[0]](rows[row]) * weights[row, place, None])
    return out


def by_mask(module: Experts, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """The best expert alone, by boolean indexing."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(module.experts):
        mask = indices[:, 0] == number
        out = out.index_add(0, mask.nonzero()[:, 0], expert(rows[mask]) * weights[:, 0][mask][:, None])
    return out


def by_sorting(module: Experts, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Rows sorted by expert, and split into as many as each has."""
    order = indices.flatten().argsort()
    counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
    sorted_rows = rows[order // CHOSEN]
    parts = [expert(part) for expert, part in zip(module.experts, sorted_rows.split(counts), strict=True)]
    weighted = torch.cat(parts) * weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add(0, order // CHOSEN, weighted)


WAYS = {"where": by_where, "one hot": by_one_hot, "mask": by_mask, "sorting": by_sorting}


def model_of(gather: Callable[[Experts, Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Experts(gather), Experts(gather), nn.Linear(WIDTH, 4))


def job(way: str) -> bf.Job:
    return bf.Job(
        model=lambda: model_of(WAYS[way]),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=lambda n: {"x": torch.randn(n, TOKENS, WIDTH)},
        optimizer="sgd",
        name=f"experts by {way}",
    )


def captured(the_job: bf.Job, guess: Guess = Guess.EXPECTED, samples: int = SAMPLES) -> Trace:
    return capture_step(the_job, bf.Settings(micro_batch_size=samples), CPU, guess=guess)


def rows_of_experts(trace: Trace) -> list[int]:
    """Rows of the first layer of each expert in the first mixture, where any came."""
    return [
        op.written_bytes // (4 * HIDDEN)
        for op in trace.ops
        if op.step == 0
        and op.phase == "forward"
        and op.name == "aten.addmm.default"
        and op.module.startswith("0.experts.")
        and op.module.endswith(".0")
    ]


@pytest.mark.parametrize("way", WAYS)
def test_all_experts_together_take_as_many_rows_as_choose_them(way: str) -> None:
    together = ROWS * (1 if way == "mask" else CHOSEN)
    even = rows_of_experts(captured(job(way)))
    assert even == [together // EXPERTS] * EXPERTS
    uneven = rows_of_experts(captured(job(way), Guess.MOST))
    assert sum(uneven) <= together
    assert max(uneven) > ROWS - EXPERTS
    fewest = [rows for rows in rows_of_experts(captured(job(way), Guess.LEAST)) if rows]
    assert fewest == [ROWS] * (together // ROWS)


@pytest.mark.parametrize("way", WAYS)
def test_a_real_step_lies_within_the_interval_and_near_what_is_expected(way: str) -> None:
    found = bf.estimate(job(way), "cpu", micro_batch_size=SAMPLES)
    low, high = found.predicted_device_interval_bytes
    for seed in range(2):
        settings = bf.Settings(micro_batch_size=SAMPLES)
        measured = measure_step(job(way), settings, steps=1, seed=seed).measured_peak_allocated_bytes
        assert low <= measured <= high
        assert found.predicted_peak_allocated_bytes == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("way", WAYS)
def with_choices_of_the_batch(way: str, choose: Callable[[int], Tensor]) -> bf.Job:
    """A job whose experts are chosen by the batch, so that its capture knows the choices."""

    class Chosen(Experts):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            scores, _ = self.router(rows).softmax(-1).topk(CHOSEN)
            return (rows + self.gather(self, rows, scores, self.indices)).view_as(x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        model[0].indices = model[1].indices = batch["indices"].flatten(0, 1)
        return model(batch["x"]).square().mean()

    return replace(
        job(way),
        model=lambda: nn.Sequential(Chosen(WAYS[way]), Chosen(WAYS[way]), nn.Linear(WIDTH, 4)),
        loss=loss,
        batch=lambda n: {
            "x": torch.randn(n, TOKENS, WIDTH),
            "indices": choose(n * TOKENS).view(n, TOKENS, CHOSEN),
        },
    )


def unevenly(concentration: float) -> Callable[[int], Tensor]:
    def choose(rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(100 * concentration))
        popularity = torch.rand(EXPERTS, generator=generator) ** (1 / concentration) + 1e-6
        return torch.multinomial(popularity.expand(rows, EXPERTS), CHOSEN, generator=generator)

    return choose


@pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
@pytest.mark.parametrize("way", ["where", "one hot"])
def test_any_choice_needs_no_less_and_takes_no_more_than_the_interval(way: str, device: str) -> None:
    low, high = bf.estimate(job(way), device, micro_batch_size=SAMPLES).predicted_device_interval_bytes
    for concentration in (0.02, 0.2, 1.0, 5.0):
        known = bf.estimate(
            with_choices_of_the_batch(way, unevenly(concentration)), device, micro_batch_size=SAMPLES
        )
        assert low <= known.predicted_device_interval_bytes[0]
        assert known.predicted_peak_device_bytes <= high
        assert not known.uncertain_ops


def test_the_least_needed_is_what_is_allocated_as_other_sizes_may_leave_smaller_gaps() -> None:
    gpu = find_device("RTX 3090")
    found = bf.estimate(job("where"), gpu, micro_batch_size=SAMPLES)
    low, _ = found.predicted_device_interval_bytes
    assert found.smallest_surviving_capacity_bytes is not None
    assert low - gpu.context_low_bytes <= found.predicted_peak_allocated_bytes
    assert found.predicted_peak_allocated_bytes < found.smallest_surviving_capacity_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
@pytest.mark.parametrize("way", WAYS)
def test_a_plan_predicts_even_choices_or_the_most_uneven_whichever_take_more(way: str, device: str) -> None:
    plan = bf.plan(job(way), device, global_batch_size=SAMPLES, micro_batch_size=SAMPLES, recompute="none")
    settings = plan.plain.settings
    larger = max(
        predict_memory(capture_step(job(way), settings, find_device(device), guess=guess)).peak_reserved_bytes
        for guess in (Guess.EXPECTED, Guess.MOST)
    )
    assert plan.plain.predicted_peak_reserved_bytes == larger
    assert any("an even or the most uneven selection" in note for note in plan.notes)


def test_what_is_assumed_of_all_choices_is_one_note() -> None:
    (note,) = captured(job("where")).uncertain_ops
    assert note == (
        "sizes that depend on choices (first aten.topk.default in '0'), assumed to spread evenly over the "
        "options"
    )


def test_the_work_is_that_of_the_rows_that_there_are() -> None:
    def by_all(module: Experts, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        return sum((expert(rows) for expert in module.experts), torch.zeros_like(rows))

    dense = replace(job("where"), model=lambda: model_of(by_all))
    few, all_rows = (sum(op.flops for op in captured(each).ops) for each in (job("where"), dense))
    assert few == pytest.approx(all_rows * CHOSEN / EXPERTS, rel=0.1)


def test_a_choice_that_decides_no_size_leaves_a_step_as_certain_as_it_was() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"])
        _accuracy = (scores.argmax(-1) == 1).float().mean()
        return scores.topk(2).values.mean()

    trace = captured(replace(job("where"), model=lambda: nn.Linear(WIDTH, 4), loss=loss))
    assert not trace.sizes_are_guessed
    assert not trace.sizes_depend_on_values
    assert trace.uncertain_ops == ()


def test_whether_a_choice_is_the_true_class_is_not_known() -> None:
    """An even choice is right by accident; all might be."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"])
        right = scores.argmax(-1) == batch["y"]
        return scores[right].square().sum() + scores.mean()

    labelled = replace(
        job("where"),
        model=lambda: nn.Linear(WIDTH, 4),
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.zeros(n, dtype=torch.int64)},
    )
    (note,) = captured(labelled, samples=64).uncertain_ops
    assert note.endswith("assumed at its largest possible size")


@pytest.mark.parametrize("guess", Guess)
def test_a_mask_of_many_tokens_for_many_experts_selects_as_many_as_choose_each(guess: Guess) -> None:
    tokens, experts, chosen = 2**16, 64, 8

    class Counted:  # what a closure holds is put back after a capture, what a class holds is not
        found: list[int] = []  # noqa: RUF012

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        scores = model(batch)
        mask = F.one_hot(scores.topk(chosen).indices, experts).permute(2, 1, 0)
        assert mask.numel() == 2**25
        Counted.found.extend(len(torch.where(mask[expert])[0]) for expert in (0, experts - 1))
        return scores.mean()

    one_hot = replace(
        job("where"), model=lambda: nn.Linear(1, experts), loss=loss, batch=lambda n: torch.randn(n, 1)
    )
    captured(one_hot, guess, samples=tokens)
    few = {Guess.EXPECTED: tokens * chosen // experts, Guess.MOST: 1, Guess.LEAST: 0}[guess]
    most = {Guess.EXPECTED: few, Guess.MOST: tokens - experts // chosen + 1, Guess.LEAST: tokens}[guess]
    assert Counted.found[:2] == [most, few]


@pytest.mark.parametrize("guess", Guess)
def test_draws_with_replacement_are_of_the_classes_that_there_are(guess: Guess) -> None:
    class Counted:
        found: list[list[int]] = []  # noqa: RUF012

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).softmax(-1)
        drawn = torch.multinomial(scores, 3 * EXPERTS, replacement=True)
        Counted.found.append(torch.bincount(drawn.flatten(), minlength=EXPERTS).tolist())
        return scores.mean()

    drawing = replace(
        job("where"),
        model=lambda: nn.Linear(WIDTH, EXPERTS),
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, WIDTH)},
    )
    captured(drawing, guess)
    assert len(Counted.found[0]) == EXPERTS
    assert sum(Counted.found[0]) == SAMPLES * 3 * EXPERTS


@pytest.mark.parametrize("threshold", [-1e9, 0.5, 1e9], ids=["all", "some", "none"])
def test_a_mask_that_the_model_computes_may_select_all_or_nothing(threshold: float) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"])
        return scores[scores > threshold].square().sum() + scores.mean()

    masked = replace(job("where"), model=lambda: nn.Linear(WIDTH, 64), loss=loss)
    low, high = bf.estimate(masked, "cpu", micro_batch_size=SAMPLES).predicted_device_interval_bytes
    settings = bf.Settings(micro_batch_size=SAMPLES)
    assert low < high
    assert low <= measure_step(masked, settings, steps=1).measured_peak_allocated_bytes <= high


def test_code_that_cannot_run_without_rows_still_has_a_lower_bound() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"])
        picked = scores[scores > 0.5]
        assert picked.numel()
        return picked.square().mean()

    masked = replace(job("where"), model=lambda: nn.Linear(WIDTH, 256), loss=loss)
    found = bf.estimate(masked, "RTX 3090", micro_batch_size=64)
    low, high = found.predicted_device_interval_bytes
    assert 0 < low < found.predicted_peak_device_bytes < high


@pytest.mark.slow
def test_the_largest_micro_batch_fits_with_the_most_that_may_be_chosen() -> None:
    found = bf.estimate(job("where"), "cpu", micro_batch_size="largest", budget="8MiB")
    most = predict_memory(captured(job("where"), Guess.MOST, found.settings.micro_batch_size))
    assert found.predicted_device_interval_bytes[1] == most.peak_reserved_bytes <= found.capacity_bytes


def test_a_trace_with_guessed_sizes_can_be_saved() -> None:
    trace = captured(job("where"), Guess.MOST)
    assert trace.sizes_are_guessed
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace
