"""Code for `torch.compile` is captured as it runs eagerly, wherever it is in a job.

Nothing is compiled in most of these tests, so their backend does not matter.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Job
from brimful.prediction import estimate_trace
from brimful.profiling import measure_step
from brimful.settings import Settings
from brimful.trace import Trace, find_units
from helpers.captured_jobs import A100, CPU, capture, loop_of
from helpers.models import GPT, Residual
from helpers.trained_alike import mean_square

# The compiler reads `.grad` of what it is given, and hides torch's warning; as an error it comes through.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

WIDTH = 32


def gated(x: Tensor) -> Tensor:
    return F.gelu(x) * x.sigmoid()


compiled_gated = torch.compile(gated, backend="aot_eager")


class Block(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.activation(self.widen(x)))


def network(activation: Callable[[Tensor], Tensor] = gated) -> nn.Sequential:
    return nn.Sequential(*(Block(activation) for _ in range(3)))


def compiled_whole() -> Callable[..., Tensor]:
    return torch.compile(network(), backend="aot_eager")


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile(backend="aot_eager")
    return model


def compiled_blocks_in_place() -> nn.Module:
    model = network()
    for block in model:
        block.compile(backend="aot_eager")
    return model


def with_compiled_blocks() -> nn.Module:
    return nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in network()))


def with_a_compiled_function() -> nn.Module:
    return network(compiled_gated)


def inputs(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH)


def traced(
    model: object, loss: Callable[..., Tensor] = mean_square, device: object = CPU, **options: int
) -> Trace:
    return capture(Job(model=model, loss=loss, batch=inputs), device, **options)  # type: ignore[arg-type]


def eagerly(trace: Trace) -> Trace:
    """A trace without what says that it is of compiled code."""
    return replace(trace, compiled_lines=())


FORMS = [
    compiled_whole,
    compiled_in_place,
    compiled_blocks_in_place,
    with_compiled_blocks,
    with_a_compiled_function,
]


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("device", [CPU, A100], ids=["cpu", "gpu"])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_model_is_traced_as_it_runs_eagerly(form: Callable[[], nn.Module], device: object) -> None:
    trace = traced(form, device=device)
    assert eagerly(trace) == traced(network, device=device)
    assert trace.compiled_lines


@pytest.mark.parametrize("form", FORMS)
def test_so_is_one_that_ran_compiled_before(form: Callable[[], nn.Module]) -> None:
    model = form()
    mean_square(model, inputs(4)).backward()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before > 0
    trace = traced(model)
    assert eagerly(trace) == traced(network)
    assert trace.compiled_lines
    mean_square(model, inputs(4)).backward()  # is compiled as before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_a_compiled_loss_and_a_compiled_step_of_a_loop_run_eagerly() -> None:
    compiled_loss = torch.compile(mean_square, backend="aot_eager")
    trace = traced(network, compiled_loss)
    assert eagerly(trace) == traced(network)
    assert [line.rpartition(":")[0].endswith("trained_alike.py") for line in trace.compiled_lines] == [True]

    compiled, eager = (
        capture(Job(model=network, loss=mean_square, batch=inputs, loop=loop_of(each)))
        for each in (compiled_loss, mean_square)
    )
    assert eagerly(compiled) == eager
    assert compiled.compiled_lines


def test_a_compiler_that_would_fail_is_not_called() -> None:
    def fails(_graph: object, _inputs: object) -> Callable[..., object]:
        raise AssertionError("compiled")

    assert eagerly(traced(lambda: torch.compile(network(), backend=fails))) == traced(network)


def test_an_estimate_of_compiled_code_says_so_and_is_wider() -> None:
    eager, compiled = (estimate_trace(traced(form), CPU) for form in (network, with_a_compiled_function))
    assert eager.uncertain == ()
    (uncertain,) = compiled.uncertain
    assert uncertain.startswith("compiled code (")
    assert "test_compiled_code.py" in uncertain
    assert compiled.predicted_peak_allocated_bytes == eager.predicted_peak_allocated_bytes
    (low, high), (eager_low, eager_high) = (each.predicted_device_interval_bytes for each in (compiled, eager))
    assert low < eager_low <= eager_high < high


def test_units_of_a_compiled_model_have_the_names_of_the_eager_one() -> None:
    units = find_units(traced(network, samples=256))
    assert units == ("0", "1", "2")
    for form in FORMS:
        assert find_units(traced(form, samples=256)) == units


def test_a_trace_of_compiled_code_is_saved_with_where_it_is_called() -> None:
    trace = traced(compiled_whole)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.slow
def test_importing_brimful_does_not_import_the_compiler() -> None:
    code = "import sys, brimful; brimful.estimate; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_that_a_measured_copy_is_not_compiled_is_told() -> None:
    model = compiled_blocks_in_place()
    job = Job(model=model, loss=mean_square, batch=inputs)
    with pytest.warns(UserWarning, match="compiled in place without that: it runs eagerly"):
        measure_step(job, Settings(micro_batch_size=4), steps=1)


def text_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def convolutions() -> nn.Module:
    """A block that is compiled, and one that is not: half a minute of the compiler's less than with two."""
    model = nn.Sequential(Residual(3, 32), Residual(32))
    model[0].compile()
    return model


def wide() -> Callable[..., Tensor]:
    return torch.compile(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))


def text_model() -> Callable[..., Tensor]:
    return torch.compile(GPT(layers=1, width=32, vocabulary=200))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("model", "loss", "batch"),
    [
        (convolutions, mean_square, lambda samples: torch.randn(samples, 3, 16, 16)),
        (text_model, text_loss, lambda samples: torch.randint(200, (samples, 32))),
        (wide, mean_square, lambda samples: torch.randn(samples, 256)),
    ],
    ids=["convolutions", "gpt", "wide"],
)
def test_what_compiled_code_takes_is_within_the_interval(
    model: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batch: Callable[[int], Tensor],
    micro_batches: int,
) -> None:
    job = Job(model=model, loss=loss, batch=batch)
    settings = Settings(micro_batch_size=8, gradient_accumulation_steps=micro_batches)
    trace = capture(job, samples=8, gradient_accumulation_steps=micro_batches)
    low, high = estimate_trace(trace, CPU).predicted_device_interval_bytes
    truth = measure_step(job, settings, steps=1).measured_peak_allocated_bytes
    assert low <= truth <= high


def test_a_model_that_was_given_stays_as_it_was() -> None:
    model = compiled_blocks_in_place()
    before = [block._compiled_call_impl for block in model]
    traced(model)
    assert [block._compiled_call_impl for block in model] == before
    assert copy.deepcopy(model)[0]._compiled_call_impl is None
