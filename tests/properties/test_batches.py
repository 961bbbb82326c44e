import torch
from hypothesis import given
from hypothesis import strategies as st

from brimful.batches import BatchLayout


def nests(count: int) -> st.SearchStrategy:
    """Batches of `count` samples, each a nest of at least one tensor with samples."""
    tensors = st.lists(st.integers(0, 3), max_size=2).map(lambda shape: torch.rand(count, *shape))
    leaves = tensors | st.just(torch.tensor(1.0)) | st.just("carried")
    inner = st.recursive(
        leaves,
        lambda entries: (
            st.lists(entries, max_size=3)
            | st.tuples(entries, entries)
            | st.dictionaries(st.text(max_size=3), entries, max_size=3)
        ),
        max_leaves=6,
    )
    return st.fixed_dictionaries({"first": tensors, "rest": inner})


batches = st.integers(1, 9).flatmap(nests)


def concatenated(parts):
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(concatenated(list(entries)) for entries in zip(*parts, strict=True))
    return first


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@given(batch=batches, micro_batch_size=st.integers(1, 10))
def test_concatenating_the_parts_gives_the_batch_back(batch, micro_batch_size):
    parts = BatchLayout().split(batch, micro_batch_size)
    assert all(BatchLayout().count(part) == micro_batch_size for part in parts[:-1])
    assert 1 <= BatchLayout().count(parts[-1]) <= micro_batch_size
    assert_equal(concatenated(parts), batch)


@given(batch=batches, samples=st.integers(1, 30))
def test_resizing_takes_the_samples_in_turn(batch, samples):
    indices = torch.arange(samples) % BatchLayout().count(batch)
    assert_equal(BatchLayout().resize(batch, samples), BatchLayout().take(batch, indices))
