"""What is said of memory that ran out in a watched run, and what would take less."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brimful.doctor import Watch, watched_document, watched_text
from brimful.doctor.savings import savings
from brimful.memory import predict_memory
from brimful.trace import Category

WIDTH, BLOCKS, SAMPLES = 64, 8, 2048
TOO_MUCH = 1 << 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpoints, self.fails = checkpoints, fails

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        if self.fails:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return x


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def watched(model: Net, *, samples: int = SAMPLES, micro_batches: int = 1, optimizer_of: Any = adamw) -> Watch:
    torch.manual_seed(0)
    optimizer = optimizer_of(model.parameters())
    with Watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            for _micro_batch in range(micro_batches):
                (model(torch.randn(samples, WIDTH)).square().mean() / micro_batches).backward()
            optimizer.step()
    return watch


def peak(watch: Watch) -> int:
    return predict_memory(watch.evidence().trace).peak_allocated_bytes


def test_an_error_is_explained_by_what_was_asked_for_and_what_held_the_memory() -> None:
    model = Net(fails=True)
    watch = Watch()
    with pytest.raises(RuntimeError, match="allocate"), watch:
        model(torch.randn(SAMPLES, WIDTH)).sum().backward()
    evidence = watch.evidence()
    assert evidence.failed is not None
    assert evidence.failed.requested_bytes == TOO_MUCH
    assert "test_out_of_memory.py:" in evidence.failed.line
    held = dict(predict_memory(evidence.trace).breakdown)
    assert held[Category.PARAMETERS] == sum(each.nbytes for each in model.parameters())
    saved_in_block = 2 * 4 * WIDTH + WIDTH  # before and after GELU, and what the block returns
    assert held[Category.SAVED_TENSORS] == BLOCKS * saved_in_block * SAMPLES * 4
    assert held[Category.TEMPORARIES] - TOO_MUCH <= SAMPLES * WIDTH * 4
    text = watched_text(evidence)
    assert "asked for 1048576 GiB more" in text
    assert "1048576 GiB" not in text.partition("at the peak")[2].partition("would take less")[0]
    assert "█" in re.search(r"saved tensors.*", text)[0]  # type: ignore[index]
    assert "activation checkpointing" in text
    document = watched_document(evidence)
    assert document["failed"]["requested_bytes"] == TOO_MUCH
    assert document["peak_bytes"] == sum(document["categories"].values()) < TOO_MUCH


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(TOO_MUCH, dtype=torch.uint8)


def test_memory_that_runs_out_in_the_first_backward_of_a_model_made_under_watch() -> None:
    watch, models = Watch(), list[nn.Linear]()

    def train() -> None:
        models.append(nn.Linear(WIDTH, WIDTH))
        FailsInBackward.apply(models[0](torch.randn(SAMPLES, WIDTH))).sum().backward()

    with pytest.raises(RuntimeError, match="allocate"), watch:
        train()
    document = watched_document(watch.evidence())
    assert document["categories"]["parameters"] == sum(each.nbytes for each in models[0].parameters())
    assert document["peak_phase"] == "backward"
    assert "at the peak (backward, " in watched_text(watch.evidence())


def test_parameters_are_named_where_the_first_forward_fails() -> None:
    watch, models = Watch(), list[nn.Linear]()

    def train() -> None:
        models.append(nn.Linear(WIDTH, WIDTH))
        models[0](torch.randn(SAMPLES, WIDTH + 1))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), watch:
        train()
    of_parameters = sum(each.nbytes for each in models[0].parameters())
    assert watched_document(watch.evidence())["categories"]["parameters"] == of_parameters


def test_smaller_micro_batches_halve_no_data_set_and_no_gradient_of_a_weight() -> None:
    samples, whole = 8, torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = adamw(model.parameters())
    with Watch() as watch:
        for x in whole.split(samples)[:3]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    evidence = watch.evidence()
    found = savings(predict_memory(evidence.trace), evidence)
    assert [each.change for each in found if each.change.startswith("micro-batches")] == []


def test_memory_that_ran_out_in_a_recorded_step_and_was_caught_is_mentioned() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with Watch() as watch:
        for step in range(4):
            model.fails = step == 1
            try:
                model(torch.randn(SAMPLES, WIDTH)).square().mean().backward()
            except RuntimeError:
                continue
            optimizer.step()
    evidence = watch.evidence()
    assert evidence.failed is None
    (note,) = evidence.notes
    assert re.match(r"memory ran out in .*test_out_of_memory.py:\d+, and the run went on", note)


@pytest.mark.parametrize(("change", "other"), [("checkpointing", {}), ("micro-batches", {"micro_batches": 2})])
def test_a_change_saves_what_is_said(change: str, other: dict[str, int]) -> None:
    plain = watched(Net())
    evidence = plain.evidence()
    found = next(each for each in savings(predict_memory(evidence.trace), evidence) if change in each.change)
    checkpoints = change == "checkpointing"
    changed = watched(Net(checkpoints=checkpoints), samples=SAMPLES // other.get("micro_batches", 1), **other)
    assert peak(plain) - peak(changed) == pytest.approx(found.size_bytes, rel=0.1)


def test_a_run_whose_peak_is_in_the_optimizer_saves_state_alone() -> None:
    evidence = watched(Net(), samples=2).evidence()
    (found,) = savings(predict_memory(evidence.trace), evidence)
    assert "8 bits" in found.change
    state_bytes = 8 * sum(each.numel() for each in Net().parameters())
    assert found.size_bytes == pytest.approx(state_bytes * (1 - 2.03 / 8), rel=0.01)


@pytest.mark.parametrize(
    ("optimizer_of", "name"),
    [
        (adamw, "AdamW in 8 bits"),
        (lambda parameters: torch.optim.Adam(parameters, fused=True), "Adam in 8 bits"),
        (lambda parameters: torch.optim.Adam(parameters, fused=True, amsgrad=True), None),
        (torch.optim.NAdam, None),
    ],
)
def test_the_optimizer_in_8_bits_is_the_scripts_own_if_it_has_such_a_form(
    optimizer_of: Any, name: str | None
) -> None:
    evidence = watched(Net(), samples=2, optimizer_of=optimizer_of).evidence()
    found = [
        each.change for each in savings(predict_memory(evidence.trace), evidence) if "8 bits" in each.change
    ]
    assert len(found) == (name is not None)
    assert all(each.startswith(str(name)) for each in found)
