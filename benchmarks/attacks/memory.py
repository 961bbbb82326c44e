"""Memory that runs out, and other errors, at random ops of whole runs; and in steps of a user's own loop."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import random as python_random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import brimful as bf
from attacks.case import (
    Case,
    FailedError,
    Kind,
    Outcome,
    Place,
    check_done,
    check_ended,
    check_equal,
    check_nothing_lost,
    check_same_metrics,
    kept_names,
    metrics,
)
from attacks.process import call

# B batch, D width
WIDTH, CLASSES, SAMPLES, BATCH = 6, 3, 32, 8

ERRORS: dict[str, Callable[[], BaseException]] = {
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
    "driver": lambda: RuntimeError("CUDA error: out of memory"),
    "CPU": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "Python": lambda: MemoryError(),
}
OTHERS: dict[str, Callable[[], BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "AssertionError": lambda: AssertionError("of the user's"),
    "RuntimeError": lambda: RuntimeError("of the user's"),
}


class ErrorsAt(TorchDispatchMode):
    """Raises in place of some ops, counted from 0."""

    def __init__(self, numbers: Sequence[int], error: Callable[[], BaseException]) -> None:
        super().__init__()
        self._numbers, self._error = frozenset(numbers), error
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        if self.ops - 1 in self._numbers:
            raise self._error()
        return func(*args, **(kwargs or {}))


# Models, each with a state that a second try could get wrong


class Net(nn.Module):
    """Statistics of batches and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.tanh() + x * (1 - x.tanh() ** 2))


def _count_call(module: nn.Module, *_: object) -> None:
    module.calls.add_(1.0)


class Hooked(Net):
    """A function of its own, and a hook that counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("calls", torch.zeros(()))
        self.head.register_forward_hook(_count_call)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Scaled.apply(self.blocks(x)))


class Spectral(Net):
    """A buffer of power iteration that each forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


class Rebound(Net):
    """A buffer that is bound anew in each step, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.seen += x.detach().sum()
        return self.head(self.blocks(x - self.mean))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, num_layers=2, dropout=0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x[:, None].repeat(1, 3, 1))[0][:, -1])


def _adapted() -> nn.Module:
    import peft

    return peft.get_peft_model(
        Net(), peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["blocks.0", "head"])
    )


LORA = "LoRA"
_ADAMW = partial(torch.optim.AdamW, lr=1e-2)
CONFIGURATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "SGD, momentum": (Net, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "NAdam": (Net, partial(torch.optim.NAdam, lr=1e-2)),
    "fused AdamW": (Net, partial(_ADAMW, fused=True)),
    "foreach AdamW": (Net, partial(_ADAMW, foreach=True)),
    "Adafactor": (Net, partial(torch.optim.Adafactor, lr=1e-2)),
    "function and hooks": (Hooked, _ADAMW),
    "spectral norm": (Spectral, _ADAMW),
    "rebound buffers": (Rebound, _ADAMW),
    "GRU": (Recurrent, _ADAMW),
    LORA: (_adapted, _ADAMW),
}


class Augmented(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        noise = 0.1 * torch.randn(WIDTH) + 0.1 * python_random.random() + 0.1 * float(np.random.rand())
        return {"x": x + noise, "y": x[:CLASSES].argmax()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job(configuration: str, loss_: Callable[..., Tensor] = loss, *, workers: int = 0) -> bf.Job:
    """A job of a configuration."""
    model, optimizer = CONFIGURATIONS[configuration]

    def data() -> bf.Data:
        loader = partial(DataLoader, Augmented(), batch_size=BATCH, num_workers=workers)
        loaders = (loader(shuffle=shuffle) for shuffle in (True, False))
        return bf.Data(**dict(zip(("train", "validation"), loaders, strict=True)))

    return bf.Job(
        model=model,
        loss=loss_,
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randint(CLASSES, (n,))},
        optimizer=lambda parameters: optimizer(parameters),
        data=data,
        name="attacked",
    )


def fit(of: bf.Job, run: Path, callbacks: Sequence[bf.trainer.Callback] = ()) -> None:
    """Train or resume, with everything that a run does: average, clipping, validation, saves."""
    bf.trainer.Trainer(
        of,
        bf.Settings(micro_batch_size=BATCH // 2, gradient_accumulation_steps=2),
        device="cpu",
        run_dir=run,
        resume=run.exists(),
        save_every=2,
        epochs=2,
        ema_decay=0.9,
        max_gradient_norm=1.0,
        show_progress=False,
        callbacks=callbacks,
    ).fit()


# Whole runs


def run_cases(seed: int) -> Iterator[Case]:
    """Memory runs out at a random op of a whole run, once or again a little later; other errors."""
    random = Random(f"memory {seed}")
    for name in CONFIGURATIONS:
        for number in range(28):
            error = random.choice(list(ERRORS))
            attack = partial(_whole_run, name, [random.random()], ERRORS[error])
            yield Case(f"{name}, {error} {seed}.{number}", attack)
        for number in range(8):
            error = random.choice(list(ERRORS))
            attack = partial(_whole_run, name, [random.random(), random.randint(1, 80)], ERRORS[error])
            yield Case(f"{name}, {error} twice {seed}.{number}", attack)
        for number in range(6):
            error = random.choice(list(OTHERS))
            attack = partial(_whole_run, name, [random.random()], OTHERS[error])
            yield Case(f"{name}, {error} {seed}.{number}", attack)


def fit_cases(seed: int) -> Iterator[Case]:
    """Memory runs out at a random op of `bf.fit`, which plans, checks and trains, with data workers."""
    random = Random(f"fit {seed}")
    for number in range(100):
        name = random.choice(list(CONFIGURATIONS))
        error = random.choice(list(ERRORS))
        attack = partial(_whole_run, name, [random.random()], ERRORS[error], plans=True)
        yield Case(f"{name}, {error} {seed}.{number}", attack)


def plan_and_fit(of: bf.Job, run: Path) -> None:
    """All that a user's one call does."""
    bf.fit(
        of,
        bf.plan(of, "cpu", global_batch_size=BATCH, split_batch_norm=True),
        device="cpu",
        run_dir=run,
        resume=run.exists(),
        save_every=2,
        epochs=2,
        ema_decay=0.9,
        max_gradient_norm=1.0,
        show_progress=False,
    )


def _whole_run(
    name: str,
    at: Sequence[float],
    error: Callable[[], BaseException],
    place: Place,
    *,
    plans: bool = False,
) -> Outcome:
    expected = undisturbed(place, name, plans=plans)
    ops = int((expected / "ops").read_text())
    numbers = [int(at[0] * ops)]
    numbers += [numbers[0] + int(each) for each in at[1:]]
    run = place.folder / "run"
    train = partial(_train, name, plans, run)

    def disturbed() -> None:
        with ErrorsAt(numbers, error):
            train()

    ran = place.run(action=call(disturbed))
    is_memory = error in ERRORS.values()
    if ran.status == 0:
        return _check_finished(run, expected, is_memory)
    before = kept_names(run)
    check_done(place.run(action=call(train)))
    check_nothing_lost(run, before)
    _check_finished(run, expected, is_memory)
    if is_memory:
        check_ended(ran, memory_fails=True)
    elif ran.status is None:
        raise FailedError(Kind.HANG, "it waited for ever")
    return Outcome(note="ended with an error, resumed to the undisturbed run")


def _train(name: str, plans: bool, run: Path) -> None:
    if plans:
        plan_and_fit(job(name, workers=2), run)
    else:
        fit(job(name), run)


def undisturbed(place: Place, name: str, *, plans: bool = False) -> Path:
    """The run of a configuration that nothing disturbs, with what it counts and takes."""

    def make(folder: Path) -> None:
        check_done(place.run(action=call(lambda: counted(folder))))

    def counted(folder: Path) -> None:
        from attacks.kills import at_file_operations

        counts = [0]
        at_file_operations(folder, counts.append)
        begun = time.monotonic()
        with ErrorsAt([], KeyError) as counting:
            _train(name, plans, folder)
        for each, value in (
            ("ops", counting.ops),
            ("seconds", time.monotonic() - begun),
            ("file operations", counts[-1]),
        ):
            (folder / each).write_text(str(value))

    return place.material.once(f"{'fit' if plans else 'memory'}-{name}", make)


def _check_finished(run: Path, expected: Path, is_memory: bool) -> Outcome:
    """Bit for bit the undisturbed run, unless memory ran out twice and the micro-batch was made smaller."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lowered = [line for line in lines if line["kind"] == "recovery" and line["before"] != line["after"]]
    if not (is_memory and lowered):
        check_equal(run, expected)
        return Outcome(note="finished as the undisturbed run")
    found, wanted = ([e for e in metrics(r) if e["kind"] == "step"] for r in (run, expected))
    same = min(line["step"] for line in lowered) - 1
    check_same_metrics([e for e in found if e["step"] <= same], [e for e in wanted if e["step"] <= same])
    if len(found) != len(wanted) or not all(math.isfinite(e["loss"]) for e in found):
        raise FailedError(Kind.WRONG, "with a smaller micro-batch, not all steps were made")
    return Outcome(note="finished with a smaller micro-batch")


# Allocations that fail for real, and errors of the user's in a step


def allocation_cases(_seed: int) -> Iterator[Case]:
    """One step asks for more memory than there is."""
    yield Case("torch, 4 TiB", partial(_allocation, lambda: torch.ones(1 << 40)))
    yield Case("NumPy, 512 TiB", partial(_allocation, lambda: np.ones(1 << 46)))


class _OnceIn:
    """A loss that does something else first in one of its calls in training."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.left, self._action = number, action
        """Calls until then; 0 or less if there is none."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model.training and type(batch["x"]) is Tensor and batch["x"].device.type == "cpu":
            self.left -= 1
            if self.left == 0:
                self._action()
        return loss(model, batch)


def _allocation(action: Callable[[], object], place: Place) -> None:
    name = "SGD, momentum"
    expected = undisturbed(place, name)
    run = place.folder / "run"
    check_done(place.run(action=call(lambda: fit(job(name, _OnceIn(5, action)), run))))
    check_equal(run, expected)


def step_cases(_seed: int) -> Iterator[Case]:
    """A loss raises in a later micro-batch."""
    for name in ("RuntimeError", "KeyboardInterrupt"):
        yield Case(f"Trainer, {name}", partial(_step_of_trainer, OTHERS[name]))
    errors = {"CUDA": ERRORS["CUDA"], "RuntimeError": OTHERS["RuntimeError"], "Ctrl-C": KeyboardInterrupt}
    for name, error in errors.items():
        yield Case(f"bf.apply, {name}", partial(_step_of_own_loop, error))


def _raise(error: Callable[[], BaseException]) -> None:
    raise error()


def _step_of_trainer(error: Callable[[], BaseException], place: Place) -> None:
    name = "SGD, momentum"
    expected = undisturbed(place, name)
    run = place.folder / "run"
    ran = place.run(action=call(lambda: fit(job(name, _OnceIn(6, partial(_raise, error))), run)))
    if ran.status == 0:
        raise FailedError(Kind.WRONG, "the user's error was lost")
    check_done(place.run(action=call(lambda: fit(job(name), run))))
    check_equal(run, expected)


def _step_of_own_loop(error: Callable[[], BaseException], place: Place) -> None:
    """A call that raised leaves nothing behind: the next ones are those of a loop without it."""

    def compared() -> None:
        without, after = _own_loop(None), _own_loop(error)
        differing = [name for name, tensor in without.items() if not tensor.equal(after[name])]
        if differing:
            print(f"differ: {', '.join(differing)}")

    ran = place.run(action=call(compared))
    check_done(ran)
    if ran.out:
        raise FailedError(Kind.WRONG, f"after a call that raised, {ran.out.strip()}")


def _own_loop(error: Callable[[], BaseException] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [{"x": torch.randn(12, WIDTH), "y": torch.randint(CLASSES, (12,))} for _ in range(3)]
    failing = _OnceIn(0, partial(_raise, error)) if error else None
    settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=3)
    step = bf.apply(settings, job("SGD, momentum", failing or loss), model, optimizer)
    for number, batch in enumerate(batches):
        if failing is not None and number == 1:
            failing.left, is_taken = 2, False  # the second micro-batch
            with suppress(BaseException):
                step(batch)
                is_taken = True  # again, where memory ran out
            if failing.left > 0:
                raise AssertionError("the loss did not raise")
            if is_taken:
                continue
        step(batch)
    return dict(model.state_dict())


# Loops of a user's own under `prepare`


def retry_cases(seed: int) -> Iterator[Case]:
    """Memory runs out at a random op of an own loop with `prepare(…).retry`, once or again a little later."""
    random = Random(f"retry {seed}")
    for name in CONFIGURATIONS:
        for number in range(4):
            error = random.choice(list(ERRORS))
            at = [random.random(), *([random.randint(1, 40)] if number == 3 else [])]
            yield Case(f"{name}, {error} {seed}.{number}", partial(_retried, name, at, ERRORS[error]))


def _retried(name: str, at: Sequence[float], error: Callable[[], BaseException], place: Place) -> Outcome:
    def compared() -> None:
        with ErrorsAt([], error) as counting:
            wanted = _prepared_loop(name)
        first = int(at[0] * counting.ops)
        with ErrorsAt([first, *(first + int(each) for each in at[1:])], error):
            found = _prepared_loop(name)
        differing = [key for key in wanted if not wanted[key].equal(found[key])]
        print(f"differ: {', '.join(differing)}" if differing else "equal")

    ran = place.run(action=call(compared))
    if ran.status == 0 and ran.out.strip() != "equal":
        raise FailedError(Kind.WRONG, f"after memory ran out, {ran.out.strip()}")
    if ran.status is None:
        raise FailedError(Kind.HANG, "it did not end")
    is_raised = ran.status != 0 and any(
        said in ran.err for said in ("memory", "MemoryError", "PartialUpdateError")
    )
    if ran.status != 0 and not is_raised:
        raise FailedError(Kind.TRACEBACK, ran.err.strip().splitlines()[-1])
    return Outcome(note="equal" if ran.status == 0 else "ended with that error")


def _prepared_loop(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    make, make_optimizer = CONFIGURATIONS[name]
    model = make().train()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    batches = [{"x": torch.randn(BATCH, WIDTH), "y": torch.randint(CLASSES, (BATCH,))} for _ in range(6)]
    settings = bf.Settings(micro_batch_size=BATCH, gradient_accumulation_steps=2)
    prepared = bf.prepare(settings, model, optimizer)

    def forward_backward(batch: dict[str, Tensor]) -> None:
        (loss(model, batch) / 2).backward()

    for number, batch in enumerate(batches):
        prepared.retry(forward_backward, batch)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


# Memory of a process that plans again and again

_PLANS, _GROWTH_BYTES = 50, 20 << 20


def leak_cases(_seed: int) -> Iterator[Case]:
    """A process's memory after many plans, of one job and of other ones."""
    for name, action in _LASTING.items():
        yield Case(f"{_PLANS} times {name}", partial(_leak, action))


def _sized(width: int) -> bf.Job:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))

    return bf.Job(
        model=model, loss=lambda model, x: model(x).square().mean(), batch=lambda n: torch.randn(n, width)
    )


_LASTING: dict[str, Callable[[int], object]] = {
    "a plan of one job": lambda _: bf.plan(_sized(64), "RTX 3090", global_batch_size=64),
    "plans of other jobs": lambda number: bf.plan(_sized(64 + number), "RTX 3090", global_batch_size=64),
    "FSDP2": lambda number: bf.plan(
        _sized(64 + 2 * number), "RTX 3090", global_batch_size=64, world_size=2, parallelism="fsdp2"
    ),
    "estimates on a CPU": lambda number: bf.estimate(_sized(64 + number), "cpu", micro_batch_size=8),
    "measurements": lambda _: bf.measure(_sized(64), bf.Settings(micro_batch_size=8), "cpu"),
    "steps under settings": lambda _: _prepared_loop("SGD, momentum"),
}


def _leak(action: Callable[[int], object], place: Place) -> Outcome:
    def repeated() -> None:
        for number in range(_PLANS // 5):  # what is imported and made once
            action(number)
        before = _held_bytes()
        for number in range(_PLANS):
            action(_PLANS + number)
        print(_held_bytes() - before)

    ran = place.run(action=call(repeated), seconds=300)
    check_done(ran)
    grown = int(ran.out.split()[-1])
    if grown > _GROWTH_BYTES:
        raise FailedError(Kind.UNBOUNDED, f"{grown / 2**20:.1f} MiB more after {_PLANS} of them")
    return Outcome(note=f"grew by at most {max(grown, 0) // 2**20 + 1} MiB")


def _held_bytes() -> int:
    """Resident memory of this process, without what only the C library still keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
