"""`torch.compile` and a plan on one model: what is kept is compiled, what is recomputed runs eagerly between.

The compiler's `aot_eager` backend runs the ops it traced as they are, so results are compared bit for bit.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import nn

from brimful.applying import apply_units
from brimful.applying.segments import Call
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
