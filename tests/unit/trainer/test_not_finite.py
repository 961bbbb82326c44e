"""Weights that are no numbers are found, and what only fills memory up is not taken for them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brimful.trainer.step.not_finite import has_finite_parameters


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_weight_that_is_no_number_is_found(value: float) -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1, 2] = value

    assert not has_finite_parameters(model)


@pytest.mark.parametrize(
    ("rank", "part", "expected"),
    [
        (0, [1.0, 2.0], True),
        (0, [1.0, float("nan")], False),
        (1, [3.0, float("nan")], True),  # 3 numbers on 2 ranks: the last is filled up
        (1, [float("nan"), 0.0], False),
        (2, [float("nan"), float("nan")], True),  # of which this rank has nothing
    ],
)
def test_what_fills_up_the_last_part_that_deepspeed_makes_is_no_weight(
    rank: int, part: list[float], expected: bool
) -> None:
    """DeepSpeed leaves it as it finds the memory (`torch.empty`): a run ended now and then for a NaN there."""
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_numel, parameter.ds_zero_partition_rank = 3, rank
    parameter.ds_tensor = torch.tensor(part)
    parameter.ds_tensor.ds_numel = 2
    model = nn.Module()
    model.weight = parameter

    assert has_finite_parameters(model) is expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_it_is_found_wherever_it_is_and_whatever_the_layout(dtype: torch.dtype, value: float) -> None:
    for place in (0, 17, 99):
        weight = torch.randn(100).to(dtype)
        model = nn.Module()
        model.weight = nn.Parameter(weight.view(10, 10).T)
        assert has_finite_parameters(model)
        weight[place] = value
        assert not has_finite_parameters(model)


def test_the_largest_numbers_and_parameters_without_any_are_finite() -> None:
    model = nn.Module()
    limits = torch.finfo(torch.float16)
    model.weight = nn.Parameter(torch.tensor([limits.max, limits.min, 0.0], dtype=torch.float16))
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.numbers = nn.Parameter(torch.tensor([2**40]), requires_grad=False)
    assert has_finite_parameters(model)


def test_looking_for_them_makes_no_tensor_as_large_as_a_weight() -> None:
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made = [
                leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf._is_view()
            ]
            self.numbers = max([self.numbers, *(leaf.numel() for leaf in made if "detach" not in str(func))])
            return result

    model = nn.Linear(64, 64)
    with Largest() as made:
        assert has_finite_parameters(model)
    assert made.numbers == 1
