"""Several ranks train as one process does: the same loss curve, whatever each rank's share."""

from pathlib import Path

import pytest
import torch

from helpers.ranks import on_ranks
from helpers.trained_on_ranks import curve, saved_and_resumed, settings

pytestmark = pytest.mark.slow  # processes that import torch

TOLERANCE = 1e-5
"""Gradients are summed in another order."""


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_gives_the_loss_curve_of_one_process(accumulation: int, loads: bool) -> None:
    """Tokens are counted over all ranks, the last batch has one sample, and a branch is taken by few."""
    options = {"loads": loads}
    alone, validated, weights = curve(settings(1, accumulation=2 * accumulation), options)
    ranks = on_ranks(curve, settings(2, accumulation=accumulation), options)
    for losses, validations, trained in ranks:
        assert losses == pytest.approx(alone, rel=TOLERANCE)
        assert validations == pytest.approx(validated, rel=TOLERANCE)
        assert all(torch.allclose(trained[name], weights[name], rtol=0, atol=1e-4) for name in weights)
    assert ranks[0][0] == ranks[1][0]
    assert all(torch.equal(ranks[0][2][name], ranks[1][2][name]) for name in weights)


def test_a_resumed_run_of_two_ranks_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Dropout of each rank and the order of a shuffling loader included."""
    for whole, resumed in on_ranks(saved_and_resumed, str(tmp_path / "run"), settings(2)):
        assert resumed == whole
