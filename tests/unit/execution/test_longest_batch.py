"""Which batch of a job is predicted where batches differ in length, and what reading them leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from brimful.batches import BatchLayout, make_batch, sample_sizes
from brimful.execution import longest_data
from brimful.execution.length_watch import InputWatch, LengthWatch
from brimful.execution.longest_batch import with_longest_batch
from brimful.execution.longest_data import longest_of_data
from brimful.job import Data, Job
from brimful.results import SampleSize, describe_growth

LAYOUT = BatchLayout()


def job(batch: Any, **fields: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(4, 4), loss=lambda model, batch: model(batch).mean(), batch=batch, **fields
    )


def texts(samples: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(samples, length), "y": torch.zeros(samples)}


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def test_batches_of_one_shape_leave_the_job_as_it_is() -> None:
    given = job(lambda n: texts(n, 8), data=lambda: Data(train=texts(100, 8)))
    found = with_longest_batch(given, 16)
    assert found.job is given
    assert not found.notes
    assert found.sizes[0] == SampleSize(name='batch["x"]', shape=(None, 8), elements=8)


def test_the_longest_draw_is_cut_for_smaller_micro_batches_and_the_same_each_time() -> None:
    given = job(lambda n: texts(n, int(torch.randint(5, 500, (n,)).max())))
    state = torch.get_rng_state()
    first, second = (with_longest_batch(given, 32) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first.sizes == second.sizes
    longest = make_batch(first.job, 32)["x"].shape[1]
    assert make_batch(first.job, 4)["x"].shape == (4, longest)
    assert f"to {longest} in" in first.notes[0]


def test_data_are_read_for_the_longest_but_for_an_iterator() -> None:
    """A run may read the same data now, and an iterator gives each sample once."""
    lengths = [4, 9, 6]
    given = job(texts(2, 5), data=Data(train=[texts(2, length) for length in lengths]))
    assert make_batch(with_longest_batch(given, 2).job, 2)["x"].shape == (2, 9)
    stream = iter([texts(2, length) for length in lengths])
    once = job(texts(2, 5), data=Data(train=stream))
    assert with_longest_batch(once, 2).job is once
    assert len(list(stream)) == len(lengths)


def test_an_error_of_the_jobs_own_batch_is_left_to_the_step() -> None:
    def batch(_n: int) -> Tensor:
        raise RuntimeError("not here")

    assert with_longest_batch(given := job(batch), 4).job is given


def test_data_that_cannot_be_read_are_noted() -> None:
    def data() -> Data:
        raise FileNotFoundError("no such folder")

    (note,) = with_longest_batch(job(lambda n: texts(n, 8), data=data), 4).notes
    assert "no such folder" in note


class OneShot:
    """Iterates over what it was given, which is then used up."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._left = iter(batches)

    def __iter__(self) -> Iterator[Tensor]:
        return self._left


class PassedOn(OneShot):
    """Iterates anew each time, over what the last time has left."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from self._left


@pytest.mark.parametrize("used_up", [iter, lambda batches: map(abs, batches), OneShot, PassedOn])
def test_what_is_used_up_by_reading_is_not_read(used_up: Callable[[list[Tensor]], Any]) -> None:
    batches = used_up([torch.zeros(2, 3), torch.zeros(2, 4)])
    assert longest_of_data(batches, 2, LAYOUT) is None
    assert len(list(batches)) == 2


def test_long_samples_behind_many_alike_are_found_and_few_of_many_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = [torch.zeros(3)] * 500 + [torch.zeros(9)]
    read = longest_of_data(DataLoader(samples, batch_size=4, collate_fn=pad), 4, LAYOUT)
    assert read is not None
    assert read.batch.shape == (4, 9)
    assert read.extent == "all 501 samples"
    monkeypatch.setattr(longest_data, "MOST_READ", 50)
    read = longest_of_data(DataLoader(samples, batch_size=4, collate_fn=pad), 4, LAYOUT)
    assert read is not None
    assert read.extent == "50 of 501 samples"


def test_slow_samples_that_are_alike_are_not_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_data, "ALIKE_SECONDS", 0.0)
    asked = []

    class Images(Dataset):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> Tensor:
            asked.append(index)
            return torch.zeros(3, 4, 4)

    read = longest_of_data(DataLoader(Images(), batch_size=8), 8, LAYOUT)
    assert read is not None
    assert len(asked) < 100
    assert describe_growth(read.low, read.high) is None


def test_a_stream_a_sampler_of_batches_and_a_loader_without_batches_are_read() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.zeros(3), torch.zeros(7), torch.zeros(2)])

    loaders = (
        DataLoader(Stream(), batch_size=2, collate_fn=pad),
        DataLoader([torch.zeros(3), torch.zeros(7)], batch_sampler=[[0], [1]], collate_fn=pad),
        DataLoader([torch.zeros(2, 3), torch.zeros(2, 7)], batch_size=None),
    )
    for loader in loaders:
        read = longest_of_data(loader, 2, LAYOUT)
        assert read is not None
        assert read.batch.shape[1] == 7


def test_the_largest_lists_of_one_batch_are_taken() -> None:
    targets = [{"boxes": torch.zeros(count, 4)} for count in (1, 5, 2, 4)]
    read = longest_of_data({"image": torch.zeros(4, 3, 2, 2), "targets": targets}, 2, LAYOUT)
    assert read is not None
    assert [len(target["boxes"]) for target in read.batch["targets"]] == [5, 4]


def test_sizes_of_lists_and_of_batches_without_samples_are_means() -> None:
    lists = {"image": torch.zeros(2, 3), "targets": [{"boxes": torch.zeros(n, 4)} for n in (1, 2)]}
    sizes = {size.name: size for size in sample_sizes(lists, LAYOUT)}
    assert sizes['batch["targets"][…]["boxes"]'].elements == 6
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert sample_sizes(packed, BatchLayout(whole=2))[0].elements == 2.5


def test_a_larger_batch_is_told_once_with_both_numbers() -> None:
    watch = LengthWatch(sample_sizes(texts(8, 16), LAYOUT), LAYOUT)
    assert watch.larger(texts(4, 16)) is None
    assert watch.larger(texts(8, 3) | {"more": torch.zeros(8, 99)}) is None
    told = watch.larger(texts(2, 40))
    assert told is not None
    assert 'dimension 1 of batch["x"] is 40, planned 16' in told
    assert watch.larger(texts(2, 50)) is None


def test_inputs_of_a_model_are_compared_by_name_else_by_dimensions_and_only_in_training() -> None:
    planned = sample_sizes({"source": torch.zeros(4, 32), "target": torch.zeros(4, 8)}, LAYOUT)
    model = nn.Identity()
    with pytest.warns(UserWarning, match=r'dimension 1 of batch\["target"\] is 9, planned 8'):
        InputWatch(planned).before_forward(model, (), {"target": torch.zeros(2, 9)})
    watch = InputWatch(planned)
    watch.before_forward(model.eval(), (torch.zeros(2, 99),), {})
    watch.before_forward(model.train(), (torch.zeros(2, 32), torch.zeros(2, 99, 4)), {})
    with pytest.warns(UserWarning, match="is 33, planned 32"):
        watch.before_forward(model, (torch.zeros(2, 33),), {})


def test_a_loader_of_tensors_keeps_its_order() -> None:
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(torch.zeros(20, 3)), batch_size=4, shuffle=True, generator=own)
    before = own.get_state()
    assert longest_of_data(loader, 4, LAYOUT) is not None
    assert torch.equal(before, own.get_state())
