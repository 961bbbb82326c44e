"""Several ranks train as one process does: the same loss curve, whatever each rank's share."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from brimful import plan
from brimful.applying.sharding import Sharded, sharded_units
from brimful.errors import UsageError
from brimful.settings import Parallelism
from brimful.train.relaunch import leave_settings, settings_left
from brimful.training import Recovery
from helpers.ranks import on_ranks
from helpers.trained_on_ranks import (
    GLOBAL_BATCH,
    Tokens,
    curve,
    has_branches,
    make_job,
    measured_peak_bytes,
    saved_and_resumed,
    settings,
)

pytestmark = pytest.mark.slow  # processes that import torch

TOLERANCE = 1e-5
"""Gradients are summed in another order."""

OF_TORCH = (Parallelism.DDP, Parallelism.FSDP2)


@pytest.mark.parametrize("parallelism", OF_TORCH)
@pytest.mark.parametrize(("accumulation", "loads"), [(1, False), (2, True)])
def test_two_ranks_give_the_loss_curve_of_one_process(
    parallelism: Parallelism, accumulation: int, loads: bool
) -> None:
    """Tokens are counted over all ranks, the last batch has one sample, and a branch is taken by few."""
    how = settings(2, accumulation=accumulation, parallelism=parallelism)
    options = {"loads": loads, "branches": has_branches(how)}
    alone, validated, weights = curve(settings(1, accumulation=2 * accumulation), options)
    ranks = on_ranks(curve, how, options)
    for losses, validations, trained in ranks:
        assert losses == pytest.approx(alone, rel=TOLERANCE)
        assert validations == pytest.approx(validated, rel=TOLERANCE)
        assert all(torch.allclose(trained[name], weights[name], rtol=0, atol=1e-4) for name in weights)
    assert ranks[0][0] == ranks[1][0]
    assert all(torch.equal(ranks[0][2][name], ranks[1][2][name]) for name in weights)


@pytest.mark.parametrize("parallelism", OF_TORCH)
def test_a_resumed_run_of_two_ranks_goes_on_bit_for_bit(parallelism: Parallelism, tmp_path: Path) -> None:
    """Dropout of each rank and the order of a shuffling loader included."""
    how = settings(2, parallelism=parallelism)
    for whole, resumed in on_ranks(saved_and_resumed, str(tmp_path / "run"), how):
        assert resumed == whole


@pytest.mark.parametrize("parallelism", OF_TORCH)
def test_a_run_of_two_ranks_goes_on_alone(parallelism: Parallelism, tmp_path: Path) -> None:
    how, alone = settings(2, parallelism=parallelism), settings(1, accumulation=4)
    options = {"epochs": None, "branches": has_branches(how)}
    saved = options | {"run_dir": tmp_path / "run"}
    on_ranks(curve, how, saved | {"steps": 4})
    with pytest.warns(UserWarning, match="saved by 2 ranks and goes on with 1"):
        resumed = curve(alone, saved | {"steps": 8, "resume": True})[0]
    assert resumed == pytest.approx(curve(alone, options | {"steps": 8})[0], rel=TOLERANCE)


def tied_blocks_refused() -> bool:
    model = Tokens()
    model.blocks[0][0].weight = model.blocks[1][0].weight
    with pytest.raises(UsageError, match="share parameters"):
        Sharded(model, init_device_mesh("cpu", (2,)))
    return True


def test_blocks_that_share_parameters_are_not_divided() -> None:
    """FSDP2 would make two of one, without a word."""
    assert all(on_ranks(tied_blocks_refused))


def test_settings_that_ran_out_twice_before_a_save_are_lowered_twice(tmp_path: Path) -> None:
    begun, once, twice = (settings(2, accumulation=accumulation) for accumulation in (1, 2, 4))
    recovery = Recovery(step=1, during="step", message="", before="", after="", seconds=0.0)
    leave_settings(tmp_path, begun, once, recovery)
    leave_settings(tmp_path, begun, twice, recovery)
    left = settings_left(tmp_path, begun)
    assert left is not None
    assert left[0] == twice
    assert settings_left(tmp_path, once) is None


def test_blocks_are_what_is_gathered_together() -> None:
    model = Tokens()
    assert sharded_units(model) == list(model.blocks)
    assert sharded_units(nn.Linear(2, 2)) == []


def predicted_and_measured(parallelism: str, accumulation: int) -> tuple[int, int]:
    how = plan(
        make_job(branches=False),
        "cpu",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=GLOBAL_BATCH // 2 // accumulation,
        recompute="none",
        ranks=2,
        parallelism=parallelism,
    )
    (measured, _other) = on_ranks(measured_peak_bytes, how)
    return how.predicted_peak_allocated_bytes, measured


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_memory_of_a_rank_is_as_predicted(accumulation: int) -> None:
    predicted, measured = predicted_and_measured("ddp", accumulation)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_a_rank_of_fsdp2_takes_at_least_what_is_predicted() -> None:
    """More where gloo's threads have not let go of their copies yet: at most those of all gathers."""
    predicted, measured = predicted_and_measured("fsdp2", 1)
    parameters = sum(parameter.nbytes for parameter in Tokens().parameters())
    assert 0.97 * predicted <= measured <= predicted + 2 * parameters


def test_a_run_under_ddp_goes_on_under_fsdp2(tmp_path: Path) -> None:
    options = {"epochs": None, "branches": False}
    saved = options | {"run_dir": tmp_path / "run"}
    on_ranks(curve, settings(2), saved | {"steps": 4})
    resumed = on_ranks(curve, settings(2, parallelism=Parallelism.FSDP2), saved | {"steps": 8, "resume": True})
    alone = curve(settings(1, accumulation=4), options | {"steps": 8})[0]
    assert resumed[0][0] == pytest.approx(alone, rel=TOLERANCE)
