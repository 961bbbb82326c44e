"""An optimizer on the host is the same training: on a CPU to the last bit, as its kernels are the host's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.batches import BatchLayout
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import PartialUpdateError, UsageError
from brimful.execution import host_optimizer
from brimful.execution.host_optimizer import UpdateOnHost
from brimful.memory import most_held_bytes, predict_memory
from brimful.profiling import measure_step
from brimful.settings import Parallelism, Precision, Settings
from brimful.trace import Category, Phase
from brimful.trainer import Trainer
from brimful.transforms import host_link
from helpers.faults import OutOfMemoryAt
from helpers.late_streams import garbage, stand_in_for_streams
from helpers.tiny_jobs import Net, all_samples, make_job
from helpers.updates import OPTIMIZERS, Deep, assert_same, deep_job

ON_HOST = Settings(micro_batch_size=8, gradient_accumulation_steps=2, offload_optimizer=True)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every model takes several, and the largest parameters are alone in one."""
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", 1024)


def trained(settings: Settings, **options: Any) -> tuple[Trainer, Any]:
    job = make_job(optimizer=options.pop("optimizer", OPTIMIZERS["adamw"]))
    trainer = Trainer(job, settings, device="cpu", **{"show_progress": False, "steps": 4} | options)
    return trainer, trainer.fit()


class Layouts(nn.Module):
    """Parameters of several layouts and types, one that is frozen, one that no loss reaches, one of no numbers.

    Torch's fused kernel on a CPU is wrong about one with gaps: it takes the memory for a row (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 8).t())
        self.gap = nn.Parameter(torch.randn(8, 6)[:, :3])
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(700))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        made = self.convolution(x).mean((2, 3)) @ self.transposed
        return (
            made.sum() * self.scale + (self.gap * self.frozen * self.precise.float()).sum() + self.empty.sum()
        )


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adafactor", "muon", "adamw fused"}))
def test_any_layout_type_and_parameter_without_gradient_is_updated_alike(optimizer: str) -> None:
    torch.manual_seed(0)
    expected = Layouts()
    model = copy.deepcopy(expected)
    theirs, ours = OPTIMIZERS[optimizer](expected.parameters()), OPTIMIZERS[optimizer](model.parameters())
    on_host = UpdateOnHost(ours)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8)
        for each in (expected, model):
            each.zero_grad()
            each(x).backward()
        theirs.step()
        on_host.run(ours.step)
    assert_same(model, expected)
    states, expected_states = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert states.keys() == expected_states.keys()
    for index, state in expected_states.items():
        for name, value in state.items():
            assert torch.equal(states[index][name], value), (index, name)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_makes_the_same_parameters_to_the_last_bit(optimizer: str) -> None:
    options: dict[str, Any] = {
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": lambda of: torch.optim.lr_scheduler.StepLR(of, 1, gamma=0.5),
        "max_gradient_norm": 0.5,
        "ema_decay": 0.9,
    }
    plain, expected = trained(replace(ON_HOST, offload_optimizer=False), **options)
    trainer, result = trained(ON_HOST, **options)
    assert_same(trainer.model, plain.model)
    assert result.losses == expected.losses


@pytest.mark.filterwarnings("ignore:the run was saved with")
@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("saved_on_host", [True, False])
@pytest.mark.parametrize("resumed_on_host", [True, False])
def test_a_saved_run_goes_on_bit_for_bit_on_the_host_or_not(
    saved_on_host: bool, resumed_on_host: bool, optimizer: str, tmp_path: Path
) -> None:
    saved, resumed = (replace(ON_HOST, offload_optimizer=each) for each in (saved_on_host, resumed_on_host))
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer]}
    whole, expected = trained(ON_HOST, steps=6, **options)
    trained(saved, steps=3, run_dir=tmp_path / "run", **options)
    trainer, result = trained(resumed, steps=6, run_dir=tmp_path / "run", resume=True, **options)
    assert_same(trainer.model, whole.model)
    assert result.losses == expected.losses


def test_a_state_is_loaded_on_the_host_with_its_parameters_left_alone() -> None:
    model, other = Net(), Net()
    optimizer, saved = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    for parameter in other.parameters():
        parameter.grad = torch.randn_like(parameter)
    saved.step()
    before = [group["params"] for group in optimizer.param_groups]
    with UpdateOnHost(optimizer).loading():
        assert not any(parameter in set(before[0]) for parameter in optimizer.param_groups[0]["params"])
        optimizer.load_state_dict(saved.state_dict())
    assert [group["params"] for group in optimizer.param_groups] == before
    assert set(optimizer.state) == set(model.parameters())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg"], saved.state[theirs]["exp_avg"])


def test_a_state_that_cannot_be_loaded_leaves_the_one_that_is_there() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([parameter])
    on_host = UpdateOnHost(optimizer)
    on_host.run(optimizer.step)
    before = optimizer.state[parameter]["exp_avg"]
    with pytest.raises(ValueError, match="different number of parameter groups"), on_host.loading():
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.state[parameter]["exp_avg"] is before
    assert optimizer.param_groups[0]["params"][0] is parameter


@pytest.mark.usefixtures("small_buckets")
def test_what_is_larger_than_a_bucket_is_alone_in_one_and_the_others_are_not_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    def note(sources: list[Tensor], hosted: list[Tensor]) -> None:
        sent.append(sum(source.nbytes for source in sources))
        host_link.send_to_host(sources, hosted)

    monkeypatch.setattr(host_optimizer, "send_to_host", note)
    sizes = [10, 500, 10, *[60] * 8]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    UpdateOnHost(optimizer).run(optimizer.step)
    assert sent[:2] == [2 * 4 * 10, 2 * 4 * 500]
    assert max(sent[2:]) <= 1024
    assert sum(sent) == 2 * 4 * sum(sizes)
    assert all(bool((parameter == -1).all()) for parameter in parameters)


def test_state_that_an_optimizer_has_already_and_numbers_of_its_groups_are_taken_along() -> None:
    """Adagrad makes its state at once; a learning rate may be a tensor."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adagrad([parameter], lr=torch.tensor(0.5))
    on_host = UpdateOnHost(optimizer)
    assert host_optimizer.state_bytes(optimizer) == 3 * 4 + 4
    on_host.run(optimizer.step)
    assert parameter.tolist() == pytest.approx([-0.5] * 3)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


def test_a_step_that_the_loss_scaler_skips_changes_nothing() -> None:
    """It tells a fused kernel by `found_inf`, and all others by not calling them."""
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    on_host = UpdateOnHost(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    before = copy.deepcopy(model)
    optimizer.found_inf = torch.ones(1)
    on_host.run(optimizer.step)
    assert_same(model, before)
    assert not optimizer.state
    optimizer.found_inf = torch.zeros(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    on_host.run(optimizer.step)
    assert not torch.equal(next(model.parameters()), next(before.parameters()))
    assert optimizer.found_inf is not None


def test_under_fp16_the_curve_is_that_of_plain_training() -> None:
    fused = {"optimizer": OPTIMIZERS["adamw fused"]}
    fp16 = replace(ON_HOST, precision=Precision.FP16)
    _, expected = trained(replace(fp16, offload_optimizer=False), **fused)
    _, result = trained(fp16, **fused)
    assert result.losses == expected.losses


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw foreach", "adamw fused", "sgd"])
def test_what_it_takes_on_a_cpu_is_predicted(optimizer: str) -> None:
    """There the host's memory is the device's, so that everything counts, but for tensors of one number."""
    job = deep_job(optimizer=OPTIMIZERS[optimizer])
    predicted = bf.estimate(job, "cpu", micro_batch_size=2, offload_optimizer=True)
    measured = measure_step(job, replace(ON_HOST, micro_batch_size=2, gradient_accumulation_steps=1), steps=1)
    beyond = measured.measured_peak_allocated_bytes - predicted.predicted_peak_allocated_bytes
    assert 0 <= beyond <= 64


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw foreach", "adagrad"])
def test_on_a_gpu_neither_state_nor_what_updates_make_is_counted(optimizer: str) -> None:
    """`foreach` makes temporaries as large as all parameters, which are the host's then."""
    job = deep_job(optimizer=OPTIMIZERS[optimizer])
    capture = partial(capture_step, job, device=find_device("RTX 3090"))
    trace = capture(replace(ON_HOST, micro_batch_size=2))
    plain = capture(replace(ON_HOST, micro_batch_size=2, offload_optimizer=False))
    parameters = 8 * (64 * 64 + 64) * 4
    state = parameters if optimizer == "adagrad" else 2 * parameters
    assert most_held_bytes(plain, Category.OPTIMIZER_STATE) >= state
    assert most_held_bytes(trace, Category.OPTIMIZER_STATE) == 0
    assert state <= trace.host_state_bytes < 1.01 * state
    peaks = [predict_memory(each).peak_allocated_bytes for each in (plain, trace)]
    assert peaks[0] - peaks[1] >= 0.99 * state
    assert trace.host_staging_bytes == 2 * 2 * 64 * 64 * 4  # the largest parameter and its gradient, twice
    made_in_update = [
        storage.size_bytes
        for storage in trace.storages
        if storage.op is not None and trace.ops[storage.op].phase is Phase.OPTIMIZER
    ]
    assert sum(made_in_update) < parameters / 100  # norms
    on_host = {op.name for op in trace.ops if op.on_host}
    assert on_host
    assert any("_foreach_" in name for name in on_host) is (optimizer == "adamw foreach")  # as asked, else not
    assert not any(op.on_host for op in plain.ops)


COPIES = ("send_to_host", "arrived_on_host", "send_to_device", "to_device_done")


def sent_at_once(sources: list[Tensor], hosted: list[Tensor]) -> None:
    """As on CUDA, but for the wait until what is in the row has left it."""
    stream = host_link._streams(sources[0].device).to_host
    with torch.cuda.stream(stream):
        host_link._copy(sources, hosted)


def updated_over_late_streams(monkeypatch: pytest.MonkeyPatch, left_out: str | None = None) -> None:
    """Three steps as on CUDA, each copy as late as what waits for it permits, beside three plain ones."""
    stand_in_for_streams(monkeypatch)
    for name in COPIES:
        as_on_cuda = getattr(host_link, f"_{name}_cuda")
        without = sent_at_once if name == "send_to_host" else lambda *_: None
        monkeypatch.setattr(host_optimizer, name, without if name == left_out else as_on_cuda)
    torch.manual_seed(0)
    expected = Deep()
    model = copy.deepcopy(expected)
    theirs, ours = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (expected, model))
    on_host = UpdateOnHost(ours)
    for memory in on_host.staging:
        garbage(memory)
    for _ in range(3):
        x = torch.randn(4, 64)
        for each in (expected, model):
            each.zero_grad()
            each(x).square().mean().backward()
        theirs.step()
        on_host.run(ours.step)
        assert_same(model, expected)


@pytest.mark.usefixtures("small_buckets")
def test_updates_are_the_same_however_late_copies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    updated_over_late_streams(monkeypatch)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("left_out", ["send_to_host", "arrived_on_host", "to_device_done"])
def test_without_a_wait_the_stand_in_shows_it(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    with pytest.raises(AssertionError):
        updated_over_late_streams(monkeypatch, left_out)


def test_memory_that_runs_out_in_the_update_ends_the_run() -> None:
    def fails(name: str, _args: Any) -> bool:
        return name.startswith("aten.addcdiv_")

    with (
        OutOfMemoryAt(fails=fails),
        pytest.raises(PartialUpdateError, match="update of parameters on the host"),
    ):
        trained(ON_HOST)


@pytest.mark.usefixtures("small_buckets")
def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Embedding(300, 4, sparse=True), nn.Linear(4, 300))
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reversed([*model.parameters()]))
    on_host = UpdateOnHost(optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        on_host.run(optimizer.step)
    assert_same(model, before)


def test_what_it_cannot_go_with_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="DeepSpeed does"):
        replace(ON_HOST, world_size=2, parallelism=Parallelism.ZERO1)
    with pytest.raises(UsageError, match="after backward"):
        Settings(micro_batch_size=8, optimizer_in_backward=True, offload_optimizer=True)
    with pytest.raises(UsageError, match="LBFGS may look at all of them"):
        UpdateOnHost(torch.optim.LBFGS(Net().parameters()))
    with pytest.raises(UsageError, match="this AdamW is capturable"):
        UpdateOnHost(torch.optim.AdamW(Net().parameters(), capturable=True))


def test_it_is_in_force_in_a_loop_of_ones_own_and_in_what_is_kept_of_settings() -> None:
    torch.manual_seed(0)
    expected = Net()
    model = copy.deepcopy(expected)
    for each, settings in ((expected, replace(ON_HOST, offload_optimizer=False)), (model, ON_HOST)):
        torch.manual_seed(1)  # of dropout
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        step = bf.apply(settings, make_job(), each, optimizer)
        step(BatchLayout().take(all_samples(), torch.arange(16)))
        saved = optimizer.state_dict()
        with step.loading():
            is_own = optimizer.param_groups[0]["params"][0] is next(each.parameters())
            assert is_own is not settings.offload_optimizer
            optimizer.load_state_dict(saved)
        step(BatchLayout().take(all_samples(), torch.arange(16)))
        step.remove()
    assert_same(model, expected)
    assert "optimizer on the host" in ON_HOST.describe()
