"""Each check finds the fault that is planted for it, with its line, and is silent without."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import brimful as bf
from brimful.doctor import Watch, watched_text
from brimful.doctor.evaluation import FORWARDS
from brimful.doctor.findings import CHECKS, Finding, findings
from brimful.doctor.not_recomputed import without_recomputation
from brimful.errors import CaptureError
from brimful.memory import live_profile
from brimful.trace import Phase

WIDTH = 32


class Net(nn.Module):
    def __init__(self, *, unused: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 4)
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.body(x)))
        return scores


def data(steps: int = 8, samples: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        yield torch.randn(samples, WIDTH), torch.randint(0, 4, (samples,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def history(faulty: bool) -> None:
    model, total = Net(), torch.zeros(())
    optimizer = sgd(model)
    for x, y in data():
        loss = step(model, optimizer, x, y)
        total = total + (loss if faulty else loss.detach())


def outputs(faulty: bool) -> None:
    model, seen = Net(), []
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)
        seen.append(x) if faulty else seen.append(x.mean().item())


def kept(faulty: bool) -> None:
    model = nn.Linear(WIDTH, 64 * WIDTH)
    optimizer = sgd(model)
    for x, _ in data():
        optimizer.zero_grad()
        scores = model(x)
        scores.square().mean().backward()
        if not faulty:
            del scores
        optimizer.step()


def unread(faulty: bool) -> None:
    model = nn.Linear(WIDTH, 64 * WIDTH)
    optimizer = sgd(model)
    for x, _ in data():
        optimizer.zero_grad()
        hidden = model(x)
        mean = hidden.relu().mean()
        if not faulty:
            del hidden
        mean.backward()
        hidden = None
        optimizer.step()


def evaluation(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)
    model.eval()
    with torch.set_grad_enabled(faulty):
        model(next(data())[0])


def evaluation_in_training_mode(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in data():
            step(model, optimizer, x, y)
        with torch.set_grad_enabled(faulty):
            for x, _ in data(2):
                model(x)


def evaluation_by_the_line_that_trains(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)

    def epoch(trains: bool) -> None:
        for x, y in data():
            loss = functional.cross_entropy(model(x), y)
            if trains:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    for _ in range(2):
        epoch(True)
        with torch.set_grad_enabled(faulty):
            epoch(False)


def evaluation_within(faulty: bool) -> None:
    model, teacher = Net(), Net()
    teacher.eval()
    optimizer = sgd(model)
    for x, _ in data():
        with torch.set_grad_enabled(faulty):
            target = teacher(x).softmax(-1).detach()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def mode(faulty: bool) -> None:
    model = Net(norm=True)
    model.train(not faulty)
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)


def gradients(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data(samples=8):
        optimizer.zero_grad(set_to_none=not faulty)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def added(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not faulty:
            optimizer.zero_grad()


def unused(faulty: bool) -> None:
    model = Net(unused=faulty)
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)


def forgotten(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model.body) if faulty else sgd(model)
    for x, y in data():
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.body, self.head = nn.Sequential(*blocks).requires_grad_(False), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def frozen(faulty: bool) -> None:
    model = Frozen()
    optimizer = sgd(model.head)
    for x, y in data():
        step(model, optimizer, x.requires_grad_(faulty), y)


def retained(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward(retain_graph=faulty)
        optimizer.step()


def accumulated(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for _ in range(8):
        optimizer.zero_grad()
        for x, y in data(4):
            loss = functional.cross_entropy(model(x), y)
            (loss if faulty else loss / 4).backward()
        optimizer.step()


def normalised(faulty: bool) -> None:
    model = Net(norm=faulty)
    optimizer = sgd(model)
    for _ in range(8):
        optimizer.zero_grad()
        for x, y in data(4):
            (functional.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()


def foreach(faulty: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8192), nn.Linear(8192, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=faulty, fused=None if faulty else True)
    for x, y in data(samples=4):
        step(model, optimizer, x, y)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.project, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v)
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


def attention(faulty: bool) -> None:
    model = Attention(not faulty)
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 128, WIDTH)).square().mean().backward()
        optimizer.step()


def logits(faulty: bool) -> None:
    model = nn.Linear(WIDTH, 4096 if faulty else 2)
    optimizer = sgd(model)
    for x, _ in data():
        step(model, optimizer, x, torch.zeros(len(x), dtype=torch.long))


class Slow(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def loading(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    held = (torch.randn(96, WIDTH), torch.zeros(96, dtype=torch.long))
    batches = DataLoader(Slow(*held), batch_size=8) if faulty else [[each[:8] for each in held]] * 12
    for x, y in batches:
        step(model, optimizer, x, y)


def flushed(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)
        if faulty:
            torch.cuda.empty_cache()


def anomaly(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    with torch.autograd.set_detect_anomaly(faulty):
        for x, y in data():
            step(model, optimizer, x, y)


def benchmark(faulty: bool) -> None:
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    optimizer = sgd(model)
    torch.backends.cudnn.benchmark = True
    try:
        for number in range(8):
            step(model, optimizer, torch.randn(4, 1, 16 + faulty * number), torch.zeros(4, dtype=torch.long))
    finally:
        torch.backends.cudnn.benchmark = False


def parallel(faulty: bool) -> None:
    model = nn.DataParallel(Net()) if faulty else Net()
    optimizer = sgd(model)
    for x, y in data():
        step(model, optimizer, x, y)


def checkpointed(faulty: bool) -> None:
    model, first = Net(), Net().body
    optimizer = torch.optim.SGD([*model.parameters(), *first.parameters()], lr=0.01)
    for x, y in data():
        optimizer.zero_grad()
        hidden = checkpoint(first, x, use_reentrant=faulty)
        hidden = checkpoint(model.body, hidden, use_reentrant=faulty)
        functional.cross_entropy(model.head(hidden), y).backward()
        del hidden
        optimizer.step()


def unrun(faulty: bool) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD([*model.parameters(), *([] if faulty else other.parameters())], lr=0.01)
    for x, y in data():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scores = other(x)
        (loss if faulty else loss + functional.cross_entropy(scores, y)).backward()
        del scores
        optimizer.step()


def teacher(faulty: bool) -> None:
    model = Net()
    large = nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 4)).eval() if faulty else None
    optimizer = sgd(model)
    for x, y in data(samples=32):
        with torch.no_grad():
            target = y if large is None else large(x).argmax(-1)
        step(model, optimizer, x, target)


def lost(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for _ in range(8):
        optimizer.zero_grad()
        for x, y in data(4):
            if faulty:
                optimizer.zero_grad()
            (functional.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()


def recomputed(faulty: bool) -> None:
    norm = nn.BatchNorm1d if faulty else nn.LayerNorm
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.GELU()) for _ in range(6)))
    optimizer = sgd(model)
    for x, y in data():
        optimizer.zero_grad()
        for each in model:
            x = checkpoint(each, x, use_reentrant=False)
        loss = functional.cross_entropy(x, y)
        del x
        loss.backward()
        optimizer.step()


def checkpointed_blocks(at_once: bool, checkpoints: bool = True) -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
    )
    model, head = nn.Sequential(*blocks), nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for x, y in data():
        optimizer.zero_grad()
        for each in [model] if at_once else blocks:
            x = checkpoint(each, x, use_reentrant=False) if checkpoints else each(x)
        functional.cross_entropy(head(x), y).backward()
        del x
        optimizer.step()


def softmax(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        optimizer.zero_grad()
        scores = model(x)
        functional.cross_entropy(scores.softmax(-1) if faulty else scores, y).backward()
        del scores
        optimizer.step()


def upcast(faulty: bool) -> None:
    model = nn.Linear(WIDTH, 256).to(torch.bfloat16)
    optimizer = sgd(model)
    for x, _ in data():
        optimizer.zero_grad()
        scores = model(x.to(torch.bfloat16))
        (scores.float() if faulty else scores).square().mean().backward()
        del scores
        optimizer.step()


def resumed(faulty: bool) -> None:
    model = Net()
    state = {"step": 7, "model": Net().state_dict()}
    model.load_state_dict(state["model"])
    if not faulty:
        state = {"step": 7, "model": model.state_dict()}  # the model's own
    optimizer = sgd(model)
    for x, y in data(samples=4):
        step(model, optimizer, x, y)


def evaluated(keep: Callable[[Tensor], None]) -> None:
    model = nn.Linear(WIDTH, 64 * WIDTH)
    optimizer = sgd(model)
    for x, _ in data():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, _ in data():
            keep(model(x))


def gathered(faulty: bool) -> None:
    results = []
    evaluated(lambda scores: results.append(scores if faulty else scores.argmax(-1)))


PLANTED: dict[str, Callable[[bool], None]] = {
    "history-kept": history,
    "container-grows": outputs,
    "intermediate-kept": kept,
    "alive-past-last-use": unread,
    "state-kept": resumed,
    "evaluation-with-gradients": evaluation,
    "trained-in-evaluation-mode": mode,
    "gradients-kept": gradients,
    "gradients-added": added,
    "without-gradient": unused,
    "not-optimized": forgotten,
    "frozen-part-saves": frozen,
    "graph-retained": retained,
    "not-normalized": accumulated,
    "batch-norm-of-micro-batches": normalised,
    "optimizer-makes-the-peak": foreach,
    "attention-not-fused": attention,
    "logits-in-the-loss": logits,
    "waits-for-data": loading,
    "cache-flushed": flushed,
    "anomaly-detection": anomaly,
    "benchmark-with-changing-shapes": benchmark,
    "data-parallel": parallel,
    "checkpoint-without-gradient": checkpointed,
    "graph-unused": unrun,
    "untrained-model": teacher,
    "gradients-lost": lost,
    "batch-norm-recomputed": recomputed,
    "checkpointing-saves-nothing": checkpointed_blocks,
    "softmax-twice": softmax,
    "float32-copy": upcast,
    "evaluation-gathered": gathered,
}


WITHOUT_LINE = {
    "anomaly-detection",
    "batch-norm-of-micro-batches",
    "batch-norm-recomputed",
    "benchmark-with-changing-shapes",
    "checkpoint-without-gradient",
    "data-parallel",
    "untrained-model",
}
"""Checks of settings, and of modules, which they name."""


def seen_in(run: Callable[[bool], None], *, faulty: bool) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with Watch() as watch:
        run(faulty)
    return findings(watch.evidence())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:Anomaly Detection")
@pytest.mark.parametrize("check", PLANTED)
def test_a_planted_fault_is_found(check: str) -> None:
    found = [each for each in seen_in(PLANTED[check], faulty=True) if each.check == check]
    assert len(found) == 1
    assert found[0].what
    assert found[0].change
    assert bool(found[0].line) == (check not in WITHOUT_LINE)
    assert not found[0].line or "test_findings.py:" in found[0].line


@pytest.mark.parametrize("check", PLANTED)
def test_nothing_is_found_where_nothing_is_wrong(check: str) -> None:
    assert [each.check for each in seen_in(PLANTED[check], faulty=False)] == []


@pytest.mark.parametrize(
    ("step_seconds", "waited_seconds", "is_found"),
    [(0.002, 0.0009, False), (0.002, 0.0011, True), (0.1, 0.0011, False)],
)
def test_waits_for_data_are_found_from_a_millisecond_and_a_twentieth_of_the_step_on(
    step_seconds: float, waited_seconds: float, is_found: bool
) -> None:
    with Watch() as watch:
        flushed(False)
    times = replace(
        watch.evidence(), seconds_after=(step_seconds,) * 3, data_seconds_after=(waited_seconds,) * 3
    )
    assert [each.check for each in findings(times)] == ["waits-for-data"] * is_found


@pytest.mark.parametrize("faulty", [True, False])
def test_means_of_masked_tokens_are_not_divided_by_the_number_of_micro_batches(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    with Watch() as watch:
        for _ in range(8):
            for x, y in data(4):
                mask = (torch.rand(len(y)) > 0.1).float()
                losses = functional.cross_entropy(model(x), y, reduction="none") * mask
                mean = losses.sum() / mask.sum()
                (mean if faulty else mean / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [each.check for each in findings(watch.evidence())] == ["not-normalized"] * faulty


@pytest.mark.parametrize("faulty", [True, False])
def test_accumulation_by_accelerate_divides_if_it_knows_the_number_of_micro_batches(faulty: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1 if faulty else 4)
    model = Net()
    optimizer = sgd(model)
    with Watch() as watch:
        for _ in range(8):
            for x, y in data(4):
                accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    found = findings(watch.evidence())
    assert [each.check for each in found] == ["not-normalized"] * faulty
    assert all("trainer.loss_is_scaled_for_ga = False" in each.change for each in found)


@pytest.mark.parametrize(
    ("loss", "faulty"),
    [
        (lambda logits, y: functional.cross_entropy(logits, y) * 1 / 1, True),
        # As a Trainer does: by the items of a step, the processes, the micro-batches that it divides by.
        (lambda x, y: functional.cross_entropy(x, y, reduction="sum") / torch.tensor(16) * 1 / 1, False),
        (lambda logits, y: functional.cross_entropy(logits, y) * 0.25 / 1, False),
    ],
)
def test_factors_of_one_hide_no_other(loss: Callable[[Tensor, Tensor], Tensor], faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    with Watch() as watch:
        for _ in range(8):
            for x, y in data(4):
                loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [each.check for each in findings(watch.evidence())] == ["not-normalized"] * faulty


def by_weights(loss: Tensor, _model: nn.Module) -> None:
    loss.backward(gradient=torch.tensor(0.25))


def by_new_gradients(loss: Tensor, model: nn.Module) -> None:
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 4


def of_a_representation(loss: Tensor, _model: nn.Module) -> None:
    torch.dot(torch.full((1,), 0.25), loss.reshape(1)).backward()


@pytest.mark.parametrize("divide", [by_weights, by_new_gradients, of_a_representation])
def test_what_divides_gradients_by_other_means_is_no_finding(
    divide: Callable[[Tensor, nn.Module], None],
) -> None:
    model = Net()
    optimizer = sgd(model)
    with Watch() as watch:
        for _ in range(8):
            for x, y in data(4):
                divide(functional.cross_entropy(model(x), y), model)
            optimizer.step()
            optimizer.zero_grad()
    assert findings(watch.evidence()) == ()


@pytest.mark.parametrize("register", ["parameter", "optimizer"])
def test_hooks_that_may_divide_gradients_are_no_finding(register: str) -> None:
    model = Net()
    optimizer = sgd(model)

    def divide(*_: Any) -> None:
        for each in model.parameters():
            if each.grad is not None:
                each.grad.div_(4)

    if register == "parameter":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 4)
    else:
        optimizer.register_step_pre_hook(divide)
    with Watch() as watch:
        for _ in range(8):
            for x, y in data(4):
                functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert findings(watch.evidence()) == ()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_result_that_lives_past_its_last_use_is_named_once(is_deleted: bool) -> None:
    """Also where a script ends before the steps that are watched do, and then reads its loss."""
    tokens, size = torch.randint(0, 2000, (512,)), 2000
    model = nn.Sequential(nn.Embedding(size, 16), nn.Linear(16, size))
    optimizer = sgd(model)
    with Watch() as watch:
        for _ in range(2):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, size), tokens)
            if is_deleted:
                del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    found = {each.check: each.change for each in findings(watch.evidence())}
    assert found.pop("logits-in-the-loss")
    assert found == (
        {} if is_deleted else {"alive-past-last-use": "del logits once it is used, before backward"}
    )


class Joined:
    """Results of an evaluation."""

    def __init__(self) -> None:
        self.samples, self.features = torch.zeros(0, 64 * WIDTH), torch.zeros(256, 0)

    def keep(self, scores: Tensor) -> None:
        self.samples = torch.cat([self.samples, scores])

    def cache(self, scores: Tensor) -> None:
        """Keep more of the same samples, as a generation does."""
        self.features = torch.cat([self.features, scores], dim=1)


def test_results_that_an_evaluation_joins_are_found_with_what_each_batch_adds() -> None:
    results = Joined()

    def run(keeps: bool) -> None:
        evaluated(results.keep if keeps else results.cache)
        assert results is not None

    (found,) = seen_in(run, faulty=True)
    assert (found.check, found.size_bytes) == ("evaluation-gathered", 256 * 64 * WIDTH * 4)
    assert found.what.startswith("results.samples keeps results of all samples")
    assert seen_in(run, faulty=False) == ()


def test_of_an_evaluation_between_recorded_steps_the_first_forwards_are_recorded() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    with Watch(steps=3) as watch:
        for x, _ in data(3):
            model.train()(x).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                for inputs, _ in data(20):
                    model(inputs).argmax(-1).cpu()
    forwards = Counter(op.phase for op in watch.evidence().trace.ops if op.name == "aten.addmm.default")
    assert forwards == {Phase.FORWARD: 3, Phase.EVALUATION: 2 * FORWARDS}


def test_a_frozen_backbone_that_is_not_frozen_gets_gradients_that_no_optimizer_uses() -> None:
    def run(faulty: bool) -> None:
        model = Frozen()
        model.body.requires_grad_(faulty)
        optimizer = sgd(model.head)
        for x, y in data():
            step(model, optimizer, x, y)

    assert [each.check for each in seen_in(run, faulty=True)] == ["not-optimized"]
    assert seen_in(run, faulty=False) == ()


@pytest.mark.parametrize("faulty", [True, False])
@pytest.mark.parametrize("is_made_before", [True, False])
def test_an_optimizer_that_another_has_replaced_uses_no_gradients(is_made_before: bool, faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model) if is_made_before else None
    with Watch() as watch:
        optimizer = optimizer or sgd(model)
        optimizer = sgd(model.head if faulty else model)
        for x, y in data():
            step(model, optimizer, x, y)
    assert [each.check for each in findings(watch.evidence())] == ["not-optimized"] * faulty


def test_bytes_of_a_frozen_part_are_those_of_its_saved_tensors() -> None:
    (found,) = seen_in(frozen, faulty=True)
    assert found.size_bytes == 4 * 256 * 4 * WIDTH * 4  # what each GELU saves


def test_gradients_of_inputs_that_are_read_are_needed() -> None:
    """As those of an attack."""
    model = Frozen()
    optimizer = sgd(model.head)
    with Watch() as watch:
        for x, y in data():
            optimizer.zero_grad()
            functional.cross_entropy(model(x.requires_grad_()), y).backward()
            assert x.grad is not None
            functional.cross_entropy(model(x.detach() + x.grad.sign()), y).backward()
            optimizer.step()
    assert "frozen-part-saves" not in {each.check for each in findings(watch.evidence())}


@pytest.mark.parametrize("at_once", [True, False])
def test_the_peak_without_checkpointing_is_that_of_a_run_without_it(at_once: bool) -> None:
    def peak(checkpoints: bool) -> tuple[int, int | None]:
        with Watch() as watch:
            checkpointed_blocks(at_once, checkpoints)
        trace = watch.evidence().trace
        kept = without_recomputation(trace)
        return live_profile(trace, 1).peak_bytes, kept and live_profile(kept, 1).peak_bytes

    (with_it, predicted), (without, nothing) = peak(True), peak(False)
    assert nothing is None
    assert predicted == pytest.approx(without, rel=0.01)
    assert (with_it > 0.95 * without) == at_once


def test_growth_is_not_that_of_each_name() -> None:
    model, total, outputs = Net(), torch.zeros(()), list[Tensor]()
    optimizer = sgd(model)
    with Watch() as watch:
        for x, y in data():
            optimizer.zero_grad()
            scores = model(x)
            loss = functional.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
            total = total + loss
            outputs.append(scores)
    of_total, of_outputs = sorted(findings(watch.evidence()), key=lambda each: each.size_bytes or 0)
    assert of_total.check == of_outputs.check == "history-kept"
    assert of_total.what.startswith("total ")
    assert (of_total.size_bytes or 0) < 100 < 256 * 4 * 4 - 100 <= (of_outputs.size_bytes or 0)


def test_a_teacher_that_builds_a_graph_is_found_in_the_step() -> None:
    found, _teacher = seen_in(evaluation_within, faulty=True)
    assert found.check == "evaluation-with-gradients"
    assert found.size_bytes == 256 * (4 * WIDTH + WIDTH + 4 + 4) * 4  # of ReLU, a layer and two targets
    assert [each.check for each in seen_in(evaluation_within, faulty=False)] == ["untrained-model"]


@pytest.mark.parametrize(
    ("run", "graphs"), [(evaluation_in_training_mode, 1), (evaluation_by_the_line_that_trains, 2)]
)
def test_an_evaluation_in_training_mode_that_builds_graphs_is_found(
    run: Callable[[bool], None], graphs: int
) -> None:
    """Though it comes after the recorded steps; a loss keeps its graph until the next replaces it."""
    (found,) = seen_in(run, faulty=True)
    assert (found.check, found.size_bytes) == ("graph-unused", graphs * 256 * (WIDTH + 4 * WIDTH + WIDTH) * 4)
    assert "test_findings.py:" in found.line
    assert seen_in(run, faulty=False) == ()


def test_all_graphs_that_an_evaluation_after_the_recorded_steps_keeps_are_at_stake() -> None:
    model = Net()
    optimizer = sgd(model)
    with Watch() as watch:
        for x, y in data():
            step(model, optimizer, x, y)
        model.eval()
        kept = [model(x) for x, _ in data(6)]
    (found,) = findings(watch.evidence())
    assert found.size_bytes == 6 * 256 * (WIDTH + 4 * WIDTH + WIDTH) * 4
    assert kept


def test_the_last_forward_of_an_interrupted_run_is_not_one_without_backward() -> None:
    model = Net()
    optimizer = sgd(model)

    def run() -> None:
        for x, y in data(2):
            step(model, optimizer, x, y)
        model(next(data())[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Watch(2) as watch:
        run()
    assert findings(watch.evidence()) == ()


def test_a_second_forward_of_the_trained_model_is_found() -> None:
    """Its graph leads to the same parameters, and no backward reaches its nodes."""
    model, right = Net(), 0
    optimizer = sgd(model)
    with Watch() as watch:
        for x, y in data():
            step(model, optimizer, x, y)
            right += int((model(x).argmax(-1) == y).sum())
    (found,) = findings(watch.evidence())
    assert (found.check, found.size_bytes) == ("graph-unused", 256 * (4 * WIDTH + WIDTH + 4) * 4)


@pytest.mark.parametrize("has_inner_step", [False, True])
def test_weights_computed_from_those_of_the_model_train_it(has_inner_step: bool) -> None:
    """Noise in the weights, or a step of an inner loop: the parameters of the call are no leaves."""
    model = nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 4))
    optimizer = sgd(model)
    with Watch() as watch:
        for x, y in data(samples=32):
            optimizer.zero_grad()
            weights = dict(model.named_parameters())
            changes = [torch.randn_like(each) for each in weights.values()]
            if has_inner_step:
                inner = functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
                changes = [*torch.autograd.grad(inner, [*weights.values()], create_graph=True)]
                del inner
            changed = {
                name: each - 0.01 * by for (name, each), by in zip(weights.items(), changes, strict=True)
            }
            loss = functional.cross_entropy(torch.func.functional_call(model, changed, (x,)), y)
            del changes, changed
            loss.backward()
            optimizer.step()
    assert [each.check for each in findings(watch.evidence())] == []


def test_a_frozen_part_that_is_recomputed_is_no_model_of_its_own() -> None:
    class Adapted(Net):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=False))
            return scores

    model = Adapted()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    with Watch() as watch:
        for x, y in data(samples=8):
            step(model, optimizer, x, y)
    assert "untrained-model" not in {each.check for each in findings(watch.evidence())}


def test_an_evaluation_with_gradients_is_not_recomputed() -> None:
    """What checkpointing packs is not unpacked, which would run the forward again for each saved tensor."""
    model, calls = Net(), list[int]()
    model.body.register_forward_hook(lambda *_: calls.append(1))
    optimizer = sgd(model)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = checkpoint(model, x, use_reentrant=False)
            return scores

    evaluated = Checkpointed()
    evaluated.inner = model
    with Watch(1) as watch:
        for x, y in data(steps=2):
            step(model, optimizer, x, y)
        calls.clear()
        kept = evaluated.eval()(torch.randn(4, WIDTH))
    assert len(calls) == 1
    assert kept.requires_grad
    assert watch.evidence().error == ""


def test_an_error_of_watching_ends_recording_and_not_the_run() -> None:
    """Whether gradients are zero cannot be read on the meta device."""
    with Watch() as watch, torch.device("meta"):
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert watch.error


def test_a_model_without_units_is_reported() -> None:
    model = nn.LSTM(16, 16)
    with Watch() as watch:
        for _ in range(4):
            model(torch.randn(64, 32, 16))[0].square().mean().backward()
    assert "peak" in watched_text(watch.evidence())


def test_two_optimizers_of_one_loop_make_one_step_without_findings() -> None:
    """A discriminator's gradients of the generator's backward are cleared before its own."""
    generator, critic = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
    both = sgd(generator), sgd(critic)
    with Watch() as watch:
        for _ in range(8):
            made = generator(torch.randn(64, 8))
            both[1].zero_grad()
            (critic(torch.randn(64, WIDTH)).mean() - critic(made.detach()).mean()).backward()
            both[1].step()
            both[0].zero_grad()
            critic(made).mean().backward()
            both[0].step()
            del made
    evidence = watch.evidence()
    assert len(evidence.steps) == 3
    assert evidence.micro_batches == 1  # two models, one backward each
    assert {each.step for each in evidence.backwards} == {0, 1, 2}
    assert findings(evidence) == ()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_recording_ends_before_compiled_code_is_called() -> None:
    model = Net()
    called: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = sgd(model)
    with Watch() as watch:
        step(model, optimizer, *next(data()))
        step(called, optimizer, *next(data()))
    evidence = watch.evidence()
    assert len(evidence.steps) == 1
    assert "test_findings.py:" in evidence.compiled
    with Watch(eager=True) as watch:
        for _ in range(3):
            step(called, optimizer, *next(data()))
    assert len(watch.evidence().steps) == 3
    assert not watch.evidence().compiled


@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:The .grad attribute")
def test_compiled_code_that_makes_tensors_runs_as_it_does_alone() -> None:
    """Torch keeps, before it calls compiled code, whether modes are entered."""
    model = Net()

    @torch._dynamo.disable
    def zeros() -> Tensor:
        return torch.zeros(2)

    called = torch.compile(lambda x: model(x).sum() + zeros().sum(), backend="eager")
    x, _ = next(data())
    with Watch() as watch:
        called(x).backward()
    assert watch.evidence().compiled


class Choosing(nn.Module):
    """Chooses between layers by the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(
            x.sum() > 0, lambda x: self.first(x).relu(), lambda x: self.second(x).sin(), (x,)
        )
        return chosen


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("eager", [False, True])
def test_operators_that_take_functions_run_as_they_do_alone(*, eager: bool) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = Choosing()
        optimizer = sgd(model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    alone = trained()
    with Watch(eager=eager) as watch:
        watched = trained()
    assert all(map(torch.equal, alone, watched))
    assert "test_findings.py:" in watch.evidence().compiled
    assert "torch.cond" in watched_text(watch.evidence())


def test_an_estimate_refuses_operators_that_take_functions_in_words() -> None:
    job = bf.Job(
        model=Choosing,
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda n: torch.randn(n, 16),
    )
    with pytest.raises(CaptureError, match=r"operator cond in .*test_findings.py:\d+ cannot be captured"):
        bf.estimate(job, "cpu", micro_batch_size=8)


def test_every_check_has_a_planted_fault() -> None:
    named = {function.__name__ for function in CHECKS}
    assert len(named) >= 30
    assert len(named) - len(ON_GPUS) - 3 == len(PLANTED)  # two of copies to a GPU, and one under DDP


def reading(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        loss = step(model, optimizer, x, y)
        if faulty:
            loss.item()


def lengths(faulty: bool) -> None:
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    optimizer = sgd(model)
    for number in range(8):
        step(model, optimizer, torch.randn(4, 1, 16 + faulty * number), torch.zeros(4, dtype=torch.long))


def single(faulty: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    for x, y in data():
        with torch.autocast("cpu", torch.bfloat16, enabled=not faulty):
            step(model, optimizer, x, y)


ON_GPUS: dict[str, Callable[[bool], None]] = {
    "waits-for-values": reading,
    "lengths-change": lengths,
    "half-precision-missed": single,
}
"""Checks that find something on a GPU alone: what a CPU recorded is taken for a GPU's."""


class Positions(nn.Module):
    def __init__(self, *, on_host: bool) -> None:
        super().__init__()
        self.embed, self.body, self.on_host = nn.Embedding(64, WIDTH), Net(), on_host

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64).flip(0).to(x.device) if self.on_host else torch.arange(64, device=x.device)
        noise = torch.rand(WIDTH).to(x.device)  # other numbers on another device
        label = torch.zeros(WIDTH)
        label[3] = noise.numel()
        scores: Tensor = self.body(x + self.embed(places).mean(0) + noise + label.to(x.device))
        return scores


def elsewhere(loop: Callable[[nn.Module, torch.optim.Optimizer], None], model: nn.Module) -> dict[str, int]:
    """Findings of a loop whose device is not the host, and how many there are; it has no values."""
    watch = Watch(9)
    watch._ops.device_type = "meta"  # stands for a GPU
    model.to("meta")
    with watch:
        loop(model, sgd(model))
    assert not watch.error
    return Counter(each.check for each in findings(watch.evidence()))


@pytest.mark.parametrize("on_host", [True, False])
def test_what_a_forward_makes_on_the_host_and_copies_is_found(on_host: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in data(4):
            step(model, optimizer, x.to("meta"), y.to("meta"))

    assert elsewhere(loop, Positions(on_host=on_host)) == ({"made-on-the-host": 1} if on_host else {})


@pytest.mark.parametrize(("samples", "is_pinned"), [(2**14, False), (2**14, True), (2**10, False)])
def test_batches_in_pageable_memory_are_found_if_they_are_large(
    samples: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in data(4, samples):
            step(model, optimizer, x.to("meta", non_blocking=True), y.to("meta"))

    monkeypatch.setattr(Tensor, "is_pinned", lambda _: is_pinned)
    is_large = samples * WIDTH * 4 > 2**20
    assert ("pageable-memory" in elsewhere(loop, Net())) == (is_large and not is_pinned)


@pytest.mark.parametrize("faulty", [True, False])
@pytest.mark.parametrize("check", ON_GPUS)
def test_a_fault_of_a_gpu_is_found_where_it_is_planted(check: str, faulty: bool) -> None:
    torch.manual_seed(0)
    with Watch() as watch:
        ON_GPUS[check](faulty)
    evidence = watch.evidence()
    evidence = replace(evidence, trace=replace(evidence.trace, device_kind="cuda"))
    assert (check in {each.check for each in findings(evidence)}) == faulty
    on = replace(evidence, flags=(*evidence.flags, "expandable segments"))
    assert "lengths-change" not in {each.check for each in findings(on)}
