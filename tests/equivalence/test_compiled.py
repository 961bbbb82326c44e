"""`torch.compile` and a plan on one model: what is kept is compiled, what is recomputed runs eagerly between.

The compiler's `aot_eager` backend runs the ops it traced as they are, so results are compared bit for bit.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import nn

import brimful as bf
from brimful.settings import Action, UnitAction
from brimful.transforms import apply_units
from brimful.transforms.segments import Call
from helpers.data_parallel import next_token, units
from helpers.models import GPT
from helpers.trained_alike import assert_identical, mean_square, nesting, recomputing, saved_bytes, train

# The compiler reads `.grad` of what it is given, and hides torch's warning; as an error it comes through.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

PLAN = units(["blocks.0"], {"blocks.1": ("addmm#0", "addmm#2")})


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tokens() -> list[torch.Tensor]:
    return [torch.randint(40, (2, 12)) for _ in range(2)]


@pytest.mark.parametrize("compiles_first", [False, True])
def test_a_whole_model(compiles_first: bool) -> None:
    batches, plain = tokens(), GPT(layers=3)
    planned = copy.deepcopy(plain)
    if compiles_first:
        planned.compile(backend="aot_eager")
    applied = apply_units(planned, PLAN)
    planned.compile(backend="aot_eager")
    assert_identical(train(plain, batches, loss=next_token), train(planned, batches, loss=next_token))
    assert graphs() > 0
    applied.remove()
    assert_identical(train(plain, batches, loss=next_token), train(planned, batches, loss=next_token))


def test_nested_units_hand_their_inputs_on_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run eagerly, so what one returns is what the next one is given. The last block is kept."""
    calls = []
    run_again = Call.run_again
    monkeypatch.setattr(Call, "run_again", lambda call: (calls.append(call), run_again(call)))
    batches, plain = tokens(), GPT(layers=4)
    planned = copy.deepcopy(plain)
    apply_units(planned, nesting(("blocks.0", "blocks.1", "blocks.2")))
    planned.compile(backend="aot_eager")
    assert_identical(train(plain, batches, loss=next_token), train(planned, batches, loss=next_token))
    assert graphs() > 0
    assert len(calls) == 2 * 3 * len(batches)


def test_a_kept_unit_stays_compiled() -> None:
    batches, plain = tokens(), GPT(layers=3)
    planned = copy.deepcopy(plain)
    apply_units(planned, PLAN)
    expected = train(plain, batches, loss=next_token)
    assert graphs() == 0
    planned.blocks[2].compile(backend="aot_eager", fullgraph=True)
    assert_identical(expected, train(planned, batches, loss=next_token))
    assert graphs() > 0


def test_a_unit_that_is_compiled_already_is_recomputed_compiled() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()), nn.Tanh())
    plain[1] = torch.compile(plain[1], backend="aot_eager")
    planned = copy.deepcopy(plain)
    batches = [torch.randn(4, 8) for _ in range(2)]
    with saved_bytes() as kept:
        plain(batches[0])
    applied = apply_units(planned, recomputing("1"))
    with saved_bytes() as recomputed:
        planned(batches[0])
    assert recomputed.total_bytes < kept.total_bytes
    expected = train(plain, batches)
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    assert_identical(expected, train(planned, batches))
    assert graphs() > 0
    applied.remove()
    assert_identical(train(plain, batches), train(planned, batches))


def test_a_graph_without_breaks_is_refused_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    apply_units(model, recomputing("0"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_recomputed"):
        mean_square(compiled, torch.randn(2, 8))
    with torch.no_grad():  # nothing is recomputed
        compiled(torch.randn(2, 8))


class Pair(nn.Module):
    """No loop: a graph that breaks in a loop makes the compiler skip the whole function."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = nn.functional.dropout(nn.functional.gelu(self.kept(x)), 0.1, self.training)
        return self.other(kept)


def compiled_calls(model: nn.Module, batch: torch.Tensor) -> int:
    """How many compiled functions a call of the model runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch).sum().backward()
    return sum(event.count for event in profile.key_averages() if event.key == "CompiledFunction")


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_is_compiled_stays_compiled_after_steps_under_a_plan(recompute: str) -> None:
    """In plain torch a call under any dispatch mode turns the compiler off for the whole process."""

    def small() -> nn.Module:
        return torch.compile(Pair(), backend="aot_eager")  # type: ignore[return-value]

    job = bf.Job(
        model=small,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 8),
        optimizer="sgd",
        data=lambda: bf.Data(train=torch.rand(16, 8)),
    )
    other, batch = small(), torch.rand(8, 8)
    before = compiled_calls(other, batch)
    assert before > 0
    settings = bf.Settings(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        units=() if recompute == "none" else (UnitAction(fqn="other", action=Action.RECOMPUTE),),
    )
    model = small()
    step = bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        step(batch)
    step.remove()
    bf.verify(job, settings)
    bf.fit(job, settings, steps=1, show_progress=False)
    assert compiled_calls(other, batch) == before
    assert compiled_calls(model, batch) > 0
