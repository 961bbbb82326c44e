import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from brimful.execution.random_state import RandomState

HOST = torch.device("cpu")


def same_as_numpy_says(state: RandomState) -> bool:
    name, keys, *rest = np.random.get_state(legacy=True)
    return state.numpy[0] == name and np.array_equal(state.numpy[1], keys) and list(state.numpy[2:]) == rest


@pytest.mark.parametrize("seed", range(5))
def test_the_state_is_that_of_numpy_whatever_was_drawn(seed: int) -> None:
    """`randn` keeps a second number, which is no part of the generator's own numbers."""
    choose, kept = random.Random(seed), [RandomState.now(HOST)]

    def restore() -> None:
        chosen = choose.choice(kept)
        chosen.restore(HOST)
        assert same_as_numpy_says(chosen)

    ways: list[Callable[[], object]] = [
        np.random.rand,
        np.random.randn,
        lambda: np.random.seed(choose.randrange(3)),
        lambda: kept.append(RandomState.now(HOST)),
        restore,
        lambda: np.random.randint(10, size=700),
    ]
    for _ in range(300):
        choose.choice(ways)()
        assert same_as_numpy_says(RandomState.now(HOST))


def test_what_is_drawn_after_a_state_is_restored_is_the_same() -> None:
    np.random.seed(0)
    np.random.randn()  # the second number is kept
    state = RandomState.now(HOST)
    first = np.random.randn(3).tolist(), random.random(), torch.rand(2).tolist()
    state.restore(HOST)
    assert (np.random.randn(3).tolist(), random.random(), torch.rand(2).tolist()) == first


def test_a_kept_second_number_alone_is_restored() -> None:
    """It is drawn without a change of the numbers that the generator goes on from."""
    np.random.seed(0)
    np.random.randn()
    state = RandomState.now(HOST)
    second = np.random.randn()
    RandomState.now(HOST)
    state.restore(HOST)
    assert same_as_numpy_says(state)
    assert same_as_numpy_says(RandomState.now(HOST))
    assert np.random.randn() == second


def test_a_state_of_which_nothing_was_drawn_is_not_read_again() -> None:
    np.random.seed(0)
    assert RandomState.now(HOST).numpy is RandomState.now(HOST).numpy


def test_a_state_that_is_kept_is_not_memory_of_the_step() -> None:
    state = RandomState.now(HOST)
    assert not isinstance(state.host, torch.Tensor)
    expected = torch.rand(3)
    state.restore(HOST)
    assert torch.equal(torch.rand(3), expected)
    assert RandomState.from_save(state.to_save()).host == state.host
