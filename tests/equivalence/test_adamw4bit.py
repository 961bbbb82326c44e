"""AdamW with moments of four bits: torchao's arithmetic, and a state that is kept, moved and loaded."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.errors import UsageError
from brimful.execution import host_optimizer
from brimful.execution.host_optimizer import UpdateOnHost
from brimful.job import Data, Job
from brimful.optimizers import AdamW4bit, four_bit
from brimful.profiling import measure_step
from brimful.profiling.named_device import resolve_device
from brimful.settings import Parallelism, Settings
from brimful.trainer import Trainer
from helpers import torchao_reference
from helpers.tiny_jobs import make_job
from helpers.torchao_reference import parameters, some, stepped


def moment(optimizer: AdamW4bit, parameter: nn.Parameter, name: str) -> Tensor:
    table = four_bit.SIGNED if name == "exp_avg" else four_bit.UNSIGNED
    kept = optimizer.state[parameter][name]
    whole = four_bit._Moment(kept, 0, parameter.numel(), four_bit._Table(table, kept.device))
    return whole.read().view(parameter.shape)


@pytest.mark.parametrize("dtype", torchao_reference.DTYPES)
def test_it_computes_what_torchaos_does(dtype: str) -> None:
    """torchao's first table is rounded otherwise in the last digit."""
    made = parameters(getattr(torch, dtype))
    optimizer = AdamW4bit(made, **torchao_reference.OPTIONS)
    stepped(optimizer, torchao_reference.STEPS)
    rounded = 1e-5 if dtype == "float32" else 2**-7
    found = json.loads(torchao_reference.PATH.read_text())[dtype]
    packed = [optimizer.state[parameter]["exp_avg"].dtype is torch.uint8 for parameter in made]
    assert packed == [True, True, False, False, False]
    for parameter, expected, is_packed in zip(made, found, packed, strict=True):
        if not is_packed and dtype == "bfloat16":  # torchao keeps those in bfloat16
            continue
        assert some(parameter) == pytest.approx(expected["parameter"], rel=rounded, abs=rounded / 8)
        for name in ("exp_avg", "exp_avg_sq"):
            assert some(moment(optimizer, parameter, name)) == pytest.approx(expected[name], rel=1e-6, abs=0)


def test_each_moment_is_off_by_no_more_than_its_table_is_coarse() -> None:
    (parameter,) = parameters()[:1]
    optimizer = AdamW4bit([parameter])
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    optimizer.step()
    exact = {"exp_avg": 0.1 * parameter.grad, "exp_avg_sq": 0.001 * parameter.grad.square()}
    # half the widest gap; the first table ends before −1, the second begins at a sixteenth
    coarse = {"exp_avg": (0.8875 - 0.6625) / 2, "exp_avg_sq": 1 / 16}
    for name, numbers in exact.items():
        scale = numbers.view(-1, four_bit.BLOCK_NUMBERS).abs().amax(1, keepdim=True)
        off = (moment(optimizer, parameter, name) - numbers).view(scale.shape[0], -1).abs() / scale
        assert coarse[name] * 0.5 < off.max() <= coarse[name] * (1 + 1e-4)


def test_pieces_of_a_parameter_are_updated_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = parameters(), parameters()
    stepped(AdamW4bit(whole), 3)
    monkeypatch.setattr(four_bit, "PIECE_NUMBERS", 5 * four_bit.BLOCK_NUMBERS)
    stepped(AdamW4bit(parts), 3)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_is_in_no_row_is_updated_as_its_copy() -> None:
    (matrix,) = parameters()[:1]
    gaps, turned = nn.Parameter(matrix.detach().repeat(1, 2)[:, :128]), nn.Parameter(matrix.detach().t())
    straight, copied = nn.Parameter(matrix.detach().clone()), nn.Parameter(matrix.detach().t().contiguous())
    for odd, plain in ((gaps, straight), (turned, copied)):
        assert not odd.is_contiguous()
        stepped(AdamW4bit([odd]), 3)
        stepped(AdamW4bit([plain]), 3)
        assert torch.equal(odd, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_is_that_which_was_saved_and_not_the_same_memory(dtype: torch.dtype) -> None:
    """torch casts a state to the type of its parameter, which bytes would not survive."""
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, loaded = AdamW4bit(ours), AdamW4bit(theirs)
    stepped(optimizer, 2)
    saved = optimizer.state_dict()
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            other.copy_(one)
    loaded.load_state_dict(saved)
    before = copy.deepcopy(saved)
    stepped(loaded, 1)
    torch.testing.assert_close(saved, before, rtol=0, atol=0)
    stepped(optimizer, 1)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for name, kept in optimizer.state[one].items():
            assert loaded.state[other][name].dtype is kept.dtype
            assert torch.equal(loaded.state[other][name], kept)


def test_a_copy_of_it_and_a_pickled_one_step_alike() -> None:
    made = parameters()
    optimizer = AdamW4bit(made)
    stepped(optimizer, 2)
    others = [copy.deepcopy((made, optimizer)), pickle.loads(pickle.dumps((made, optimizer)))]
    stepped(optimizer, 1)
    for its, other in others:
        stepped(other, 1)
        assert all(torch.equal(one, two) for one, two in zip(made, its, strict=True))


def test_on_the_host_it_is_updated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", 64 * 1024)
    ours, theirs = parameters(), parameters()
    optimizer, other = AdamW4bit(ours), AdamW4bit(theirs)
    on_host = UpdateOnHost(other)
    stepped(optimizer, 3)
    monkeypatch.setattr(other, "step", lambda step=other.step: on_host.run(step))
    stepped(other, 3)
    for one, its in zip(ours, theirs, strict=True):
        assert torch.equal(one, its)


def job(**changes: Any) -> Job:
    def batch(samples: int) -> Tensor:
        return torch.randn(samples, 64, generator=torch.Generator().manual_seed(samples))

    values: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)),
        "loss": lambda model, x: nn.functional.mse_loss(model(x), x),
        "batch": batch,
        "optimizer": "adamw4bit",
        "data": lambda: Data(train=batch(48)),
    }
    return Job(**values | changes)


def test_its_memory_is_predicted() -> None:
    settings = Settings(micro_batch_size=4)
    predicted = bf.estimate(job(), "cpu", micro_batch_size=4)
    measured = measure_step(job(), settings, steps=3)
    assert predicted.peak_phase == "optimizer"
    beyond = measured.measured_peak_allocated_bytes - predicted.predicted_peak_allocated_bytes
    tables = 2 * 4 * (16 + 15)  # what torch.tensor makes of Python's numbers, and keeps, is not seen
    assert abs(beyond) <= tables
    packed = 2 * 68 * (512 * 64 // 128)  # of each matrix, both moments
    biases = 2 * 4 * (512 + 64)
    assert dict(predicted.breakdown)["optimizer_state"] == 2 * packed + biases + 4 * 4


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def trained(**options: Any) -> dict[str, Tensor]:
        trainer = Trainer(job(), Settings(micro_batch_size=8), device="cpu", show_progress=False, **options)
        trainer.fit()
        weights: dict[str, Tensor] = trainer.model.state_dict()
        return weights

    expected = trained(steps=6)
    trained(steps=3, run_dir=tmp_path / "run")
    resumed = trained(steps=6, run_dir=tmp_path / "run", resume=True)
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


def test_a_plan_takes_it_where_it_is_permitted_and_spares_what_is_short() -> None:
    # 60 million parameters: 8 bytes of state each by AdamW, 1.06 by this
    wide = job(
        model=lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))),
        batch=lambda samples: torch.zeros(samples, 4096),
        optimizer="adamw",
    )
    plain = bf.estimate(wide, "RTX 3090", micro_batch_size=4)
    options: dict[str, Any] = {
        "global_batch_size": 4,
        "budget": plain.predicted_peak_device_bytes - 300 * 2**20,
    }
    plan = bf.plan(wide, "RTX 3090", allow_optimizers="adamw4bit", offload_optimizer=False, **options)
    assert plan.settings.optimizer == "adamw4bit"
    assert any("adamw4bit, which you allowed: it computes other updates" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        AdamW4bit(parameters(), **options)


def test_what_it_does_not_take_is_refused() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = AdamW4bit(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="adamw4bit takes dense gradients"):
        optimizer.step()
    precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
    precise.grad = torch.ones_like(precise)
    with pytest.raises(UsageError, match=r"computes in float32, and a parameter is torch\.float64"):
        AdamW4bit([precise]).step()
    divided = Settings(micro_batch_size=4, world_size=2, parallelism=Parallelism.FSDP2)
    with pytest.raises(UsageError, match="adamw4bit is not trained under FSDP2"):
        capture_step(make_job(optimizer="adamw4bit"), divided, resolve_device("cpu"))
