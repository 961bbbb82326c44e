import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from brimful.batches import BatchLayout
from brimful.errors import BatchError, UsageError
from brimful.job import Data, Job
from brimful.trainer.data.batches import (
    Batches,
    _samplers,
    check_validation,
    find_data,
    is_one_batch,
    refuse_single_samples,
    validation_batches,
)

pytestmark = pytest.mark.filterwarnings("ignore:the training data give batches")  # told in tests of their own


@dataclass
class Pair:
    x: torch.Tensor


X = torch.arange(10)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    batches = Batches({"x": X, "scale": torch.tensor(2.0)}, global_batch_size=4, seed=5)
    epochs = [[batch["x"] for batch in batches.epoch(epoch)] for epoch in (1, 2, 1)]
    assert batches.steps_per_epoch == 3
    assert [len(part) for part in epochs[0]] == [4, 4, 2]
    for parts in epochs:
        assert torch.cat(parts).sort().values.tolist() == X.tolist()
    first, second, again = (torch.cat(parts).tolist() for parts in epochs)
    assert first == again
    assert first != second


def test_the_order_does_not_hang_on_the_global_generator_nor_repeat_in_a_neighbouring_seed():
    def order(seed, epoch):
        return torch.cat(list(Batches(X, global_batch_size=3, seed=seed).epoch(epoch))).tolist()

    torch.manual_seed(1)
    first = order(0, 2)
    torch.manual_seed(2)
    assert order(0, 2) == first
    assert order(1, 1) != first


def test_fewer_samples_than_a_global_batch_make_one_smaller_batch():
    (batch,) = Batches(X, global_batch_size=64, seed=0).epoch(1)
    assert BatchLayout().count(batch) == 10


@pytest.mark.parametrize(
    ("data", "one"),
    [
        (X, True),
        ({"x": X}, True),
        ((X, X), True),
        (Pair(X), True),
        ([X, X], True),
        ([X, {"mask": X}], True),
        ([{"x": X}, {"x": X}], False),
        ([[X, X], [X, X]], False),
        (iter([X]), False),
        (DataLoader(TensorDataset(X)), False),
    ],
)
def test_what_is_one_batch_and_what_is_many(data, one):
    assert is_one_batch(data) is one


def test_a_data_loader_gives_its_own_batches_and_their_number():
    loader = DataLoader(TensorDataset(X), batch_size=4)
    batches = Batches(loader, global_batch_size=64, seed=0)
    assert batches.steps_per_epoch == 3
    assert [BatchLayout().count(batch) for batch in batches.epoch(1)] == [4, 4, 2]


def test_an_iterable_that_does_not_say_its_length_has_unknown_steps():
    assert Batches(iter([X]), global_batch_size=4, seed=0).steps_per_epoch is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter([X])


@pytest.mark.parametrize("dataset", [TensorDataset(X), Stream()])
def test_a_dataset_of_single_samples_is_refused_with_the_way_to_batch_it(dataset):
    for check in (
        lambda: Batches(dataset, global_batch_size=4, seed=0),
        lambda: check_validation(dataset, BatchLayout()),
    ):
        with pytest.raises(UsageError, match="DataLoader"):
            check()


def test_a_list_of_single_samples_is_refused_with_the_way_to_batch_it():
    samples = [{"x": torch.zeros(3), "y": torch.tensor(1)} for _ in range(4)]
    job = Job(
        model=torch.nn.Linear(3, 2),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.zeros(n, 3), "y": torch.zeros(n, dtype=torch.long)},
    )

    def batches_of(train, validation=None, size=2):
        batches = Batches(train, global_batch_size=4, seed=0)
        refuse_single_samples(job, Data(train=train, validation=validation), batches, size)
        return list(batches.epoch(1))

    told = r'batch\["x"\] is of shape \(3,\), and job.batch gives \(2, 3\).*DataLoader'
    for single in (samples, iter(samples), DataLoader(samples, batch_size=None)):
        with pytest.raises(UsageError, match=told):
            batches_of(single)
    with pytest.raises(UsageError, match=r"Data\(validation=…\) gives single samples"):
        batches_of(job.batch(4), validation=samples)
    assert len(batches_of([job.batch(4), job.batch(4)], validation=[job.batch(4)])) == 2
    assert len(batches_of(DataLoader(samples, batch_size=4))) == 1


def test_a_job_that_makes_no_batch_of_that_size_is_trained_all_the_same():
    job = Job(
        model=torch.nn.Linear(3, 2),
        loss=lambda model, batch: batch["x"].sum(),
        batch=lambda n: {"x": X[: n // 2]},
    )
    train = [{"x": X}, {"x": X}]
    batches = Batches(train, global_batch_size=10, seed=0)
    refuse_single_samples(job, Data(train=train), batches, 1)
    assert len(list(batches.epoch(1))) == 2


@pytest.mark.parametrize(("data", "error"), [(3, UsageError), (X[:0], UsageError), ((X, X[:3]), BatchError)])
def test_data_without_batches_or_samples_are_refused(data, error):
    with pytest.raises(error):
        Batches(data, global_batch_size=4, seed=0)
    with pytest.raises(error):
        check_validation(data, BatchLayout())


def test_validation_keeps_the_order_and_splits_every_batch():
    one = [part for part, _counts in validation_batches({"x": X}, 4, BatchLayout())]
    assert [part["x"].tolist() for part in one] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    many = [part for part, _counts in validation_batches([{"x": X[:5]}, {"x": X[5:]}], 4, BatchLayout())]
    assert [part["x"].tolist() for part in many] == [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9]]


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_what_an_epoch_decides_is_told_the_epoch():
    class Sampler(Told):
        def __iter__(self):
            yield [self.epochs[-1]]

    class Samples(Told):
        def __getitem__(self, index):
            return X[index]

    class Iterable(Told):
        def __iter__(self):
            return iter([X])

    sampler, dataset, iterable = Sampler(), Samples(), Iterable()
    loader = DataLoader(dataset, batch_sampler=sampler)
    batches = Batches(loader, global_batch_size=1, seed=0)
    assert [next(iter(batches.epoch(epoch))).tolist() for epoch in (3, 7)] == [[3], [7]]
    next(Batches(iterable, global_batch_size=1, seed=0).epoch(2))
    assert (sampler.epochs, dataset.epochs, iterable.epochs) == ([3, 7], [3, 7], [2])


DATASET = TensorDataset(X)


def by_sampler(ranks):
    return DataLoader(DATASET, sampler=DistributedSampler(DATASET, num_replicas=ranks, rank=0))


def by_batch_sampler(ranks):
    sampler = DistributedSampler(DATASET, num_replicas=ranks, rank=0)
    return DataLoader(DATASET, batch_sampler=BatchSampler(sampler, 2, drop_last=False))


def by_accelerate(ranks):
    whole = BatchSampler(SequentialSampler(DATASET), 2, drop_last=False)
    return DataLoader(DATASET, batch_sampler=BatchSamplerShard(whole, num_processes=ranks, process_index=0))


@pytest.mark.parametrize("loader", [by_sampler, by_batch_sampler, by_accelerate])
def test_a_sampler_that_divides_the_samples_among_ranks_is_refused(loader):
    """brimful divides each global batch itself: after both, each rank would have a quarter of two halves."""
    with pytest.raises(UsageError, match=r"one of 2 parts .*whole global batch"):
        Batches(loader(2), global_batch_size=1, seed=0)
    Batches(loader(1), global_batch_size=1, seed=0)


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("by", [by_sampler, by_batch_sampler])
def test_the_batches_of_a_distributed_sampler_are_those_of_all_ranks_together(by, epoch):
    """Each rank of a run reads the global batch, and computes its share."""
    dataset = TensorDataset(torch.arange(12.0))

    def of(rank):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=5)
        if by is by_sampler:
            return DataLoader(dataset, batch_size=3, sampler=sampler)
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 3, drop_last=False))

    def read(loader):
        (set_epoch,) = {s.set_epoch for s in _samplers(loader) if hasattr(s, "set_epoch")}
        set_epoch(epoch)
        return [set(values.tolist()) for (values,) in loader]

    job = Job(model=nn.Linear(1, 1), loss=lambda model, batch: model(batch), batch=lambda samples: X)
    found = find_data(job, Data(train=of(1)))
    assert read(found.train) == [a | b for a, b in zip(read(of(0)), read(of(1)), strict=True)]
    Batches(found.train, global_batch_size=6, seed=0)


def test_a_sampler_inside_a_batch_sampler_is_told_the_epoch_once():
    class Told(SequentialSampler):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    sampler = Told(DATASET)
    for loader in (
        DataLoader(DATASET, batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
        DataLoader(DATASET, sampler=sampler),
    ):
        Told.epochs.clear()
        batches = Batches(loader, global_batch_size=2, seed=0)
        for epoch in (1, 2):
            next(iter(batches.epoch(epoch)))
        assert Told.epochs == [1, 2]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([4, 4, 2], None),
        ([2], None),
        ([2, 2, 1], "2 samples"),
        ([8, 8], "8 samples"),
        ([4, 2, 4], None),
        ([3] * 9, "3 samples"),
    ],
)
def test_batches_that_are_no_global_batch_are_told_once(sizes, said):
    """A smaller one is what an epoch, or a bucket of lengths, leaves over."""
    batches = Batches([{"x": X[:size]} for size in sizes], global_batch_size=4, seed=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in (1, 2):
            assert [BatchLayout().count(batch) for batch in batches.epoch(epoch)] == sizes
    assert len(told) == (said is not None)
    assert said is None or f"give batches of {said}, and the global batch is 4" in str(told[0].message)


@pytest.mark.parametrize(("samples", "few"), [(17, True), (19, True), (20, False), (24, False), (16, False)])
def test_a_last_batch_of_a_few_samples_is_told_of_where_batch_norm_normalises_over_it(samples, few):
    batches = Batches(torch.zeros(samples, 3), global_batch_size=16, seed=0)
    for model, is_told in ((nn.LayerNorm(3), False), (nn.BatchNorm1d(3), few)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            batches.warn_small_batches(model)
        assert len(told) == is_told
    if few:
        advised = int(str(told[0].message).split("A global batch of ")[1].split()[0])
        assert samples % advised == 0 or samples % advised >= advised / 4


def test_the_global_batch_that_is_advised_leaves_no_few_samples_over():
    with pytest.warns(UserWarning, match=r"10 of 64 samples.* A global batch of \d+ leaves") as told:
        Batches(torch.zeros(49_994, 1), global_batch_size=64, seed=0).warn_small_batches(nn.BatchNorm1d(1))
    advised = int(str(told[0].message).split("A global batch of ")[1].split()[0])
    Batches(torch.zeros(49_994, 1), global_batch_size=advised, seed=0).warn_small_batches(nn.BatchNorm1d(1))
