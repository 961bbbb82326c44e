"""Refusals and notes whose words must name the true reason, and jobs that need none."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

SIZES = "models that accept some micro-batch sizes only"
REPLICAS = "models in nn.DataParallel"
PAGED = "optimizers whose state is paged"
SET_DATA = "weights set by `.data` while a model is built"
EXISTING = "functions that return a model that is there"

_MIB = 2**20
_WIDTH = 256


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def _job(model: Any, optimizer: str = "sgd") -> bf.Job:
    return bf.Job(model=model, loss=_mean_square, batch=lambda n: torch.randn(n, _WIDTH), optimizer=optimizer)


# Recomputation in models that refuse the sizes which brimful probes.


class _InGroups(nn.Module):
    """Adds to each sample the mean of its group; refuses a batch that groups do not divide."""

    def __init__(self, size: int, refuse: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self.size, self.refuse = size, refuse

    def forward(self, x: Tensor) -> Tensor:
        self.refuse(x, self.size)
        groups = x.unflatten(0, (-1, self.size))
        return (groups + groups.mean(1, keepdim=True)).flatten(0, 1)


def _by_assertion(x: Tensor, size: int) -> None:
    assert len(x) % size == 0, "Batch size should be divisible"


def _by_value_error(x: Tensor, size: int) -> None:
    if len(x) % size:
        raise ValueError(f"a batch of {len(x)} has no groups of {size}")


def _by_reshape(x: Tensor, size: int) -> None:
    x.view(-1, size, _WIDTH)


def _deep(first: nn.Module, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), activation()) for _ in range(6))
    return nn.Sequential(first, *blocks, nn.Linear(_WIDTH, 10))


def _recomputes(
    group: int,
    refuse: Callable[[Tensor, int], None],
    *,
    samples: int = 1024,
    optimizer: str = "sgd",
    activation: Callable[[], nn.Module] = nn.GELU,
) -> Verdict:
    """Whether some of the choices recompute, as they do where nothing is refused."""
    job = _job(lambda: _deep(_InGroups(group, refuse), activation), optimizer)
    plan = bf.plan(job, "cpu", budget="70%", global_batch_size=samples)
    false = [note for note in plan.notes if note.startswith("Nothing is recomputed")]
    if false or "recomputed" not in str(plan):
        raise WrongError(f"nothing is recomputed: {false}")
    return Verdict.RIGHT


# A batch spread over several GPUs of one process.


class _WithReplicas(nn.Module):
    def __init__(self, devices: list[int] | None = None) -> None:
        super().__init__()
        self.features = nn.DataParallel(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()), devices)
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class _Spread(nn.DataParallel):
    """A class of a user's own that derives from it."""


def _refused(run: Callable[[], object]) -> Verdict:
    try:
        run()
    except bf.errors.UsageError as error:
        if "DistributedDataParallel" not in str(error):
            raise WrongError(f"refused without the way out: {error}") from error
        return Verdict.REFUSED
    raise WrongError("taken as a model on one GPU")


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 10))


def _apply_to_replicas() -> None:
    plan = bf.plan(_job(_small), "cpu", budget="1GiB", global_batch_size=8)
    model = nn.DataParallel(_small())
    bf.apply(plan, _job(_small), model, torch.optim.SGD(model.parameters(), 0.1))


def _inner_module_is_taken() -> Verdict:
    bf.estimate(_job(nn.DataParallel(_small()).module), "cpu", micro_batch_size=8)
    return Verdict.RIGHT


# Weights set while the model is built, against the same module given as it is.


def _set_all(layer: nn.Linear, value: Callable[[Tensor], Tensor]) -> None:
    layer.weight.data = value(layer.weight)


def _built(change: Callable[[nn.Sequential], None]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH, bias=False))
        change(model)
        return model

    return build


def _other_shape(model: nn.Sequential) -> None:
    model[2].weight.data = torch.randn(32, _WIDTH)


def _other_type(model: nn.Sequential) -> None:
    model.double()
    model[0].weight.data = torch.zeros(_WIDTH, _WIDTH, dtype=torch.float64)


def _tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight
    model[0].weight.data = torch.eye(_WIDTH)


def _buffer(model: nn.Sequential) -> None:
    model.register_buffer("scale", torch.ones(4))
    model.scale.data = torch.full((_WIDTH,), math.pi)
    if model.scale.data.sum() < _WIDTH:
        raise WrongError("a buffer's values are lost")


def _same_as_built(change: Callable[[nn.Sequential], None]) -> Verdict:
    build = _built(change)
    dtype = next(build().parameters()).dtype
    peaks = [
        bf.estimate(
            bf.Job(model=model, loss=_mean_square, batch=lambda n: torch.randn(n, _WIDTH, dtype=dtype)),
            "cpu",
            micro_batch_size=16,
        ).predicted_peak_allocated_bytes
        for model in (build, build())
    ]
    if peaks[0] != peaks[1]:
        raise WrongError(f"{peaks[0]} bytes of the function, {peaks[1]} of the module")
    return Verdict.RIGHT


# Functions that return modules which others hold: nothing may be changed in them.


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, _WIDTH))


def _is_left_alone(
    there: nn.Module, model: Callable[[], nn.Module], asked: Callable[[bf.Job], object]
) -> Verdict:
    """`there`, of which `model` returns all or a part, is afterwards what it was."""
    tensors = {**dict(there.named_parameters()), **dict(there.named_buffers())}
    before = {name: (type(each), each.detach().clone()) for name, each in tensors.items()}
    is_training = there.training
    asked(_job(model))
    after = {**dict(there.named_parameters()), **dict(there.named_buffers())}
    for name, (kind, values) in before.items():
        if after[name] is not tensors[name] or type(after[name]) is not kind:
            raise WrongError(f"{name} is another tensor, a {type(after[name]).__name__}")
        if not torch.equal(after[name], values):
            raise WrongError(f"{name} has other values")
    if there.training is not is_training or any(each.grad is not None for each in there.parameters()):
        raise WrongError("gradients or the training mode are left behind")
    return Verdict.RIGHT


def _existing(asked: Callable[[bf.Job], object]) -> Verdict:
    there = _norms().eval()
    return _is_left_alone(there, lambda: there, asked)


def _existing_part() -> Verdict:
    """A frozen encoder that is loaded once, under a head that is built each time."""
    encoder = _norms().requires_grad_(False)
    return _is_left_alone(
        encoder,
        lambda: nn.Sequential(encoder, nn.Linear(_WIDTH, 4)),
        lambda job: bf.plan(job, "T4", global_batch_size=16),
    )


def _existing_buffers() -> Verdict:
    scale = nn.BatchNorm1d(_WIDTH, affine=False)
    return _is_left_alone(
        scale,
        lambda: nn.Sequential(nn.Linear(_WIDTH, _WIDTH), scale),
        lambda job: bf.measure(job, bf.Settings(micro_batch_size=8)),
    )


def _existing_in_training() -> Verdict:
    """The check of the first step captures the job, whose function returns what is trained."""
    there = _norms()
    job = _job(lambda: there)
    optimizer = torch.optim.SGD(there.parameters(), lr=0.1)
    step = bf.apply(bf.Settings(micro_batch_size=4, gradient_accumulation_steps=2), job, there, optimizer)
    before = [each.detach().clone() for each in there.parameters()]
    step(torch.randn(8, _WIDTH))
    after = list(there.parameters())
    if not all(type(each) is nn.Parameter for each in after) or all(map(torch.equal, before, after)):
        raise WrongError("the step did not train the model")
    return Verdict.RIGHT


def _existing_weight() -> Verdict:
    """A new layer that holds the weight of one that is trained."""
    there = nn.Linear(_WIDTH, _WIDTH)

    def build() -> nn.Module:
        made = nn.Linear(_WIDTH, _WIDTH)
        made.weight = there.weight
        return made

    return _is_left_alone(there, build, lambda job: bf.measure(job, bf.Settings(micro_batch_size=8)))


class _Locked(nn.Module):
    """Cannot be copied, and copies a part of itself while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _built_is_not_copied() -> Verdict:
    bf.estimate(_job(_Locked), "T4", micro_batch_size=8)
    bf.measure(_job(_Locked), bf.Settings(micro_batch_size=8))
    return Verdict.RIGHT


def _paged(name: str, is_paged: bool) -> Verdict:
    """Whether the state that CUDA may move to the host is stated, of what has any."""
    import bitsandbytes

    make = getattr(bitsandbytes.optim, name)
    job = bf.Job(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)),
        loss=_mean_square,
        batch=lambda n: torch.randn(n, 512),
        optimizer=lambda parameters: make(parameters, lr=1e-3),
    )
    said = bf.estimate(job, "RTX 3090", micro_batch_size=4).uncertain
    if is_paged != any("paged" in each for each in said):
        raise WrongError(f"of {name} is said: {said}")
    return Verdict.STATED if is_paged else Verdict.RIGHT


CASES = (
    Case(EXISTING, "an estimate", lambda: _existing(lambda job: bf.estimate(job, "T4", micro_batch_size=8))),
    Case(EXISTING, "the first step", _existing_in_training),
    Case(
        EXISTING,
        "a measurement",
        lambda: _existing(lambda job: bf.measure(job, bf.Settings(micro_batch_size=8))),
    ),
    Case(
        EXISTING,
        "verification",
        lambda: _existing(
            lambda job: bf.verify(job, bf.Settings(micro_batch_size=8, precision="bf16"), device="cpu")
        ),
    ),
    Case(EXISTING, "a plan", lambda: _existing(lambda job: bf.plan(job, "cpu", global_batch_size=16))),
    Case(EXISTING, "a part, planned", _existing_part),
    Case(EXISTING, "a layer with buffers only, measured", _existing_buffers),
    Case(EXISTING, "a weight of another layer, measured", _existing_weight),
    Case(
        EXISTING,
        "a shallow copy, planned",
        lambda: _is_left_alone(
            there := _norms(), lambda: copy.copy(there), lambda job: bf.plan(job, "T4", global_batch_size=16)
        ),
    ),
    Case(EXISTING, "control: a model that cannot be copied", _built_is_not_copied),
    Case(PAGED, "AdamW", lambda: _paged("PagedAdamW", True)),
    Case(PAGED, "AdamW in 8 bits", lambda: _paged("PagedAdamW8bit", True)),
    Case(PAGED, "AdamW in 32 bits", lambda: _paged("PagedAdamW32bit", True)),
    Case(PAGED, "Lion", lambda: _paged("PagedLion", True)),
    Case(PAGED, "Lion in 8 bits", lambda: _paged("PagedLion8bit", True)),
    Case(PAGED, "control: not paged", lambda: _paged("AdamW8bit", False)),
    Case(SIZES, "pairs, by an assertion", lambda: _recomputes(2, _by_assertion)),
    Case(SIZES, "pairs, by a reshape", lambda: _recomputes(2, _by_reshape, optimizer="adamw", samples=2048)),
    Case(SIZES, "groups of 4", lambda: _recomputes(4, _by_value_error, activation=nn.SiLU)),
    Case(SIZES, "groups of 3", lambda: _recomputes(3, _by_value_error, samples=1536)),
    Case(SIZES, "groups of 16", lambda: _recomputes(16, _by_assertion, optimizer="adamw", samples=2048)),
    Case(SIZES, "control: any size", lambda: _recomputes(1, _by_assertion)),
    Case(
        REPLICAS,
        "a module",
        lambda: _refused(lambda: bf.estimate(_job(nn.DataParallel(_small())), "cpu", micro_batch_size=8)),
    ),
    Case(
        REPLICAS,
        "a function",
        lambda: _refused(lambda: bf.plan(_job(lambda: nn.DataParallel(_small())), "T4", global_batch_size=8)),
    ),
    Case(
        REPLICAS,
        "a part",
        lambda: _refused(lambda: bf.estimate(_job(_WithReplicas), "RTX 3090", micro_batch_size=8)),
    ),
    Case(
        REPLICAS,
        "a class of one's own, measured",
        lambda: _refused(lambda: bf.measure(_job(lambda: _Spread(_small())), bf.Settings(micro_batch_size=8))),
    ),
    Case(REPLICAS, "a plan applied", lambda: _refused(_apply_to_replicas)),
    Case(REPLICAS, "control: the module inside", _inner_module_is_taken),
    Case(
        SET_DATA,
        "numbers drawn",
        lambda: _same_as_built(lambda m: _set_all(m[0], lambda w: torch.randn(w.shape))),
    ),
    Case(
        SET_DATA,
        "a transposed tensor",
        lambda: _same_as_built(lambda m: _set_all(m[0], lambda w: torch.randn(w.shape).t())),
    ),
    Case(SET_DATA, "another shape", lambda: _same_as_built(_other_shape)),
    Case(SET_DATA, "in float64", lambda: _same_as_built(_other_type)),
    Case(SET_DATA, "tied weights", lambda: _same_as_built(_tied)),
    Case(SET_DATA, "control: a buffer", lambda: _same_as_built(_buffer)),
    Case(
        SET_DATA,
        "control: changed in place",
        lambda: _same_as_built(lambda m: m[0].weight.data.copy_(torch.eye(_WIDTH))),
    ),
)
