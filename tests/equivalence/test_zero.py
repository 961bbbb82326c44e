"""DeepSpeed's ZeRO gives the loss curve of one process, and its runs are saved as those of one process."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from brimful import Plan, plan
from brimful.settings import Action, Parallelism, Precision, UnitAction
from helpers.ranks import on_ranks
from helpers.trained_on_ranks import (
    GLOBAL_BATCH,
    Tokens,
    by_zero,
    by_zero_with_peaks,
    curve,
    make_job,
    settings,
)

pytestmark = [
    pytest.mark.slow,  # processes that import torch and DeepSpeed
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: brimful[deepspeed]"),
]

TOLERANCE = 1e-5
"""Gradients are summed in another order."""

ACTIONS = (
    UnitAction(fqn="blocks.0", action=Action.SAVE, saved=("addmm#0",)),
    UnitAction(fqn="blocks.1", action=Action.RECOMPUTE),
    UnitAction(fqn="blocks.2", action=Action.NEST),
)


@pytest.mark.parametrize(
    ("parallelism", "precision"),
    [
        (Parallelism.ZERO1, Precision.FP32),
        (Parallelism.ZERO2, Precision.BF16),
        (Parallelism.ZERO3, Precision.BF16),
    ],
)
def test_two_ranks_give_the_loss_curve_of_one_process_and_their_runs_go_on(
    parallelism: Parallelism, precision: Precision, tmp_path: Path
) -> None:
    """Two micro-batches, tokens counted over all ranks, clipping, a last batch of one sample, recomputation.

    The weights that are left are whole; a resumed run goes on bit for bit, and one process goes on from it.
    """
    how = replace(settings(2, parallelism=parallelism), units=ACTIONS, precision=precision)
    alone = replace(settings(1, accumulation=4), units=ACTIONS, precision=precision)
    ranks = on_ranks(by_zero, str(tmp_path / "run"), how, {"branches": False})
    losses, validated, weights = curve(alone, {"branches": False, "epochs": 1})
    for rank_losses, rank_validated, (whole, resumed) in ranks:
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_validated == pytest.approx(validated, rel=TOLERANCE)
        assert resumed == whole
    assert ranks[0][0] == ranks[1][0]
    kept = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.allclose(kept[name], weights[name], rtol=0, atol=1e-5) for name in weights)
    options = {"branches": False, "epochs": 2, "run_dir": tmp_path / "run", "resume": True}
    with pytest.warns(UserWarning, match="saved by 2 ranks and resumes with 1"):
        gone_on = curve(alone, options)[0]
    assert gone_on == pytest.approx(curve(alone, {"branches": False, "epochs": 2})[0], rel=TOLERANCE)


def planned(parallelism: str) -> Plan:
    return plan(
        make_job(branches=False),
        "cpu",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=GLOBAL_BATCH // 2,
        recompute="none",
        world_size=2,
        parallelism=parallelism,
    )


def parameter_bytes() -> int:
    return sum(parameter.nbytes for parameter in Tokens(branches=False).parameters())


def test_a_run_of_one_process_goes_on_under_zero_in_the_memory_predicted(tmp_path: Path) -> None:
    """And a parameter without a gradient ends a run: DeepSpeed would step it, as one process would not."""
    options = {"epochs": None, "branches": False}
    saved = options | {"run_dir": tmp_path / "run"}
    curve(settings(1, accumulation=4), saved | {"steps": 4})
    how = settings(2, parallelism=Parallelism.ZERO3)
    plans = [planned(name) for name in ("zero1", "zero2", "zero3")]
    ranks = on_ranks(by_zero_with_peaks, how, saved | {"steps": 8, "resume": True}, plans)
    alone = curve(settings(1, accumulation=4), options | {"steps": 8})[0]
    for resumed, peaks in ranks:
        assert resumed == pytest.approx(alone, rel=TOLERANCE)
        for each, measured in zip(plans, peaks, strict=True):
            predicted = each.predicted_peak_allocated_bytes
            # of a toy; more where gloo's threads have not let go of what they sent
            assert 0.9 * predicted <= measured <= 1.05 * predicted + 2 * parameter_bytes()
