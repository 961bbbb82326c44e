"""Plans that compile what they keep: chosen where that is faster, predicted by a capture of the choice."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Action, Compile

# The compiler reads `.grad` of what it is given, and hides torch's warning; as an error it comes through.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

GPU = "RTX 3090"


class Block(nn.Module):
    """A residual block of ops that are fused, whose activations are much larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x))
        return x + self.down(inner * inner.sigmoid() * inner.tanh())


def blocks(count: int = 8) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(count))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda samples: torch.rand(samples, 2048, 64),
        optimizer="sgd",
    )


def planned(compiles: str, **options: object) -> bf.Plan:
    return bf.plan(blocks(), GPU, global_batch_size=16, compile=compiles, micro_batch_size=16, **options)


@pytest.fixture(scope="module")
def compiled() -> bf.Plan:
    """With room for everything."""
    return planned("units")


def test_what_is_kept_is_compiled_and_faster(compiled: bf.Plan) -> None:
    eager = planned("none")
    assert (eager.settings.compile, compiled.settings.compile) == (Compile.NONE, Compile.UNITS)
    assert [(unit.fqn, unit.action) for unit in compiled.settings.units] == [
        (str(block), Action.KEEP) for block in range(8)
    ]
    assert compiled.predicted_step_seconds < eager.predicted_step_seconds
    assert compiled.predicted_peak_allocated_bytes < eager.predicted_peak_allocated_bytes
    (note,) = [note for note in compiled.notes if note.startswith("torch.compile")]
    assert "The fastest step that compiles nothing takes" in note
    estimate = bf.estimate(blocks(), GPU, settings=compiled.settings)
    assert estimate.predicted_step_seconds == pytest.approx(compiled.predicted_step_seconds, rel=0.01)
    assert bf.Plan.from_json(compiled.to_json()) == compiled


def test_auto_compiles_where_that_is_faster(compiled: bf.Plan) -> None:
    chosen = planned("auto")
    assert chosen.settings == compiled.settings


@pytest.mark.slow
def test_what_does_not_fit_is_recomputed_and_the_rest_compiled(compiled: bf.Plan) -> None:
    """Budgets between those of keeping and of recomputing all: with more, a plan is not slower."""
    small = planned("units", recompute="all")
    assert {unit.action for unit in small.settings.units} == {Action.RECOMPUTE}
    most, least = compiled.predicted_peak_device_bytes, small.predicted_peak_device_bytes
    plans = [small]
    for share in (0.35, 0.7):
        budget = int(least + share * (most - least))
        plans.append(planned("units", budget=f"{budget}B", max_exceedance=1.0, offload_activations=False))
        assert plans[-1].predicted_peak_device_bytes <= budget
    plans.append(compiled)
    for lower, higher in itertools.pairwise(plans):
        assert higher.predicted_step_seconds <= lower.predicted_step_seconds
    kept = [sum(unit.action is Action.KEEP for unit in plan.settings.units) for plan in plans]
    assert kept == sorted(kept)
    assert any(0 < count < 8 for count in kept)


@pytest.mark.slow
def test_a_plan_that_compiles_is_applied_on_this_cpu() -> None:
    job = blocks(2)
    plan = bf.plan(job, "cpu", global_batch_size=4, micro_batch_size=4, compile="units")
    assert plan.settings.compile is Compile.UNITS
    model = job.model()
    step = bf.apply(plan.settings, job, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(job.batch(4)).loss.isfinite()
    assert all("forward" in vars(block) for block in model)


def test_the_whole_model_is_compiled_on_request() -> None:
    plan = planned("model")
    assert plan.settings.compile is Compile.MODEL
    assert not plan.settings.units


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="value of compile"):
        planned("all")
    with pytest.raises(UsageError, match="one of 2 ranks"):
        bf.plan(blocks(), GPU, global_batch_size=16, world_size=2, parallelism="zero2", compile="units")
