"""Several ranks train as one process does: the same loss curve, whatever each rank's share."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from brimful import estimate, plan
from brimful.distributed.fsdp import Sharded, sharded_units
from brimful.errors import NonFiniteError, PartialUpdateError, UsageError
from brimful.job import Data, Job
from brimful.results import Recovery, TrainingResult
from brimful.settings import Action, Compile, OptimizerImplementation, Parallelism, Settings, UnitAction
from brimful.trainer import Trainer
from brimful.trainer.resume import Fallback, read_fallback, write_fallback
from helpers.ranks import on_ranks, one_after_another
from helpers.trained_on_ranks import (
    GLOBAL_BATCH,
    Tokens,
    curve,
    has_branches,
    make_job,
    measured_peak_bytes,
    saved_and_resumed,
    settings,
    trained,
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
    for losses, validations, found in ranks:
        assert losses == pytest.approx(alone, rel=TOLERANCE)
        assert validations == pytest.approx(validated, rel=TOLERANCE)
        assert all(torch.allclose(found[name], weights[name], rtol=0, atol=1e-4) for name in weights)
    assert ranks[0][0] == ranks[1][0]
    assert all(torch.equal(ranks[0][2][name], ranks[1][2][name]) for name in weights)


def curve_and_graphs(how: Settings, options: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
    """What training came to, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    return curve(how, options), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("parallelism", OF_TORCH)
def test_compiled_units_train_alike_on_two_ranks(parallelism: Parallelism) -> None:
    """Two blocks are compiled, and the one between them is recomputed eagerly."""
    eager = settings(2, parallelism=parallelism)
    kept = tuple(UnitAction(fqn=f"blocks.{index}", action=Action.KEEP) for index in (0, 2))
    compiled = replace(eager, compile=Compile.UNITS, units=(*eager.units, *kept))
    (alone, of_eager), (together, of_compiled) = (
        on_ranks(curve_and_graphs, how, {"epochs": None, "steps": 3, "branches": has_branches(how)})[0]
        for how in (eager, compiled)
    )
    (losses, validations, weights), (found, validated, found_weights) = alone, together
    assert of_eager == 0 < of_compiled
    assert found == pytest.approx(losses, rel=1e-5)
    assert validated == pytest.approx(validations, rel=1e-5)
    assert list(found_weights) == list(weights)


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
    with pytest.warns(UserWarning, match="saved by 2 ranks and resumes with 1"):
        resumed = curve(alone, saved | {"steps": 8, "resume": True})[0]
    assert resumed == pytest.approx(curve(alone, options | {"steps": 8})[0], rel=TOLERANCE)


def tied_blocks_refused() -> bool:
    model = Tokens()
    model.blocks[0][0].weight = model.blocks[1][0].weight
    with pytest.raises(UsageError, match="share parameters"):
        Sharded(model, init_device_mesh("cpu", (2,)), settings(2, parallelism=Parallelism.FSDP2))
    return True


def test_blocks_that_share_parameters_are_not_divided() -> None:
    """FSDP2 would make two of one, without a word."""
    assert all(on_ranks(tied_blocks_refused))


def test_settings_that_ran_out_twice_before_a_save_are_lowered_twice(tmp_path: Path) -> None:
    begun, once, twice = (settings(2, accumulation=accumulation) for accumulation in (1, 2, 4))
    recovery = Recovery(step=1, during="step", message="", before="", after="", seconds=0.0)
    write_fallback(tmp_path, Fallback(before=begun, after=once, recovery=recovery))
    write_fallback(tmp_path, Fallback(before=begun, after=twice, recovery=recovery))
    left = read_fallback(tmp_path, begun)
    assert left is not None
    assert left.after == twice
    assert read_fallback(tmp_path, once) is None


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
        world_size=2,
        parallelism=parallelism,
    )
    (measured, _other) = on_ranks(measured_peak_bytes, how)
    return how.predicted_peak_allocated_bytes, measured


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_memory_of_a_rank_is_as_predicted(accumulation: int) -> None:
    predicted, measured = predicted_and_measured("ddp", accumulation)
    assert predicted == pytest.approx(measured, rel=0.03)


class Pointwise(nn.Module):
    """Of which eager code saves each intermediate, and compiled code the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sigmoid() * x.tanh() * x.exp().add(1).log()


def pointwise_blocks() -> Job:
    held = {"x": torch.randn(GLOBAL_BATCH, 16, 64, generator=torch.Generator().manual_seed(3))}
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), Pointwise()) for _ in range(3))),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=held,
        data=lambda: Data(train=held),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )


def measured_of_pointwise_blocks(how: Settings) -> int | None:
    trainer = Trainer(
        pointwise_blocks(), how, device="cpu", show_progress=False, epochs=None, steps=4, verify=False
    )
    return trainer.fit().measured_peak_allocated_bytes


def test_the_memory_of_compiled_units_under_fsdp2_is_as_predicted() -> None:
    """Hooks that gather and free parameters run outside of the compiled code."""
    peaks = []
    for compiles in (Compile.NONE, Compile.UNITS):
        how = Settings(
            micro_batch_size=GLOBAL_BATCH // 2,
            world_size=2,
            parallelism=Parallelism.FSDP2,
            compile=compiles,
            units=tuple(UnitAction(fqn=str(index), action=Action.KEEP) for index in range(3)),
        )
        predicted = estimate(pointwise_blocks(), "cpu", settings=how).predicted_peak_allocated_bytes
        (measured, _other) = on_ranks(measured_of_pointwise_blocks, how)
        assert predicted == pytest.approx(measured, rel=0.01)
        peaks.append(predicted)
    assert peaks[1] < 0.8 * peaks[0]


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


class Normalised(nn.Sequential):
    """With running statistics, which no optimizer keeps the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def on_the_edge(how: Settings) -> dict[str, object]:
    """What becomes of a NaN on one rank alone, of a loss that no longer falls, and of buffers."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4 * GLOBAL_BATCH, 6, generator=generator)
    held = {"x": x, "y": x.argmax(1) % 3}
    with_nan = {"x": x.clone(), "y": held["y"]}
    with_nan["x"][-1] = torch.nan  # one sample, which one rank computes

    def run(samples: dict[str, Tensor], rate: float, **options: object) -> tuple[Trainer, TrainingResult]:
        noisy = DataLoader(Noisy(held), batch_size=5)
        job = Job(
            name="edge",
            model=Normalised,
            loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
            batch=samples,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
            data=lambda: Data(train=samples, validation=noisy),
        )
        trainer = Trainer(job, how, device="cpu", show_progress=False, verify=False, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            return trainer, trainer.fit()

    try:
        run(with_nan, 1e-2, epochs=1)
    except NonFiniteError as error:
        told = str(error)
    trainer, result = run(held, 0.0, epochs=30, patience=1)
    return {
        "told": told,
        "stopped": (str(result.stopped_because), len(result.steps)),
        "validations": [record.loss for record in result.validations],
        "losses": result.losses,
        "buffers": {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
    }


class Noisy(Dataset[dict[str, Tensor]]):
    """A validation that draws random numbers."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.held["x"][index]
        return {"x": x + 0.1 * torch.randn_like(x), "y": self.held["y"][index]}


def out_in_the_update(run: str) -> tuple[str, str, list[float]]:
    """What is told where memory runs out in the first update; what the next launch takes, and its losses."""
    how = replace(
        settings(2, parallelism=Parallelism.FSDP2), optimizer_implementation=OptimizerImplementation.FOREACH
    )
    options = {"epochs": None, "branches": False, "steps": 4, "run_dir": Path(run), "resume": True}
    step = torch.optim.AdamW.step

    def runs_out(optimizer: torch.optim.AdamW, closure: object = None) -> None:
        if optimizer.defaults["foreach"] or optimizer.param_groups[0]["foreach"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        step(optimizer)

    torch.optim.AdamW.step = runs_out
    try:
        trained(how, **options)
    except PartialUpdateError as error:
        told = str(error)
    result, _weights = trained(how, **options)
    torch.optim.AdamW.step = step
    return told, str(result.settings.optimizer_implementation), list(result.losses)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What ranks come to: by rank."""
    plain = Settings(micro_batch_size=GLOBAL_BATCH // 2, world_size=2)
    works = {
        **{str(each): (on_the_edge, (replace(plain, parallelism=each),)) for each in Parallelism},
        "update": (out_in_the_update, (str(tmp_path_factory.mktemp("ends") / "run"),)),
    }
    found = on_ranks(one_after_another, list(works.values()))
    return {name: [of_rank[place] for of_rank in found] for place, name in enumerate(works)}


@pytest.mark.parametrize("parallelism", Parallelism)
def test_ranks_come_to_the_same_end(ends: dict[str, list[Any]], parallelism: Parallelism) -> None:
    """A NaN on one, a patience that ends, random numbers in a validation, running statistics."""
    first, second = ends[parallelism]
    norm = "inf" if parallelism.is_zero else "nan"  # DeepSpeed clamps what is infinite or NaN to infinity
    assert first["told"].startswith(f"the loss is nan and the gradient norm {norm} in step")
    assert first["told"] == second["told"]
    assert first["stopped"] == second["stopped"]
    assert first["stopped"][0] == "not improving"
    assert first["validations"] == second["validations"]
    assert first["losses"] == second["losses"]
    assert all(torch.equal(first["buffers"][name], second["buffers"][name]) for name in first["buffers"])
    assert int(first["buffers"]["1.num_batches_tracked"]) == first["stopped"][1]


def test_an_update_that_ran_out_takes_less_in_the_next_launch(ends: dict[str, list[Any]]) -> None:
    """It would run out in each else: the micro-batch is nothing to it."""
    alone = trained(settings(1, accumulation=4), branches=False, epochs=None, steps=4)[0].losses
    for told, implementation, losses in ends["update"]:
        assert "memory ran out in the optimizer's update of divided parameters" in told
        assert "for-loop optimizer" in told
        assert implementation == "for-loop"
        assert losses == pytest.approx(alone, rel=TOLERANCE)
