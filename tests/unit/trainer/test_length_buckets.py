from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from brimful.errors import BatchError, UsageError
from brimful.trainer import LengthBuckets, pad_batch

LENGTHS = torch.randint(1, 200, (1003,), generator=torch.Generator().manual_seed(0)).tolist()


def padding(batches):
    """Part of the padded tokens that is padding."""
    full = sum(len(batch) * max(LENGTHS[index] for index in batch) for batch in batches)
    return 1 - sum(LENGTHS) / full


def test_every_sample_comes_once_and_one_batch_may_be_smaller():
    buckets = LengthBuckets(LENGTHS, 16, seed=3)
    batches = list(buckets)
    assert len(batches) == len(buckets) == 63
    assert sorted(index for batch in batches for index in batch) == list(range(1003))
    assert sorted(len(batch) for batch in batches) == [11] + [16] * 62


def test_similar_lengths_together_need_less_padding_and_a_wider_window_less_still():
    narrow, wide = (padding(LengthBuckets(LENGTHS, 16, window=window)) for window in (1, 50))
    assert narrow > 0.4  # windows of one batch are a plain shuffle
    assert wide < 0.05


def test_seed_and_epoch_decide_the_order_whatever_else_is_drawn():
    buckets = LengthBuckets(LENGTHS, 16, seed=3)
    torch.manual_seed(1)
    first, second = list(buckets), list(buckets)
    assert first != second
    torch.manual_seed(2)
    other = LengthBuckets(LENGTHS, 16, seed=3)
    other.set_epoch(2)
    assert list(other) == second
    assert list(LengthBuckets(LENGTHS, 16, seed=4)) != first


def test_a_loader_with_workers_makes_two_iterators_and_is_in_the_same_epoch():
    def passes(**options):
        buckets = LengthBuckets([3, 1, 2, 5, 4, 6], 2, window=2)
        loader = DataLoader(range(6), batch_sampler=buckets, **options)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    assert passes(num_workers=1) == passes()


def test_the_longest_samples_are_those_of_the_batch_that_takes_most():
    assert sorted(LengthBuckets([3, 9, 2, 7, 1], 2).longest) == [1, 3]
    assert sorted(LengthBuckets([3, 9], 4).longest) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"lengths": [], "batch_size": 2}, "one number for each sample"),
        ({"lengths": [[1, 2]], "batch_size": 2}, "one number for each sample"),
        ({"lengths": [1], "batch_size": 0}, "batch_size is 0"),
        ({"lengths": [1], "batch_size": 1, "window": 0}, "window is 0"),
        ({"lengths": [1], "batch_size": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_what_makes_no_buckets_is_refused(arguments, told):
    with pytest.raises(UsageError, match=told):
        LengthBuckets(**arguments)


def sample(*tokens, **more):
    return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)} | more


def test_a_batch_is_padded_to_a_multiple_with_what_each_entry_asks_for():
    collate = partial(pad_batch, pad_values={"input_ids": 9, "labels": -100}, multiple_of=4)
    batch = collate([sample(1, 2, 3, 4, 5, score=0.5), sample(6, score=1.5)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5] + [-100] * 3, [6] + [-100] * 7]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] + [0] * 7]
    assert batch["score"].tolist() == [0.5, 1.5]


def test_entries_may_be_lists_bring_their_own_mask_and_have_more_dimensions():
    samples = [
        {"frames": torch.ones(length, 2), "attention_mask": [1] * (length - 1) + [0]} for length in (3, 8)
    ]
    batch = pad_batch(samples, {"frames": 0.5})
    assert batch["frames"].shape == (2, 8, 2)
    assert batch["frames"][0, 3:].unique().tolist() == [0.5]
    assert batch["attention_mask"].sum(1).tolist() == [2, 7]


@pytest.mark.parametrize(
    ("samples", "pad_values", "error", "told"),
    [
        ([sample(1), {"input_ids": torch.tensor([1])}], {"input_ids": 0}, BatchError, "the same entries"),
        ([sample(1)], {"tokens": 0}, BatchError, "the same entries"),
        ([sample(1), sample(1, 2)], {"input_ids": 0}, BatchError, "'labels' of the samples do not make"),
        ([sample(1), sample(1.0)], {"input_ids": 0, "labels": 0}, BatchError, "one type"),
        ([sample(1)], {"input_ids": 0.5}, UsageError, "cannot be padded with 0.5"),
        ([{"label": 3}], {"label": 0}, BatchError, "one number"),
        ([], {"input_ids": 0}, UsageError, "0 samples"),
        ([sample(1)], {}, UsageError, "0 pad values"),
    ],
)
def test_what_makes_no_batch_is_refused(samples, pad_values, error, told):
    with pytest.raises(error, match=told):
        pad_batch(samples, pad_values)
