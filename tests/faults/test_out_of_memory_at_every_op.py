"""Memory runs out at each op of a step in turn, and the run ends as if it had not, bit for bit."""

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from brimful.distributed.ranks import SINGLE
from brimful.distributed.strategies import DataParallel
from brimful.execution.executor import StepExecutor
from brimful.job import Job
from brimful.optimizers import named_optimizer
from brimful.settings import Action, ChunkedLoss, OptimizerImplementation, Precision, Settings, UnitAction
from brimful.trainer.state import TrainState
from brimful.trainer.step.runner import StepRunner
from brimful.transforms import AppliedFormat
from helpers.faults import OutOfMemoryAt

# B batch, D width

STEPS = 3
WIDTH, CLASSES, BATCH = 6, 4, 4


class Net(nn.Module):
    """Statistics, counters, masks: all that a second try could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def noisy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = random.random() + float(np.random.rand())
    return F.cross_entropy(model(batch["x"] + 0.01 * noise), batch["y"])


def simple_net() -> nn.Module:
    """Next to nothing but parameters of several shapes."""
    return nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.LayerNorm(CLASSES))


def settings(**changes) -> Settings:
    return replace(Settings(micro_batch_size=BATCH // 2, gradient_accumulation_steps=2), **changes)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(BATCH, WIDTH, generator=generator),
            "y": torch.randint(CLASSES, (BATCH,), generator=generator),
        }
        for _ in range(STEPS)
    ]


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def trained(
    make_model: Callable[[], nn.Module],
    how: Settings,
    make_optimizer: Callable,
    disturbed_step: int,
    number: int | None = None,
) -> tuple[dict, OutOfMemoryAt, list]:
    """Everything that a run leaves behind, its disturbance, and what was told of it."""
    seed()
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    recoveries: list = []
    job = Job(model=make_model, loss=noisy_loss, batch={})
    device = torch.device("cpu")
    run = TrainState(
        executor=StepExecutor(job, how, model, optimizer, device=device, max_gradient_norm=0.1),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        average=None,
        stream=None,
        ranks=SINGLE,
        parallel=DataParallel(job),
        layout=AppliedFormat(model, None),
        rates=(),
        seed=0,
        settings=how,
    )
    steps = StepRunner(
        job,
        run,
        shrink=lambda _settings: pytest.fail("a single failure asks for nothing less"),
        on_recovery=recoveries.append,
    )
    fault = OutOfMemoryAt(number)
    losses = []
    for index, batch in enumerate(batches()):
        if index == disturbed_step:
            with fault:
                record = steps.run(batch, epoch=1)
        else:
            record = steps.run(batch, epoch=1)
        losses.append((record.loss, record.gradient_norm))
    steps.close()
    state = {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "scale": None if (scaler := run.executor.scaler) is None else scaler.state_dict(),
    }
    return state, fault, recoveries


def assert_same(found: dict, expected: dict) -> None:
    assert [leaf for leaf in tree_leaves(found) if isinstance(leaf, str)] == [
        leaf for leaf in tree_leaves(expected) if isinstance(leaf, str)
    ]
    numbers = (tree_map_only(str, lambda _text: None, each) for each in (found, expected))
    torch.testing.assert_close(*numbers, rtol=0, atol=0, equal_nan=True)


RECOMPUTED = (
    UnitAction(fqn="blocks.0", action=Action.RECOMPUTE),
    UnitAction(fqn="blocks.1", action=Action.SAVE, saved=("addmm#0",)),
)
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw amsgrad": partial(torch.optim.AdamW, lr=0.1, foreach=False, amsgrad=True),
    "adam with decay": partial(torch.optim.Adam, lr=0.1, foreach=True, weight_decay=0.1),
    "plain sgd": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, foreach=False, momentum=0.9, weight_decay=0.1),
    "sgd foreach": partial(
        torch.optim.SGD, lr=0.1, foreach=True, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, foreach=False, centered=True, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1, foreach=False),
    "radam": partial(torch.optim.RAdam, lr=0.1, foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=0.1, foreach=True),
    "muon": named_optimizer("muon", learning_rate=0.1),
}


@pytest.mark.sweep
@pytest.mark.parametrize("step", range(STEPS), ids=["first", "second", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_finished_wherever_memory_runs_out(name, step):
    run = partial(trained, simple_net, Settings(micro_batch_size=BATCH), OPTIMIZERS[name], step)
    expected, counted, _ = run()
    assert counted.raised == 0
    first_of_update = max(i for i, op in enumerate(counted.ops) if "linalg_vector_norm" in op)
    for number in range(first_of_update, len(counted.ops)):
        found, fault, _recoveries = run(number)
        assert fault.raised == 1
        assert_same(found, expected)


@pytest.fixture(autouse=True)
def quick():
    """One thread is enough for tiny ops; garbage is looked for after each fault, among new objects only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "how",
    [
        settings(),
        settings(units=RECOMPUTED),
        settings(precision=Precision.FP16),
        settings(precision=Precision.BF16),
        settings(chunked_loss=ChunkedLoss(layer="head", chunks=2)),
        settings(precision=Precision.FP16, optimizer_implementation=OptimizerImplementation.FUSED),
    ],
    ids=["plain", "recomputed", "fp16", "bf16", "loss in chunks", "fp16 fused"],
)
def test_a_step_is_taken_once_wherever_memory_runs_out(how):
    is_fused = how.optimizer_implementation is not None
    make = OPTIMIZERS["adamw fused" if is_fused else "adamw foreach"]
    step = 2 if how.precision is Precision.FP16 else 1  # the scaler skips the first
    run = partial(trained, Net, how, make, step)
    expected, counted, _ = run()
    for number in range(len(counted.ops)):
        found, fault, recoveries = run(number)
        assert fault.raised == 1
        assert all(recovery.before == recovery.after for recovery in recoveries)
        assert_same(found, expected)


class LateHead(nn.Module):
    """Its second head gets a gradient in the last batch only, which begins with a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.heads[0](x)
        return first + self.heads[1](x) if bool((x > 50).any()) else first


def late_batches(ordinary=batches) -> list[dict[str, Tensor]]:
    found = ordinary()
    found[-1]["x"][0, 0] = 100.0
    return found


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "sgd"])
def test_parameters_whose_first_gradient_comes_late_are_updated_once(name, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "batches", late_batches, raising=True)
    run = partial(trained, LateHead, Settings(micro_batch_size=BATCH), OPTIMIZERS[name], STEPS - 1)
    expected, counted, _ = run()
    for number in range(len(counted.ops)):
        assert_same(run(number)[0], expected)
