"""Steps in which something goes wrong, and runs around them: the update, recovery, resuming, what is left."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import brimful as bf
from brimful.errors import BrimfulError, PartialUpdateError
from silent_errors.case import Case, Verdict, WrongError

IN_UPDATE = "memory runs out several times in an update"
RESUMED = "what was due when a run was killed"
LINKS = "links in a run directory from elsewhere"
RANDOM = "random numbers left as they were"
BESIDE = "memory that a run keeps beside its steps"
DIVIDING = "micro-batches divided where the model cannot"
WORDS = "no memory, in the words of a library"

# ---- the update

MOST_FAILURES = 5
DISTURBED_STEP = 3


class Shortage(TorchDispatchMode):
    """Memory runs out at some ops in a row, counted from where an update begins."""

    def __init__(self, first: int, times: int) -> None:
        super().__init__()
        self._due = range(first, first + times)
        self._begun = False
        self.ops = 0

    def begin(self, *_: Any) -> None:
        self._begun = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._begun and "profiler" not in str(func):
            self.ops += 1
            if self.ops - 1 in self._due:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return func(*args, **(kwargs or {}))


def _updated(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch: Callable[[int], Tensor],
    shortage: Shortage,
    before_step: Callable[[int, torch.optim.Optimizer], object],
) -> list[Any]:
    """Parameters and state after a few steps, one of them under a shortage."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    optimizer.register_step_pre_hook(shortage.begin)
    job = bf.Job(model=lambda: model, loss=lambda m, b: m(b).square().mean(), batch=batch(0))
    step = bf.apply(bf.Settings(micro_batch_size=8), job, model, optimizer, verify=False)
    for index in range(DISTURBED_STEP + 2):
        before_step(index, optimizer)
        if index == DISTURBED_STEP:
            shortage._begun = False
            with shortage:
                step(batch(index))
        else:
            step(batch(index))
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*(p.detach().clone() for p in model.parameters()), *state]


def _is_equal(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, expected, strict=True)
    )


def _rows(index: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(index))


def _images(index: int) -> Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(index))


def update_is_whole(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    batch: Callable[[int], Tensor] = _rows,
    before_step: Callable[[int, torch.optim.Optimizer], object] = lambda _index, _optimizer: None,
    every: int = 3,
) -> Verdict:
    """One to five failures in a row, from every third op of an update on: the undisturbed run, or a refusal."""
    train = partial(_updated, make_model, make_optimizer, batch, before_step=before_step)
    undisturbed = Shortage(0, 0)
    expected, refused = train(shortage=undisturbed), 0
    gc.collect()
    gc.freeze()  # room is made after each failure by a search among what this has left only
    for times in range(1, MOST_FAILURES + 1):
        for first in range(0, undisturbed.ops, every):
            try:
                found = train(shortage=Shortage(first, times))
            except PartialUpdateError:
                refused += 1
                continue
            if not _is_equal(found, expected):
                raise WrongError(f"{times} failures from op {first} of the update on change the weights")
    return Verdict.REFUSED if refused else Verdict.RIGHT


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


class _Complex(nn.Module):
    """A parameter of complex numbers, which optimizers write to through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "foreach": False}, {"params": others, "foreach": True, "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)


def _decay_begins(index: int, optimizer: torch.optim.Optimizer) -> None:
    """A schedule of the weight decay: the update writes once more to each parameter from here on."""
    if index == DISTURBED_STEP:
        optimizer.param_groups[0]["weight_decay"] = 0.1


def _of(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)


_UPDATES: dict[str, Callable[[], Verdict]] = {
    "sgd with momentum, one parameter at a time": partial(
        update_is_whole, _mlp, _of("SGD", momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False), every=1
    ),
    "adamw of a convolution": partial(
        update_is_whole, _conv, _of("AdamW", foreach=False), batch=_images, every=5
    ),
    "nadam": partial(update_is_whole, _mlp, _of("NAdam", foreach=False, weight_decay=0.1), every=5),
    "adafactor": partial(update_is_whole, _mlp, _of("Adafactor", foreach=False), every=7),
    "rmsprop on lists": partial(update_is_whole, _mlp, _of("RMSprop", foreach=True, momentum=0.9), every=1),
    "fused adam": partial(
        update_is_whole, _conv, _of("Adam", fused=True, amsgrad=True), batch=_images, every=1
    ),
    "complex numbers on lists": partial(update_is_whole, _Complex, _of("Adam", foreach=True), every=1),
    "two groups, one of them on lists": partial(update_is_whole, _mlp, _two_groups),
    "weight decay that begins late": partial(
        update_is_whole,
        _mlp,
        _of("AdamW", foreach=False, weight_decay=0.0),
        before_step=_decay_begins,
    ),
}

# ---- dividing


class _Short:
    """Memory runs out in batches above a size, or as often as asked, once it is switched on."""

    def __init__(self, above: int, times: int | None = None) -> None:
        self.above, self.left, self.is_on = above, times, False

    def check(self, samples: int) -> None:
        if not self.is_on or samples <= self.above or not torch.is_grad_enabled() or self.left == 0:
            return
        if self.left is not None:
            self.left -= 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module, short: _Short, needs: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.short, self.needs = body, short, needs

    def forward(self, x: Tensor) -> Tensor:
        self.short.check(len(x))
        self.needs(x)
        return self.body(x)


def _labelled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _contrast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a, b = F.normalize(model(batch["x"])), F.normalize(model(batch["x"] + 0.1))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def _inputs(shape: tuple[int, ...], samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return {"x": torch.randn(samples, *shape, generator=generator), "y": torch.arange(samples) % 4}


def divided_as_far_as_possible(
    body: Callable[[], nn.Module],
    *,
    shape: tuple[int, ...] = (8,),
    settings: bf.Settings,
    above: int,
    needs: Callable[[Tensor], object] = lambda _x: None,
    loss: Callable[..., Tensor] = _labelled,
    verify: bool = True,
    ends_with: int | None,
) -> Verdict:
    """Memory is short in a step: it runs with less, or raises the out-of-memory error and changes nothing.

    Args:
        body: Makes the layers.
        shape: Of a sample.
        settings: Of the plan.
        above: Memory runs out in micro-batches that are larger.
        needs: Raises for batches that the model does not take.
        loss: Of a batch.
        verify: As of `bf.apply`.
        ends_with: The micro-batch that is left; None if the step cannot be taken.
    """
    torch.manual_seed(0)
    short = _Short(above)
    model = _Classifier(body(), short, needs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    total = settings.micro_batch_size * settings.gradient_accumulation_steps
    batch = _inputs(shape, total)
    job = bf.Job(model=lambda: model, loss=loss, batch=batch)
    step = bf.apply(settings, job, model, optimizer, verify=verify)
    step(batch)
    short.is_on = True
    before = [p.detach().clone() for p in model.parameters()]
    try:
        step(batch)
    except torch.OutOfMemoryError as error:
        is_stated = isinstance(error, BrimfulError) and "It cannot run with less" in str(error)
        if ends_with is not None or not is_stated:
            raise WrongError(f"{type(error).__name__}: {error}") from error
        if not all(map(torch.equal, before, (p.detach() for p in model.parameters()))):
            raise WrongError("a step that ended in an error has changed parameters") from error
        short.is_on = False
        step(batch)
        if step.settings != settings:
            raise WrongError(f"the next call runs with {step.settings.describe()}") from error
        return Verdict.REFUSED
    except Exception as error:
        raise WrongError(f"{type(error).__name__} in place of an out-of-memory error: {error}") from error
    if step.settings.micro_batch_size != ends_with:
        raise WrongError(f"divided to {step.settings.micro_batch_size}, and not to {ends_with}")
    return Verdict.RIGHT


def _even(x: Tensor) -> None:
    if len(x) % 2:
        raise AssertionError(f"this model takes pairs, and got {len(x)} samples")


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def _pooled_batch_norm() -> nn.Module:
    """BatchNorm2d over 1 × 1 pixels: one sample is one value per channel."""
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
    return nn.Sequential(*pooled, nn.Flatten(), nn.Linear(8, 4))


def _instance_norm() -> nn.Module:
    """InstanceNorm refuses one value per channel whatever the batch; here it has more, and divides well."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))


def _group_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4))


def fit_divides_as_far_as_possible() -> Verdict:
    """`fit`: memory is short in one step; the error is one of memory, and the run can be resumed."""
    short = _Short(1)
    x, y = _inputs((8,), 64).values()
    job = bf.Job(
        model=lambda: _Classifier(_batch_norm(), short, lambda _x: None),
        loss=_labelled,
        batch=partial(_inputs, (8,)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        data=lambda: bf.Data(train={"x": x, "y": y}),
    )

    class SwitchOn(bf.trainer.Callback):
        def on_step(self, trainer, record):
            short.is_on = record.step >= 2

    settings = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4)
    fit = partial(
        bf.fit,
        job,
        settings,
        run_dir=tempfile.mkdtemp(),
        steps=5,
        show_progress=False,
        device="cpu",
        resume=True,
    )
    try:
        fit(callbacks=[SwitchOn()])
    except bf.errors.OutOfMemoryError as error:
        short.is_on = False
        result, _ = fit()
        if result.settings != settings or [record.step for record in result.steps] != [1, 2, 3, 4, 5]:
            raise WrongError(f"resumed with {result.settings.describe()}") from error
        return Verdict.REFUSED
    raise WrongError("the step was taken with single samples")


_PAIRS = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4)
_SIXES = bf.Settings(micro_batch_size=6, gradient_accumulation_steps=2)
_DIVIDED: dict[str, Callable[[], Verdict]] = {
    "batch norm of one": partial(
        divided_as_far_as_possible, _batch_norm, settings=_PAIRS, above=1, ends_with=None
    ),
    "batch norm over 1 × 1 pixels": partial(
        divided_as_far_as_possible,
        _pooled_batch_norm,
        shape=(3, 6, 6),
        settings=_PAIRS,
        above=1,
        ends_with=None,
    ),
    "pairs of samples": partial(
        divided_as_far_as_possible, _group_norm, settings=_SIXES, above=1, needs=_even, ends_with=None
    ),
    "pairs of samples, which a smaller even number takes": partial(
        divided_as_far_as_possible, _group_norm, settings=_SIXES, above=3, needs=_even, ends_with=2
    ),
    "a contrastive loss whose micro-batches were accepted": partial(
        divided_as_far_as_possible,
        _group_norm,
        settings=bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2),
        above=2,
        loss=_contrast,
        verify=False,
        ends_with=None,
    ),
    "batch norm in fit": fit_divides_as_far_as_possible,
    "control: group norm": partial(
        divided_as_far_as_possible, _group_norm, settings=_PAIRS, above=1, ends_with=1
    ),
    "control: instance norm": partial(
        divided_as_far_as_possible, _instance_norm, shape=(3, 6, 6), settings=_PAIRS, above=1, ends_with=1
    ),
    "control: batch norm of two": partial(
        divided_as_far_as_possible,
        _batch_norm,
        settings=bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2),
        above=2,
        ends_with=2,
    ),
}

# ---- words


def survives(error: Callable[[], Exception], is_memory: bool = True) -> Verdict:
    """A step in which a library's error is raised once is taken again, if the error is one of memory."""
    raised: list[Exception] = []
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if not raised:
            raised.append(error())
            raise raised[0]
        return model(batch).square().mean()

    job = bf.Job(model=lambda: model, loss=loss, batch=torch.randn(8, 4))
    step = bf.apply(bf.Settings(micro_batch_size=8), job, model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        outcome = step(torch.randn(8, 4))
    except Exception as found:
        if is_memory or found is not raised[0]:
            raise WrongError(f"{type(found).__name__}: {found}") from found
        return Verdict.RIGHT
    if not is_memory or len(outcome.recoveries) != 1:
        raise WrongError("the step was taken again")
    return Verdict.RIGHT


def _runtime(text: str) -> Callable[[], Exception]:
    return lambda: RuntimeError(text)


_MESSAGES: dict[str, Callable[[], Verdict]] = {
    "cublasCreate": partial(
        survives, _runtime("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    ),
    "cuBLAS workspace": partial(
        survives, _runtime("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm(...)`")
    ),
    "cuDNN": partial(survives, _runtime("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    "cuDNN 9": partial(survives, _runtime("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    "the handle of cuDNN": partial(survives, _runtime("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")),
    "driver": partial(survives, _runtime("CUDA error: out of memory")),
    "NCCL": partial(
        survives,
        _runtime(
            "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\n"
            "Last error:\nCuda failure 2 'out of memory'"
        ),
    ),
    "control: another error of cuBLAS": partial(
        survives,
        _runtime("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        is_memory=False,
    ),
}

# ---- resuming


class Killed(BaseException):
    """The process is gone: nothing is saved after it."""


class _Killer(bf.trainer.Callback):
    """Kills a run once, before or after the validation of a step."""

    def __init__(self, step: int, at: str) -> None:
        self.step, self.at, self.seen = step, at, []
        self.now = 0
        self.is_done = False

    def kill(self, at: str, step: int) -> None:
        if not self.is_done and (at, step) == (self.at, self.step):
            self.is_done = True
            raise Killed

    def on_step(self, trainer, record):
        self.now = record.step
        if self.at == "stop" and record.step == self.step and not self.is_done:
            self.is_done = True
            trainer.stop()

    def on_validation(self, trainer, record):
        self.seen.append((record.step, record.loss))
        self.kill("validated", record.step)

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.kill("validating", self.now)
        return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean()}


class _Loader:
    """Validation data in another order each time, drawn at random."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        self._data = data

    def __iter__(self):
        order = torch.randperm(len(self._data["y"]))
        yield from ({name: value[part] for name, value in self._data.items()} for part in order.split(16))


def _run(
    killer: _Killer, run_dir: str | Path, *, rate: float = 0.05, **options: Any
) -> bf.trainer.TrainingResult:
    x, y = _inputs((8,), 96).values()
    held = {"x": x[:32] + 0.3, "y": y[:32]}
    job = bf.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)),
        loss=_labelled,
        batch=partial(_inputs, (8,)),
        optimizer=lambda p: torch.optim.SGD(p, lr=rate),
        metrics=killer.metrics,
        data=lambda: bf.Data(train={"x": x, "y": y}, validation=_Loader(held)),
    )
    result, _ = bf.fit(
        job,
        bf.Settings(micro_batch_size=16),
        run_dir=run_dir,
        resume=True,
        show_progress=False,
        device="cpu",
        callbacks=[killer],
        **options,
    )
    return result


def _left(run_dir: str | Path, result: bf.trainer.TrainingResult) -> dict[str, Any]:
    """Everything that a run leaves behind, times aside."""
    from safetensors import safe_open

    records = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    with safe_open(Path(run_dir) / "best.safetensors", "pt") as best:
        of_best = best.metadata()
    return {
        "steps": [(each["step"], each["loss"]) for each in records if each["kind"] == "step"],
        "validations": [(each["step"], each["loss"]) for each in records if each["kind"] == "validation"],
        "of the result": [(each.step, each.loss) for each in result.validations],
        "best": (of_best["step"], of_best["validation_loss"]),
        "stopped": str(result.stopped_because),
    }


def resumed_is_whole(step: int, at: str, **options: Any) -> Verdict:
    """A run that was killed once and resumed leaves what an undisturbed one leaves."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, disturbed = Path(folder) / "a", Path(folder) / "b"
        never, killer = _Killer(0, ""), _Killer(step, at)
        expected = _left(undisturbed, _run(never, undisturbed, **options))
        with suppress(Killed):
            _run(killer, disturbed, **options)
        if not killer.is_done and at != "end":
            raise RuntimeError("the program does not kill the run")
        found = _left(disturbed, _run(killer, disturbed, **options))
        if found != expected:
            differs = {name: (found[name], expected[name]) for name in found if found[name] != expected[name]}
            raise WrongError(f"resumed and undisturbed: {differs}")
        if dict(killer.seen) != dict(never.seen):
            raise WrongError(f"callbacks saw {killer.seen} in place of {never.seen}")
    return Verdict.RIGHT


_KILLED: dict[str, Callable[[], Verdict]] = {
    "in the validation that ends the run": partial(resumed_is_whole, 11, "validating", steps=11),
    "after it": partial(resumed_is_whole, 11, "validated", steps=11, save_every=4),
    "in the validation of an epoch": partial(resumed_is_whole, 6, "validating", epochs=3, save_every=2),
    "in the validation after some steps": partial(
        resumed_is_whole, 8, "validating", epochs=2, validate_every=4, save_every=4
    ),
    "stopped on request where a validation is due": partial(
        resumed_is_whole, 8, "stop", epochs=2, validate_every=4
    ),
    "stopped on request in the last step": partial(resumed_is_whole, 10, "stop", steps=10),
    "with a moving average": partial(resumed_is_whole, 10, "validating", steps=10, ema_decay=0.9),
    "launched again where patience has ended": partial(
        resumed_is_whole, 0, "end", epochs=9, patience=1, rate=9.0, validate_every=4, save_every=4
    ),
    "control: in the middle of an epoch": partial(
        resumed_is_whole, 9, "validated", epochs=2, validate_every=3, save_every=2
    ),
}

# ---- links


def outside_is_intact(name: str, *, to_directory: bool = False, damages: bool = False) -> Verdict:
    """A run directory has a link in it; resuming the run changes nothing outside.

    Args:
        name: Of the link.
        to_directory: It points to a directory.
        damages: Cut a line of the records, which are then set aside.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, outside = Path(folder) / "run", Path(folder) / "outside"
        never = _Killer(0, "")
        _run(never, run, steps=4, save_every=2)
        outside.mkdir()
        precious = outside / "precious.txt"
        precious.write_text("precious\n" * 100)
        link = run / name
        link.unlink(missing_ok=True)
        target = outside if to_directory else outside / "new.txt" if damages else precious
        link.symlink_to(target)
        if damages:
            records = run / "metrics.jsonl"
            records.write_bytes(b"?" + records.read_bytes()[1:])
        refused = False
        try:
            result = _run(never, run, steps=6, save_every=2)
            if [each.step for each in result.steps][-1] != 6:
                raise WrongError("the run did not go on")
        except BrimfulError as error:
            if "link" not in str(error):
                raise WrongError(f"{type(error).__name__}: {error}") from error
            refused = True
        if precious.read_text() != "precious\n" * 100 or [each.name for each in outside.iterdir()] != [
            "precious.txt"
        ]:
            raise WrongError(
                f"outside: {[each.name for each in outside.iterdir()]}, {precious.read_text()[:40]}"
            )
    return Verdict.REFUSED if refused else Verdict.RIGHT


def linked_is_used(name: str) -> Verdict:
    """A user's link, of the saves or of the run directory itself, to another disk is followed."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere, run = Path(folder) / "disk", Path(folder) / "run"
        elsewhere.mkdir()
        if name:
            run.mkdir()
        (run / name if name else run).symlink_to(elsewhere)
        never = _Killer(0, "")
        _run(never, run, steps=4, save_every=2)
        result = _run(never, run, steps=6, save_every=2)
        saved = elsewhere if name else elsewhere / "saves"
        names = sorted(each.name for each in saved.iterdir())
        if result.steps[-1].step != 6 or "step-000000006" not in names:
            raise WrongError(f"the saves elsewhere are {names}")
    return Verdict.RIGHT


_LINKED: dict[str, Callable[[], Verdict]] = {
    "the records": partial(outside_is_intact, "metrics.jsonl"),
    "a result that was being written": partial(outside_is_intact, ".result.json.partial"),
    "settings that were being written": partial(outside_is_intact, ".settings.json.partial"),
    "weights that were being written": partial(outside_is_intact, ".weights.safetensors.partial"),
    "damaged records, set aside": partial(outside_is_intact, "metrics.damaged-1.jsonl", damages=True),
    "a save that was being written": partial(
        outside_is_intact, "saves/.step-000000006.partial", to_directory=True
    ),
    "weights": partial(outside_is_intact, "weights.safetensors"),
    "control: saves on another disk": partial(linked_is_used, "saves"),
    "control: the run directory on another disk": partial(linked_is_used, ""),
}

# ---- random numbers


def _drawing_job(**changes: Any) -> bf.Job:
    """A job whose code draws from every generator."""

    def batch(samples: int) -> dict[str, Tensor]:
        random.random()
        np.random.rand()
        return {"x": torch.randn(samples, 8), "y": torch.randint(0, 4, (samples,))}

    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)),
        loss=_labelled,
        batch=batch,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        data=lambda: bf.Data(train=batch(64)),
        **changes,
    )


def leaves_random_numbers(
    call: Callable[[bf.Job], object], job: Callable[[], bf.Job] = _drawing_job
) -> Verdict:
    """Weights that are made after a call are those without it; so are the environment and other generators."""
    with _rich_imported_anew():
        return _leaves_random_numbers(call, job())


@contextmanager
def _rich_imported_anew() -> Iterator[None]:
    """Within, importing rich draws random numbers as in a new process."""

    def taken() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rich"}

    before = taken()
    try:
        yield
    finally:
        taken()
        sys.modules.update(before)


def _leaves_random_numbers(call: Callable[[bf.Job], object], job: bf.Job) -> Verdict:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    np.random.randn()  # the generator keeps a second number

    def state() -> tuple[Any, ...]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
        return torch.get_rng_state(), random.getstate(), np.random.get_state(), own

    before = state()
    call(job)
    after = state()
    differing = [
        name
        for name, a, b in zip(("torch", "random", "numpy", "os.environ"), before, after, strict=True)
        if str(a if name != "torch" else a.tolist()) != str(b if name != "torch" else b.tolist())
    ]
    if differing:
        raise WrongError(f"changed: {', '.join(differing)}")
    return Verdict.RIGHT


def _settings() -> bf.Settings:
    return bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2)


def _applied(job: bf.Job) -> None:
    state = torch.get_rng_state()
    model = job.model()
    torch.set_rng_state(state)
    bf.apply(_settings(), job, model, torch.optim.SGD(model.parameters(), lr=0.1)).remove()


def _planned_and_checked(job: bf.Job) -> None:
    bf.plan(job, "RTX 3090", global_batch_size=8).check(job)


_DRAWN: dict[str, Callable[[], Verdict]] = {
    "estimate": partial(leaves_random_numbers, lambda job: bf.estimate(job, "cpu", micro_batch_size=4)),
    "estimate at another size": partial(leaves_random_numbers, lambda job: bf.estimate(job, "RTX 3090").at(5)),
    "plan and check": partial(leaves_random_numbers, _planned_and_checked),
    "gpus": partial(leaves_random_numbers, lambda job: bf.gpus(job, devices=["RTX 3090"], global_batch_size=8)),
    "measure": partial(leaves_random_numbers, lambda job: bf.measure(job, _settings(), "cpu")),
    "verify": partial(leaves_random_numbers, lambda job: bf.verify(job, _settings(), "cpu")),
    "fit": partial(
        leaves_random_numbers, lambda job: bf.fit(job, _settings(), steps=5, show_progress=False, device="cpu")
    ),
    "a plan that is refused": partial(
        leaves_random_numbers,
        lambda job: _refused(lambda: bf.plan(job, "RTX 3090", global_batch_size=8, budget="1KiB")),
    ),
    "apply": partial(leaves_random_numbers, _applied),
}


def _refused(call: Callable[[], object]) -> None:
    with suppress(BrimfulError):
        call()
        raise RuntimeError("it is not refused")


# ---- beside the steps


def average_counts(
    make_model: Callable[[], nn.Module],
    batch: Callable[[int], dict[str, Tensor]],
    loss: Callable[..., Tensor] = _labelled,
    *,
    optimizer: str = "adamw",
    room: float = 1.0,
) -> Verdict:
    """Predicted and measured peak of a run contain the average of the weights, and the budget holds both.

    Args:
        make_model: Makes the model.
        batch: Makes a batch.
        loss: Of a batch.
        optimizer: By name.
        room: Budget beyond the plan's peak, in sizes of the model.
    """
    job = bf.Job(
        model=make_model, loss=loss, batch=batch, data=lambda: bf.Data(train=batch(96)), optimizer=optimizer
    )
    weights = sum(parameter.nbytes for parameter in make_model().parameters())
    peak = bf.plan(job, "cpu", global_batch_size=16, micro_batch_size=16).predicted_peak_device_bytes
    budget = peak + int(room * weights) + 4096
    plan = bf.plan(job, "cpu", global_batch_size=16, micro_batch_size=16, budget=budget)
    fit = partial(bf.fit, job, plan, steps=5, show_progress=False)
    without, _ = fit()
    try:
        result, _ = fit(ema_decay=0.99)
    except bf.errors.InfeasibleError as error:
        if room >= 1:
            raise WrongError(f"refused with room for the average: {error}") from error
        return Verdict.REFUSED
    measured, predicted = result.measured_peak_allocated_bytes, result.predicted_peak_allocated_bytes
    expected = without.measured_peak_allocated_bytes + weights
    if measured > budget or abs(measured - expected) > 0.01 * expected:
        raise WrongError(f"measured {measured}, by the run without an average {expected}, budget {budget}")
    if abs(predicted - measured) > 0.02 * measured:
        raise WrongError(f"predicted {predicted}, measured {measured}")
    return Verdict.RIGHT


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)), nn.Linear(256, 4))


def _frozen_body() -> nn.Module:
    model = _wide()
    for layer in model[:4]:
        layer.requires_grad_(False)
    return model


def _words() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Embedding(2000, 64), layer, nn.Linear(64, 2000))


def _next_words(samples: int) -> dict[str, Tensor]:
    return {"x": torch.arange(samples * 12).reshape(samples, 12) % 2000}


def _word_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())


_KEPT: dict[str, Callable[[], Verdict]] = {
    "an average that fits": partial(average_counts, _wide, partial(_inputs, (256,))),
    "an average that does not": partial(average_counts, _wide, partial(_inputs, (256,)), room=0.5),
    "an average, sgd": partial(average_counts, _wide, partial(_inputs, (256,)), optimizer="sgd"),
    "an average of frozen layers too": partial(average_counts, _frozen_body, partial(_inputs, (256,))),
    "an average of a language model": partial(average_counts, _words, _next_words, _word_loss),
    "an average of a language model that does not fit": partial(
        average_counts, _words, _next_words, _word_loss, room=0.9
    ),
}


def _cases(kind: str, programs: dict[str, Callable[[], Verdict]]) -> Iterable[Case]:
    return (Case(kind, name, partial(_quietly, run)) for name, run in programs.items())


def _quietly(run: Callable[[], Verdict]) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()


CASES = (
    *_cases(IN_UPDATE, _UPDATES),
    *_cases(DIVIDING, _DIVIDED),
    *_cases(RESUMED, _KILLED),
    *_cases(LINKS, _LINKED),
    *_cases(RANDOM, _DRAWN),
    *_cases(BESIDE, _KEPT),
    *_cases(WORDS, _MESSAGES),
)
