"""What FSDP2 gathers, when and in which type: what that changes of the mathematics, of memory and of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import brimful as bf
from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.devices import find_device
from brimful.errors import UsageError
from brimful.memory import most_held_bytes, predict_memory
from brimful.prediction import estimate_trace
from brimful.profiling.named_device import resolve_device
from brimful.settings import Parallelism, Precision, Settings
from brimful.trace import Category, Phase, Trace
from brimful.trainer import Trainer
from brimful.trainer.step.fallback import MemoryFallback
from helpers.ranks import on_ranks

WIDTH, BLOCKS, GLOBAL_BATCH = 64, 6, 8
GATHERS = "c10d._allgather_base_.default"
REDUCES = "c10d._reduce_scatter_base_.default"

FSDP2 = Settings(
    micro_batch_size=GLOBAL_BATCH // 2, world_size=2, parallelism=Parallelism.FSDP2, precision=Precision.BF16
)
HOLDING = replace(FSDP2, reshard_after_forward=False)
HALVES = replace(FSDP2, param_dtype="bfloat16")
ON_HOST = replace(FSDP2, offload_optimizer=True)
OFFLOADED = replace(FSDP2, offload_parameters=True)
WAYS = (FSDP2, HOLDING, HALVES, replace(HOLDING, param_dtype="bfloat16"), ON_HOST, OFFLOADED)


class Net(nn.Module):
    """Linear layers alone, of which autocast takes the weights in bf16; or norms and embeddings too."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if linear else nn.Embedding(WIDTH, WIDTH)
        norm = nn.Identity if linear else lambda: nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(norm(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)))


def make_job(*, linear: bool) -> bf.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * GLOBAL_BATCH, WIDTH, generator=generator)
    samples = {"x": x if linear else x.argmax(1), "y": x[:, :4].argmax(1)}
    return bf.Job(
        name="net",
        model=lambda: Net(linear=linear),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=samples,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=lambda: bf.Data(train=samples, validation=samples),
    )


def shard_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Two blocks together, and all else with the model."""
    for place in range(0, BLOCKS, 2):
        fully_shard([model.blocks[place], model.blocks[place + 1]], mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(ways: tuple[Settings, ...]) -> dict[bool, list[tuple[list[float], int | None]]]:
    """Losses and peak of each way, by whether there are linear layers alone; a validation is in between.

    The last is the first way, sharded by hand.
    """
    found: dict[bool, list[tuple[list[float], int | None]]] = {}
    for linear in (True, False):
        job = make_job(linear=linear)
        by_hand = replace(job, shard=shard_by_hand)
        for each, how in [*((job, way) for way in ways), (by_hand, ways[0])]:
            result = Trainer(each, how, epochs=2, device="cpu", show_progress=False, verify=False).fit()
            losses = [step.loss for step in result.steps] + [each.loss for each in result.validations]
            found.setdefault(linear, []).append((losses, result.measured_peak_allocated_bytes))
    return found


@pytest.fixture(scope="module")
def by_ranks() -> list[dict[bool, list[tuple[list[float], int | None]]]]:
    return on_ranks(trained, WAYS)


def captured(how: Settings, *, linear: bool = True, steps: int = 1) -> Trace:
    return capture_step(make_job(linear=linear), how, resolve_device("cpu"), steps=steps)


def sent_bytes(trace: Trace, name: str) -> list[int]:
    return [max(op.read_bytes, op.written_bytes) for op in trace.ops if op.name == name]


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("linear", [True, False])
def test_holding_gathered_parameters_changes_no_bit(by_ranks: list[Any], linear: bool) -> None:
    (plain, _), (holding, _), (halves, _), (both, _), *_ = by_ranks[0][linear]
    assert holding == plain
    assert both == halves


@pytest.mark.slow
@pytest.mark.parametrize("linear", [True, False])
def test_updating_each_ranks_part_on_the_host_changes_no_bit(by_ranks: list[Any], linear: bool) -> None:
    (plain, _), *_, (on_host, _), (offloaded, _), _ = by_ranks[0][linear]
    assert on_host == plain
    assert offloaded == plain


@pytest.mark.slow
@pytest.mark.parametrize("linear", [True, False])
def test_the_job_s_own_calls_of_fully_shard_change_no_bit(by_ranks: list[Any], linear: bool) -> None:
    (plain, _), *_, (by_hand, measured) = by_ranks[0][linear]
    assert by_hand == plain
    job = replace(make_job(linear=linear), shard=shard_by_hand)
    trace = capture_step(job, FSDP2, resolve_device("cpu"), steps=1)
    assert len(sent_bytes(trace, GATHERS)) == 1 + BLOCKS
    predicted = estimate_trace(trace, resolve_device("cpu")).predicted_peak_allocated_bytes
    parameters = sum(parameter.nbytes for parameter in Net(linear=linear).parameters())
    assert 0.97 * predicted <= measured <= predicted + parameters


def test_a_model_that_its_job_does_not_shard_is_refused() -> None:
    job = replace(make_job(linear=True), shard=lambda model, mesh: fully_shard(model.head, mesh=mesh))
    with pytest.raises(UsageError, match=r"Call it last, on the model that it is given"):
        capture_step(job, FSDP2, resolve_device("cpu"))


@pytest.mark.parametrize(
    "asked", [{"param_dtype": "bfloat16", "precision": "bf16"}, {"offload_parameters": True}]
)
def test_what_the_job_s_own_calls_decide_is_refused_elsewhere(asked: dict[str, Any]) -> None:
    job = replace(make_job(linear=True), shard=shard_by_hand)
    with pytest.raises(UsageError, match=f"{next(iter(asked))}=.* has no effect on Job.shard"):
        bf.plan(job, "cpu", global_batch_size=8, world_size=2, parallelism="fsdp2", **asked)


@pytest.mark.slow
def test_gathering_in_halves_is_autocast_where_layers_are_linear_and_near_it_elsewhere(
    by_ranks: list[Any],
) -> None:
    """Autocast rounds the weights of linear layers alike; it does not round norms, embeddings and what comes
    into a block. Both are sums of terms rounded to 8 bits, 2**-8 each."""
    (plain, _), _, (halves, _), *_ = by_ranks[0][True]
    assert halves == plain
    (plain, _), _, (halves, _), *_ = by_ranks[0][False]
    assert halves != plain
    assert halves == pytest.approx(plain, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_the_memory_of_each_way_is_as_predicted(by_ranks: list[Any], way: int, linear: bool) -> None:
    """More where gloo's threads have not let go of their copies yet: at most those of two gathers of all."""
    trace = captured(WAYS[way], linear=linear, steps=2)
    predicted = estimate_trace(trace, resolve_device("cpu")).predicted_peak_allocated_bytes
    measured = min(ranks[linear][way][1] for ranks in by_ranks)
    parameters = sum(parameter.nbytes for parameter in Net(linear=linear).parameters())
    assert 0.97 * predicted <= measured <= predicted + parameters


def test_holding_gathers_each_unit_once() -> None:
    plain, holding = captured(FSDP2), captured(HOLDING)
    assert len(sent_bytes(plain, GATHERS)) == 1 + 2 * BLOCKS
    assert len(sent_bytes(holding, GATHERS)) == 1 + BLOCKS
    assert sent_bytes(holding, REDUCES) == sent_bytes(plain, REDUCES)
    at_peak = [dict(estimate_trace(trace, resolve_device("cpu")).breakdown) for trace in (plain, holding)]
    held_bytes = [parts[Category.SAVED_TENSORS] for parts in at_peak]
    of_a_block = sum(parameter.nbytes for parameter in Net(linear=True).blocks[0].parameters())
    assert held_bytes[1] - held_bytes[0] >= (BLOCKS - 2) * of_a_block
    assert sum(at_peak[1].values()) > sum(at_peak[0].values())
    assert not any(op.name == GATHERS and op.phase is Phase.BACKWARD for op in holding.ops)


def test_halves_are_sent_and_gradients_are_averaged_whole() -> None:
    plain, halves = captured(FSDP2), captured(HALVES)
    assert sum(sent_bytes(halves, GATHERS)) * 2 == sum(sent_bytes(plain, GATHERS))
    assert sent_bytes(halves, REDUCES) == sent_bytes(plain, REDUCES)
    device = resolve_device("cpu")
    seconds = [step_seconds(trace, device).communication_seconds for trace in (plain, halves)]
    sent = [sum(sent_bytes(trace, GATHERS) + sent_bytes(trace, REDUCES)) for trace in (plain, halves)]
    assert seconds[1] / seconds[0] == pytest.approx(sent[1] / sent[0])


def test_what_is_held_is_let_go_of_before_the_micro_batch_gets_smaller() -> None:
    """Where memory runs out on one of several ranks, which cannot plan anew."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        lower = MemoryFallback(make_job(linear=True), None, torch.device("cpu"))
        assert lower(HOLDING) == FSDP2
        assert lower(FSDP2) == FSDP2.with_micro_batch_size(FSDP2.micro_batch_size // 2)
    finally:
        torch.distributed.destroy_process_group()


def test_a_plan_holds_what_is_gathered_where_there_is_room() -> None:
    options: dict[str, Any] = {
        "global_batch_size": 16,
        "world_size": 2,
        "parallelism": "fsdp2",
        "recompute": "none",
    }
    options |= {"precision": "bf16", "micro_batch_size": 8}
    roomy = bf.plan(make_job(linear=True), "A100 40GB SXM", **options)
    assert not roomy.settings.reshard_after_forward
    pinned = bf.plan(make_job(linear=True), "A100 40GB SXM", **options, reshard_after_forward=True)
    assert pinned.settings.reshard_after_forward
    assert pinned.predicted_step_seconds > roomy.predicted_step_seconds
    halves = bf.plan(make_job(linear=True), "A100 40GB SXM", **options, param_dtype="bfloat16")
    assert halves.settings.param_dtype == "bfloat16"
    assert any("Parameters are gathered in bfloat16" in note for note in halves.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"reshard_after_forward": False, "parallelism": Parallelism.DDP},
            "is for FSDP2, .* and the parallelism is ddp",
        ),
        (
            {"param_dtype": "bfloat16", "parallelism": Parallelism.DDP},
            "is for FSDP2, .* and the parallelism is ddp",
        ),
        ({"param_dtype": "bfloat16", "precision": Precision.FP32}, "under fp32; it can be 'bfloat16' under"),
        ({"param_dtype": "float16"}, "gathered in 'float16' under bf16"),
    ],
)
def test_what_cannot_be_gathered_so_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(FSDP2, **changes)
    options = {"global_batch_size": 8, "param_dtype": "bfloat16", "precision": "bf16"}
    with pytest.raises(UsageError, match="divides a model among several ranks"):
        bf.plan(make_job(linear=True), "cpu", **options)
    with pytest.raises(UsageError, match=r"is for FSDP2, .* and the parallelism is ddp"):
        bf.plan(make_job(linear=True), "cpu", **options, world_size=2, parallelism="ddp")


def test_batch_norm_is_not_gathered_in_halves() -> None:
    """Its kernels want parameters and running statistics of one type, and nothing casts the statistics."""
    normalised = replace(
        make_job(linear=True), model=lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    )
    capture_step(normalised, FSDP2, resolve_device("cpu"))
    with pytest.raises(UsageError, match="1 is a BatchNorm, whose parameters are not gathered"):
        capture_step(normalised, HALVES, resolve_device("cpu"))


def test_adafactor_is_refused_where_parameters_are_divided() -> None:
    """DTensor would raise in its first step, as FSDP2 itself lets it."""
    job = replace(make_job(linear=True), optimizer=lambda parameters: torch.optim.Adafactor(parameters))
    with pytest.raises(UsageError, match="Adafactor is not trained under FSDP2"):
        capture_step(job, FSDP2, resolve_device("cpu"))
    options: dict[str, Any] = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "recompute": "none",
        "world_size": 2,
    }
    found = bf.plan(job, "cpu", **options)
    assert found.settings.parallelism is Parallelism.DDP
    assert any("FSDP2 is not considered: Adafactor" in note for note in found.notes)


def test_with_offload_parameters_a_gpu_holds_no_part_and_copies_what_it_gathers() -> None:
    """Beside what is gathered and saved for backward, there are copies of a unit's parts at a time."""
    ranks = replace(OFFLOADED, world_size=8, micro_batch_size=1, gradient_accumulation_steps=2)
    traces = []
    for how in (replace(ranks, offload_parameters=False), ranks):
        traces.append(capture_step(make_job(linear=False), how, find_device("RTX 3090"), steps=2))
    plain, offloaded = traces
    parts = sum(parameter.nbytes for parameter in Net(linear=False).parameters()) / 8
    held = {
        category: [most_held_bytes(trace, category) for trace in traces]
        for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    }
    assert all(on_device >= 0.99 * parts and on_host == 0 for on_device, on_host in held.values())
    assert 4 * parts <= offloaded.host_state_bytes < 4.2 * parts
    assert sent_bytes(offloaded, GATHERS) == sent_bytes(plain, GATHERS)
    assert sent_bytes(offloaded, REDUCES) == sent_bytes(plain, REDUCES)
    peaks = [predict_memory(trace).peak_allocated_bytes for trace in traces]
    rounding = 4 * 512 * sum(1 for _ in Net(linear=False).parameters())
    assert 3 * parts <= peaks[0] - peaks[1] <= 4.2 * parts + rounding
    assert all(op.on_host for op in offloaded.ops if op.phase is Phase.OPTIMIZER)
    assert not any(op.on_host for op in offloaded.ops if op.phase is Phase.FORWARD)


def test_offload_parameters_is_planned_for_fsdp2_alone_and_takes_its_time() -> None:
    plan = bf.plan(make_job(linear=False), "RTX 3090", global_batch_size=8, world_size=4, parallelism="fsdp2")
    offloaded = bf.plan(
        make_job(linear=False),
        "RTX 3090",
        global_batch_size=8,
        world_size=4,
        parallelism="fsdp2",
        offload_parameters=True,
    )
    assert offloaded.settings.offload_parameters
    assert offloaded.predicted_step_seconds > plan.predicted_step_seconds
    assert offloaded.predicted_peak_allocated_bytes < plan.predicted_peak_allocated_bytes
    assert any("in the host's memory" in note for note in offloaded.notes)
    with pytest.raises(UsageError, match="offload_parameters=True is for FSDP2"):
        Settings(micro_batch_size=1, offload_parameters=True)
    with pytest.raises(UsageError, match="keeps the optimizer on the host already"):
        replace(OFFLOADED, offload_optimizer=True)
