from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brimful.batches import BatchLayout, make_batch, to_device
from brimful.errors import BatchError, UsageError
from brimful.job import Job

Pair = namedtuple("Pair", ["images", "labels"])


@dataclass(frozen=True)
class Record:
    images: torch.Tensor
    scale: float = 2.0


class Encoding(UserDict):
    """A mapping class with state of its own, as transformers' BatchEncoding."""

    def __init__(self, data: dict[str, Any], source: str = "") -> None:
        super().__init__(data)
        self.source = source


def samples(count: int) -> torch.Tensor:
    return torch.arange(count * 3).reshape(count, 3)


def job(batch: Any) -> Job:
    return Job(
        model=torch.nn.Linear(3, 1), loss=lambda model, batch: model(batch).mean(), batch=batch, name="toy"
    )


NESTS = [
    samples(5),
    [samples(5), (samples(5), {"x": samples(5)})],
    Pair(samples(5), samples(5)),
    Record(samples(5)),
    OrderedDict(x=samples(5)),
    MappingProxyType({"x": samples(5)}),
    Encoding({"x": samples(5)}, source="tokenizer"),
    {"x": samples(5), "temperature": torch.tensor(0.5), "task": "sum", "nothing": None},
]


@pytest.mark.parametrize("batch", NESTS, ids=lambda batch: type(batch).__name__)
def test_every_kind_of_nest_is_counted_and_split(batch):
    assert BatchLayout().count(batch) == 5
    assert [BatchLayout().count(part) for part in BatchLayout().split(batch, 2)] == [2, 2, 1]


def test_parts_are_views():
    batch = {"x": samples(4)}
    parts = BatchLayout().split(batch, 2)
    parts[1]["x"].zero_()
    assert batch["x"][2:].eq(0).all()


def test_the_class_of_the_batch_and_its_own_state_are_kept():
    (part, _) = BatchLayout().split(Encoding({"x": samples(2)}, source="tokenizer"), 1)
    assert isinstance(part, Encoding)
    assert part.source == "tokenizer"
    assert isinstance(BatchLayout().split(Pair(samples(2), samples(2)), 1)[0], Pair)
    assert isinstance(BatchLayout().split(Record(samples(2)), 1)[0], Record)


def test_the_batch_that_was_split_is_unchanged():
    for batch in (Encoding({"x": samples(4)}), Record(samples(4)), {"x": samples(4)}):
        BatchLayout().split(batch, 1)
        assert BatchLayout().count(batch) == 4


def test_what_has_no_samples_is_carried_along():
    temperature = torch.tensor(0.5)
    parts = BatchLayout().split({"x": samples(2), "temperature": temperature, "task": "sum"}, 1)
    assert all(part["temperature"] is temperature and part["task"] == "sum" for part in parts)


def test_disagreeing_entries_are_named_with_their_shapes():
    with pytest.raises(
        BatchError, match=r'batch\["x"\]\[0\] has shape \(4, 3\), batch\["y"\] has shape \(5, 3\)'
    ):
        BatchLayout(whole=5).split({"x": [samples(4)], "y": samples(5)}, 2)


def test_a_long_list_of_entries_is_cut_in_the_message():
    with pytest.raises(BatchError, match="and 12 more"):
        BatchLayout(whole=5).split([samples(count) for count in range(1, 21)], 2)


@pytest.mark.parametrize("batch", [{}, [], "text", torch.tensor(1.0), {"x": torch.tensor(1.0)}])
def test_a_batch_without_samples_cannot_be_counted(batch):
    with pytest.raises(BatchError, match="no tensor with samples"):
        BatchLayout().count(batch)


def test_a_batch_of_no_samples_can_be_counted_but_not_split_or_resized():
    assert BatchLayout().count({"x": samples(0)}) == 0
    with pytest.raises(BatchError, match="0 samples"):
        BatchLayout().split({"x": samples(0)}, 1)
    with pytest.raises(BatchError, match="0 samples"):
        BatchLayout().resize({"x": samples(0)}, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(UsageError, match="at least 1"):
        BatchLayout().split(samples(2), size)
    with pytest.raises(UsageError, match="at least 1"):
        BatchLayout().resize(samples(2), size)
    with pytest.raises(UsageError, match="at least 1"):
        make_batch(job(samples(2)), size)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 9])
def test_resizing_repeats_the_samples_in_turn(count):
    resized = BatchLayout().resize({"x": samples(3)}, count)["x"]
    assert resized.tolist() == [samples(3)[index % 3].tolist() for index in range(count)]


def test_taking_selects_samples_in_the_order_of_the_indices():
    batch = {"x": samples(4), "scale": torch.tensor(2.0)}
    taken = BatchLayout().take(batch, torch.tensor([2, 0, 2]))
    assert taken["x"].tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    assert taken["scale"] is batch["scale"]


def test_every_tensor_is_moved_to_the_device():
    moved = to_device({"x": samples(2), "scale": torch.tensor(2.0), "task": "sum"}, "meta")
    assert moved["x"].device.type == moved["scale"].device.type == "meta"
    assert moved["task"] == "sum"


def test_a_batch_is_made_by_the_jobs_function_or_from_its_real_batch():
    assert BatchLayout().count(make_batch(job(samples), 7)) == 7
    assert BatchLayout().count(make_batch(job({"x": samples(2)}), 7)) == 7


def test_a_batch_function_that_ignores_the_number_of_samples_is_refused():
    with pytest.raises(BatchError, match=r"toy: batch\(4\) returned 2 samples: batch has shape \(2, 3\)"):
        make_batch(job(lambda count: samples(2)), 4)
    with pytest.raises(BatchError, match=r"toy: batch\(4\) returned an unsupported batch: .*no tensor with"):
        make_batch(job(lambda count: count), 4)


def test_batches_are_made_and_split_on_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = make_batch(job({"x": samples(3)}), 8)
        parts = BatchLayout().split(made, 3)
    assert isinstance(made["x"], FakeTensor)
    assert [BatchLayout().count(part) for part in parts] == [3, 3, 2]
