"""Where samples are found in a batch, and what happens where they are not."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.batches import BatchLayout, SampleList, make_batch, make_micro_batch, map_tensors
from brimful.errors import BatchError, UsageError
from brimful.job import Job
from brimful.settings import Settings
from helpers.batches_of_all_kinds import JOBS, WHOLE, images_and_targets

LAYOUT = BatchLayout()


def rows(count: int, width: int = 3) -> Tensor:
    return torch.arange(count * width).reshape(count, width)


FOUND = {
    "two inputs": ([rows(8), rows(8, 5)], 8),
    "a pair of dicts with all samples each": ([{"ids": rows(8)}, {"ids": rows(8, 5)}], 8),
    "three features, a list of them": ({"x": [rows(3), rows(3, 5), rows(3, 2)], "y": rows(3)}, 3),
    "as many boxes as channels": (
        (
            [torch.zeros(3, 8, 8) for _ in range(5)],
            [{"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)} for _ in range(5)],
        ),
        5,
    ),
    "images of different sizes": ({"images": [torch.zeros(3, n + 4, 8) for n in range(5)], "y": rows(5)}, 5),
    "one image with three boxes": (([torch.zeros(3, 8, 8)], [{"boxes": torch.zeros(3, 4)}]), 1),
}


@pytest.mark.parametrize(("batch", "samples"), FOUND.values(), ids=FOUND)
def test_samples_are_found(batch: Any, samples: int) -> None:
    assert LAYOUT.count(batch) == samples
    assert [LAYOUT.count(part) for part in LAYOUT.split(batch, 2)] == [2] * (samples // 2) + [1] * (samples % 2)


def test_a_part_with_as_many_boxes_as_channels_is_counted_by_its_images() -> None:
    batch = [{"image": torch.zeros(3, 8, 8), "boxes": torch.zeros(boxes, 4)} for boxes in (1, 3, 3, 2)]
    assert [LAYOUT.count(part) for part in LAYOUT.split(batch, 2)] == [2, 2]
    assert [LAYOUT.count(part) for part in LAYOUT.split(batch, 1)] == [1, 1, 1, 1]


def test_names_beside_the_targets_go_with_their_samples() -> None:
    images, targets = images_and_targets(range(3))
    first, second = LAYOUT.split({"images": images, "targets": targets, "files": ["a", "b", "c"]}, 2)
    assert (first["files"], second["files"]) == (["a", "b"], ["c"])
    _images, _targets, numbers = LAYOUT.split((images, targets, (7, 8, 9)), 2)[0]
    assert numbers == (7, 8)


def test_a_dimension_that_is_named_overrules_lists() -> None:
    batch = {"pair": [{"x": rows(2)}, {"x": rows(2)}], "y": rows(2)}
    (first, _) = BatchLayout(batch_dim=0).split(batch, 1)
    assert first["pair"][1]["x"].shape == (1, 3)


def test_a_part_in_another_dimension_is_contiguous_and_a_copy() -> None:
    layout = BatchLayout(batch_dim=1)
    batch = {"x": torch.zeros(5, 4, 2), "lengths": torch.arange(4)}
    (first, second) = layout.split(batch, 2)
    assert first["x"].shape == (5, 2, 2)
    assert first["x"].is_contiguous()
    assert second["lengths"].tolist() == [2, 3]
    assert layout.copies(batch)
    assert layout.resize(batch, 6)["lengths"].tolist() == [0, 1, 2, 3, 0, 1]


def test_a_batch_that_cannot_be_split_is_estimated_measured_and_trained_on() -> None:
    estimate = bf.estimate(WHOLE, "cpu", micro_batch_size=4)
    measured = bf.measure(WHOLE, Settings(micro_batch_size=4), "cpu")
    assert estimate.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=0.02
    )
    model = WHOLE.model()
    step = bf.apply(Settings(micro_batch_size=4), WHOLE, model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = WHOLE.batch(4)
    assert step(batch).loss > step(batch).loss


def test_a_real_batch_that_cannot_be_split_counts_as_one_sample() -> None:
    job = Job(model=WHOLE.model, loss=WHOLE.loss, batch=WHOLE.batch(4), name="whole")
    bf.estimate(job, "cpu")
    with pytest.raises(BatchError, match=r"a batch of 2 samples cannot be made.*counts as one sample"):
        bf.estimate(job, "cpu", micro_batch_size=2)


def test_a_loop_gets_a_batch_that_cannot_be_split() -> None:
    def loop(model: nn.Module, batches: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches:
            WHOLE.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8192), nn.Linear(8192, 1))

    job = Job(model=wide, loss=WHOLE.loss, loop=loop, batch=WHOLE.batch)
    estimate = bf.estimate(job, "cpu", micro_batch_size=4)
    measured = bf.measure(job, Settings(micro_batch_size=4), "cpu")
    assert estimate.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=0.02
    )


def test_a_plan_does_not_split_a_batch_that_cannot_be_split_and_says_so() -> None:
    plan = bf.plan(WHOLE, "RTX 3090", global_batch_size=8)
    assert plan.settings.gradient_accumulation_steps == 1
    (note,) = [note for note in plan.notes if note.startswith("Smaller micro-batches were not considered")]
    assert 'batch["weights"] has shape (1, 1)' in note
    assert "Job(split=…, collate=…)" in note
    (gpu,) = bf.gpus(WHOLE, global_batch_size=8, devices=["RTX 3090"])
    assert gpu.settings is not None
    assert gpu.settings.gradient_accumulation_steps == 1


@pytest.mark.parametrize("asked", [{"micro_batch_size": 2}, {"world_size": 2}], ids=str)
def test_a_plan_that_would_have_to_split_it_is_refused_with_the_shapes(asked: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"has shape \(24, 6\).*Job\(split=…, collate=…\)"):
        bf.plan(WHOLE, "RTX 3090", global_batch_size=8, **asked)  # type: ignore[arg-type]


def test_a_batch_of_a_training_loop_that_would_have_to_be_split_is_refused() -> None:
    model = WHOLE.model()
    settings = Settings(micro_batch_size=2, gradient_accumulation_steps=2)
    step = bf.apply(settings, WHOLE, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BatchError, match=r'batch\["x"\] has shape \(12, 6\)'):
        step(WHOLE.batch(4))


def test_time_first_without_a_word_is_refused_with_the_word() -> None:
    time_first = JOBS["time first"]
    job = Job(
        model=time_first.model,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=lambda n: {"x": torch.zeros(7, n, 6), "y": torch.zeros(7, n)},
    )
    with pytest.raises(BatchError, match=r"returned 7 samples.*pass Job\(batch_dim=1\)"):
        make_batch(job, 2)


def test_a_split_that_returns_no_list_is_refused() -> None:
    job = Job(
        model=WHOLE.model,
        loss=WHOLE.loss,
        batch=WHOLE.batch,
        split=lambda batch: batch,
        collate=lambda each: each,
    )
    with pytest.raises(BatchError, match=r"Job\(split=…\) returned an object of type dict"):
        make_batch(job, 2)


def test_texts_are_samples_that_split_and_collate_are_lists_of() -> None:
    def loss(model: nn.Module, texts: list[str]) -> Tensor:
        codes = torch.tensor([[ord(letter) for letter in text] for text in texts]) / 128
        return model(codes).square().mean()

    texts = ["horses", "houses", "hooves", "hourly"]
    parts: dict[str, Any] = {"model": WHOLE.model, "loss": loss, "batch": lambda n: (texts * n)[:n]}
    with pytest.raises(BatchError, match=r"no tensor with samples.*Job\(split=list, collate=list\)"):
        bf.estimate(Job(**parts), "cpu")
    job = Job(**parts, split=list, collate=list)
    plan = bf.plan(job, "cpu", global_batch_size=4, micro_batch_size=2)
    assert bf.verify(job, plan).holds


def test_a_sparse_tensor_is_refused_however_the_batch_is_split() -> None:
    batch = {"x": torch.eye(4).to_sparse()}
    for changes in ({}, {"batch_dim": 0}, {"split": list, "collate": list}):
        job = Job(model=WHOLE.model, loss=WHOLE.loss, batch=lambda n: batch, **changes)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match="is a sparse tensor"):
            make_batch(job, 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "split alone": ({"split": list}, "has `split` and not `collate`"),
    "collate alone": ({"collate": list}, "has `collate` and not `split`"),
    "both ways": ({"split": list, "collate": list, "batch_dim": 1}, "both `batch_dim` and `split`"),
    "a dimension from the end": ({"batch_dim": -1}, "it must be at least 0"),
    "no number": ({"batch_dim": "1"}, ", of type str"),
    "a truth value": ({"batch_dim": True}, ", of type bool"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_a_job_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Job(model=WHOLE.model, loss=WHOLE.loss, batch=WHOLE.batch, **changes)


@dataclasses.dataclass
class MakesRows:
    width: int

    def __call__(self, samples: int) -> Tensor:
        return torch.randn(samples, self.width)


def test_a_callable_dataclass_makes_batches_and_is_none() -> None:
    job = bf.Job(model=lambda: nn.Linear(3, 1), loss=lambda model, x: model(x).mean(), batch=MakesRows(3))
    assert make_batch(job, 5).shape == (5, 3)


def test_a_function_that_takes_no_number_of_samples_is_refused() -> None:
    job = bf.Job(model=lambda: nn.Linear(3, 1), loss=lambda model, x: model(x).mean(), batch=lambda: 5)
    with pytest.raises(BatchError, match="called with the number of samples"):
        bf.plan(job, "RTX 3090", global_batch_size=8)


def test_lists_of_samples_are_lists_of_samples_after_their_tensors_are_moved() -> None:
    images = SampleList(torch.zeros(3, size, size) for size in (2, 3, 4))
    moved = map_tensors({"images": images, "labels": torch.zeros(3)}, Tensor.clone)
    assert isinstance(moved["images"], SampleList)


def test_the_micro_batch_of_samples_with_sizes_of_their_own_is_the_largest() -> None:
    def texts(n: int) -> dict[str, Any]:
        return {"texts": [torch.zeros(8 + 8 * (index == 5)) for index in range(n)]}

    job = Job(model=lambda: nn.Linear(1, 1), loss=lambda model, batch: torch.zeros(()), batch=texts)
    part = make_micro_batch(job, 2, 8)
    assert [len(text) for text in part["texts"]] == [8, 16]
    even = dataclasses.replace(job, batch=lambda n: rows(n))
    assert torch.equal(make_micro_batch(even, 2, 8), rows(2))


def test_samples_that_happen_to_agree_in_their_sizes_are_found_by_how_many_there_are() -> None:
    batch = {"texts": [torch.zeros(16) for _ in range(4)]}
    assert BatchLayout(expected=4).count(batch) == 4
    assert BatchLayout(expected=16).count(batch) == 16
    assert [len(part["texts"]) for part in BatchLayout(expected=4).split(batch, 2)] == [2, 2]
    job = Job(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: torch.zeros(()),
        batch=lambda n: {"texts": [torch.zeros(16) for _ in range(n)]},
    )
    assert make_micro_batch(job, 2, 8)["texts"][1].shape == (16,)
    assert make_micro_batch(job, 1, 8)["texts"][0].shape == (16,)


def test_several_inputs_stay_so_in_a_last_batch_with_few_samples() -> None:
    """Of 8 inputs with 5 rows each, where batches of 8 are expected."""
    inputs = {"x": [rows(5) for _ in range(8)]}
    assert BatchLayout(expected=8).count(inputs) == 5
