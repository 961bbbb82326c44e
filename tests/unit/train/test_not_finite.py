"""Weights that are no numbers are found, and what only fills memory up is not taken for them."""

from typing import Any

import pytest
import torch
from torch import nn

from brimful.train.not_finite import has_finite_parameters


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
