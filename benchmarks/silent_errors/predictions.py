"""What is predicted of memory, and what is said beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

HOST = "tensors that stay on the host"
RECURRENT = "recurrent layers in reduced precision on a CPU"
AUTOCAST = "called inside autocast"
UNTRAINED = "trainable parameters without a gradient"
CONVOLUTION = "convolutions with few input channels on a CPU"

_GPU = "RTX 3090"
_MIB = 2**20
_TOLERANCE = 0.03
"""Of a measured peak: scratch memory of kernels is not predicted, see docs/reference/limits.md."""


# What a loop keeps on the host, against the same loop without it.

_WIDTH = 1024
Loop = Callable[[nn.Module, Iterable[Any]], None]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))


def _gpu_bytes(loop: Loop, model: Callable[[], nn.Module] = _net) -> bf.api.Estimate:
    job = bf.Job(model=model, loss=lambda _m, _b: 0, batch=lambda n: torch.randn(n, _WIDTH), loop=loop)
    return bf.estimate(job, _GPU, micro_batch_size=512)


def _same_memory(loop: Loop, other: Loop) -> Verdict:
    with_it, without = _gpu_bytes(loop), _gpu_bytes(other)
    kept, plain = (each.predicted_peak_allocated_bytes for each in (with_it, without))
    if abs(kept - plain) > _MIB / 4:
        raise WrongError(f"{kept / _MIB:.1f} MiB with what stays on the host, {plain / _MIB:.1f} without")
    if any("grows" in note for note in with_it.uncertain):
        raise WrongError(f"what stays on the host is reported as a leak: {with_it.uncertain}")
    return Verdict.RIGHT


def _steps(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    device: Any = "cuda",
    each: Callable[[Tensor, Tensor], None] = lambda _x, _out: None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
) -> Iterator[None]:
    model = model.to(device)
    stepper = optimizer(model.parameters(), lr=1e-3)
    for x in batches:
        moved = x.to(device)
        stepper.zero_grad()
        out = model(moved)
        out.square().mean().backward()
        stepper.step()
        each(x, out)
        yield


def _plain(model: nn.Module, batches: Iterable[Tensor]) -> None:
    for _ in _steps(model, batches):
        pass


def _outputs_collected(model: nn.Module, batches: Iterable[Tensor]) -> None:
    outputs: list[Tensor] = []
    for _ in _steps(model, batches, each=lambda _x, out: outputs.append(out.detach().cpu())):
        pass
    torch.cat(outputs).mean(0)


def _outputs_by_name(model: nn.Module, batches: Iterable[Tensor]) -> None:
    kept: dict[int, Tensor] = {}
    host = torch.device("cpu")
    for _ in _steps(model, batches, each=lambda _x, out: kept.update({len(kept): out.detach().to(host)})):
        pass


def _averaged_on_host(model: nn.Module, batches: Iterable[Tensor]) -> None:
    average = copy.deepcopy(model).cpu()
    for _ in _steps(model, batches):
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.99).add_(value.detach().cpu(), alpha=0.01)


def _averaged_by_torch(model: nn.Module, batches: Iterable[Tensor]) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, device=torch.device("cpu"))
    for _ in _steps(model, batches):
        with torch.no_grad():
            for mean, value in zip(average.module.parameters(), model.parameters(), strict=True):
                mean.lerp_(value.to(mean.device), 0.01)


def _ring_buffer(model: nn.Module, batches: Iterable[Tensor]) -> None:
    memory = torch.zeros(16, 512, _WIDTH, pin_memory=True)
    losses = torch.zeros(4096 * 1024)
    for index, _ in enumerate(_steps(model, batches, each=lambda _x, out: memory[0].copy_(out.detach()))):
        losses[index] = float(index)
    (memory.mean(), losses.sum())


def _lists_and_arrays(model: nn.Module, batches: Iterable[Tensor]) -> None:
    kept: list[Any] = []
    for index, _ in enumerate(
        _steps(model, batches, each=lambda _x, out: kept.append(out.detach().cpu().numpy()))
    ):
        kept.append(torch.from_numpy(kept[-1]) * 2)
        kept.append(torch.tensor([[float(index)] * 1024] * 1024) + 1)


def _prepared_on_host(model: nn.Module, batches: Iterable[Tensor]) -> None:
    noise = torch.randn(64, 512, _WIDTH)

    def prepared() -> Iterator[Tensor]:
        for x in batches:
            yield x + 0 * noise.mean(0)

    for _ in _steps(model, prepared()):
        pass


def _scores_on_host(model: nn.Module, batches: Iterable[Tensor]) -> None:
    table = torch.zeros_like(next(model.parameters()), device="cpu")
    for _ in _steps(model, batches):
        table += next(model.parameters()).detach().cpu().abs()
        torch.linalg.vector_norm(torch.stack([table, table]), dim=0)


def _device_of_script(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """A script on a machine without a GPU calls its device "cpu"; what it makes there is on the device."""
    device = "cpu"
    teacher = torch.zeros(64 * 2**18, device=device)
    for _ in _steps(model, batches, device=device):
        pass
    teacher.sum()


def _made_on_device(device: Callable[[nn.Module], Any]) -> Loop:
    def loop(model: nn.Module, batches: Iterable[Tensor]) -> None:
        large = torch.zeros(64 * 2**18, device=device(model))
        for _ in _steps(model, batches):
            large.mul_(0.5)

    return loop


def _is_counted(loop: Loop) -> Verdict:
    kept, plain = (_gpu_bytes(each).predicted_peak_allocated_bytes for each in (loop, _plain))
    if abs(kept - plain - 64 * _MIB) > _MIB / 4:
        raise WrongError(f"64 MiB on the GPU make {(kept - plain) / _MIB:.1f} MiB more")
    return Verdict.RIGHT


def _loss_on_host() -> Verdict:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen = model(x)
        return seen.cpu().square().mul(2).add(1).log().mean()

    def plain(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    peaks = []
    for each in (loss, plain):
        job = bf.Job(model=_net, loss=each, batch=lambda n: torch.randn(n, _WIDTH))
        peaks.append(bf.estimate(job, _GPU, micro_batch_size=4096).predicted_peak_allocated_bytes)
    # Its gradient comes back as one matrix, where a mean's is one number that is expanded.
    if abs(peaks[0] - peaks[1]) > 17 * _MIB:
        raise WrongError(f"{peaks[0] / _MIB:.1f} MiB with a loss on the host, {peaks[1] / _MIB:.1f} without")
    return Verdict.RIGHT


_KEPT = {
    "outputs collected by .cpu()": _outputs_collected,
    'outputs collected by .to(torch.device("cpu"))': _outputs_by_name,
    "an average of the weights on the host": _averaged_on_host,
    "torch's AveragedModel on the host": _averaged_by_torch,
    "a pinned buffer, and one of no named device": _ring_buffer,
    "arrays, and tensors made of arrays and lists": _lists_and_arrays,
    "a batch prepared with a large table on the host": _prepared_on_host,
    "scores by zeros_like on the host": _scores_on_host,
}
_COUNTED = {
    "made by name on the GPU": _made_on_device(lambda _model: "cuda"),
    "made where the model is": _made_on_device(lambda model: next(model.parameters()).device),
    'where the script calls its device "cpu"': _device_of_script,
}


# Convolutions, against the profiler.


def _is_measured(
    model: Callable[[], nn.Module], shape: tuple[int, ...], *, samples: int = 16, **settings: Any
) -> Verdict:
    """The prediction is what the profiler measures, or is said not to be sure."""
    job = bf.Job(
        model=model,
        loss=lambda m, x: m(x).float().square().mean(),
        batch=lambda n: torch.rand(n, *shape),
        optimizer="sgd",
    )
    predicted = bf.estimate(job, "cpu", micro_batch_size=samples, **settings)
    measured = bf.measure(job, bf.Settings(micro_batch_size=samples, **settings), "cpu")
    took, said = measured.measured_peak_allocated_bytes, predicted.predicted_peak_allocated_bytes
    if abs(said - took) <= _TOLERANCE * took:
        return Verdict.RIGHT
    if predicted.uncertain:
        return Verdict.STATED
    raise WrongError(f"{said / _MIB:.2f} MiB predicted, {took / _MIB:.2f} measured")


def _convolution(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in layers), nn.Flatten())


_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of an Atari agent": (
        _convolution(lambda: nn.Conv2d(4, 32, 8, 4), nn.ReLU, lambda: nn.Conv2d(32, 64, 4, 2), nn.ReLU),
        (4, 84, 84),
    ),
    "from 6 to 12 channels": (_convolution(lambda: nn.Conv2d(6, 12, 3, padding=1), nn.ReLU), (6, 48, 48)),
    "between 12 channels": (
        _convolution(lambda: nn.Conv2d(3, 12, 3), nn.ReLU, lambda: nn.Conv2d(12, 12, 3), nn.ReLU),
        (3, 48, 48),
    ),
    "over sequences": (
        _convolution(lambda: nn.Conv1d(5, 24, 7, padding=3), nn.ReLU, lambda: nn.Conv1d(24, 8, 3)),
        (5, 2048),
    ),
    "over volumes": (
        _convolution(lambda: nn.Conv3d(4, 8, 3, padding=1), nn.ReLU, lambda: nn.Conv3d(8, 8, 3)),
        (4, 14, 14, 14),
    ),
    "of 1 × 1 kernels": (
        _convolution(lambda: nn.Conv2d(4, 24, 1), nn.ReLU, lambda: nn.Conv2d(24, 6, 1)),
        (4, 48, 48),
    ),
    "in groups of 4": (
        _convolution(lambda: nn.Conv2d(4, 24, 3), nn.ReLU, lambda: nn.Conv2d(24, 24, 3, groups=6)),
        (4, 40, 40),
    ),
    "of each of 24 channels": (
        _convolution(
            lambda: nn.Conv2d(3, 24, 3),
            nn.ReLU,
            lambda: nn.Conv2d(24, 24, 3, groups=24),
            nn.ReLU,
            lambda: nn.Conv2d(24, 8, 1),
        ),
        (3, 40, 40),
    ),
    "transposed": (
        _convolution(
            lambda: nn.Conv2d(3, 16, 3),
            nn.ReLU,
            lambda: nn.ConvTranspose2d(16, 6, 4, 2, 1),
            nn.ReLU,
            lambda: nn.Conv2d(6, 3, 3),
        ),
        (3, 40, 40),
    ),
    "dilated": (
        _convolution(lambda: nn.Conv2d(4, 12, 3), nn.ReLU, lambda: nn.Conv2d(12, 12, 3, dilation=2)),
        (4, 40, 40),
    ),
    "of 64 channels (control)": (
        _convolution(lambda: nn.Conv2d(3, 64, 3), nn.ReLU, lambda: nn.Conv2d(64, 64, 3)),
        (3, 32, 32),
    ),
}


# Recurrent layers in reduced precision, against the profiler.


class _Recurrent(nn.Module):
    def __init__(self, make: Callable[..., nn.Module], width: int = 64, **options: Any) -> None:
        super().__init__()
        self.layer = make(28, width, batch_first=True, **options)
        outputs = (options.get("proj_size") or width) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(outputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


_RECURRENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an LSTM in bf16": (lambda: _Recurrent(nn.LSTM), "bf16"),
    "an LSTM of three layers in bf16": (lambda: _Recurrent(nn.LSTM, num_layers=3), "bf16"),
    "an LSTM of both directions in bf16": (lambda: _Recurrent(nn.LSTM, 96, bidirectional=True), "bf16"),
    "an LSTM with a projection in bf16": (lambda: _Recurrent(nn.LSTM, proj_size=24), "bf16"),
    "a GRU in bf16": (lambda: _Recurrent(nn.GRU, bidirectional=True), "bf16"),
    "an RNN in bf16": (lambda: _Recurrent(nn.RNN, num_layers=2), "bf16"),
    "an LSTM in fp32 (control)": (lambda: _Recurrent(nn.LSTM), "fp32"),
    "a GRU in fp32 (control)": (lambda: _Recurrent(nn.GRU), "fp32"),
}


def _no_uncertain_advice() -> Verdict:
    """A precision that is advised must fit where it is tried."""
    job = bf.Job(
        model=lambda: _Recurrent(nn.LSTM),
        loss=lambda m, x: m(x).float().square().mean(),
        batch=lambda n: torch.rand(n, 28, 28),
        optimizer="sgd",
    )
    baseline = bf.estimate(job, "cpu", micro_batch_size=64).predicted_peak_allocated_bytes
    try:
        bf.plan(job, "cpu", global_batch_size=64, micro_batch_size=64, budget=int(0.3 * baseline))
    except bf.InfeasibleError as error:
        advised = [line for line in str(error).splitlines() if "would fit: precision" in line]
        if advised and "uncertain" not in advised[0]:
            raise WrongError(advised[0]) from error
    return Verdict.RIGHT


# Called inside autocast, and parameters that are not trained.


class _Orthogonal(torch.optim.Optimizer):
    """Updates by a product of matrices, as Muon does."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.dim() == 2:
                    each.sub_(each.grad @ each.grad.T @ each.grad, alpha=group["lr"])


def _fp32_loop(model: nn.Module, batches: Iterable[Tensor]) -> None:
    for _ in _steps(model, batches):
        pass


def _same_inside_autocast(ask: Callable[[], float]) -> Verdict:
    outside = ask()
    with torch.autocast("cpu", torch.bfloat16):
        inside = ask()
    if inside != outside:
        raise WrongError(f"{inside} inside autocast, {outside} outside")
    return Verdict.RIGHT


def _job(**changes: Any) -> bf.Job:
    given = {
        "model": _net,
        "loss": lambda m, x: m(x).square().mean(),
        "batch": lambda n: torch.randn(n, _WIDTH),
    }
    return bf.Job(**given | {"optimizer": "sgd"} | changes)


def _estimated(device: str, **changes: Any) -> Callable[[], float]:
    return lambda: bf.estimate(_job(**changes), device, micro_batch_size=64).predicted_peak_allocated_bytes


def _loop_measured() -> float:
    job = _job(loop=lambda model, batches: [None for _ in _steps(model, batches, device="cpu")])
    return bf.measure(job, bf.Settings(micro_batch_size=64), "cpu").measured_peak_allocated_bytes


class _Adapted(nn.Module):
    def __init__(self, checkpointed: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 100)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + self.checkpointed(block, h)
        return self.head(h)


def _names_untrained(
    checkpointed: Callable[[nn.Module, Tensor], Tensor], *, says: str | None, device: str = "cpu"
) -> Verdict:
    job = bf.Job(
        model=lambda: _Adapted(checkpointed),
        loss=lambda m, x: nn.functional.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        batch=lambda n: torch.randint(0, 100, (n, 16)),
        optimizer="adamw",
    )
    said = [note for note in bf.estimate(job, device, micro_batch_size=4).notes if "no gradient" in note]
    if bool(said) != (says is not None) or (says is not None and says not in said[0]):
        raise WrongError(f"said of parameters without gradient: {said}")
    return Verdict.RIGHT if says is None else Verdict.STATED


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(block, x, use_reentrant=True)


def _not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(block, x, use_reentrant=False)


CASES: tuple[Case, ...] = (
    *(Case(HOST, name, lambda loop=loop: _same_memory(loop, _plain)) for name, loop in _KEPT.items()),
    *(Case(HOST, f"{name} (control)", lambda loop=loop: _is_counted(loop)) for name, loop in _COUNTED.items()),
    Case(HOST, "a loss on the host", _loss_on_host),
    Case(AUTOCAST, "an own loop, for a GPU", lambda: _same_inside_autocast(_estimated(_GPU, loop=_fp32_loop))),
    Case(
        AUTOCAST,
        "an own loop, for a CPU",
        lambda: _same_inside_autocast(
            _estimated("cpu", loop=lambda m, b: [None for _ in _steps(m, b, device="cpu")])
        ),
    ),
    Case(AUTOCAST, "an own loop, measured", lambda: _same_inside_autocast(_loop_measured)),
    Case(
        AUTOCAST,
        "an update by products",
        lambda: _same_inside_autocast(_estimated(_GPU, optimizer=_Orthogonal)),
    ),
    Case(AUTOCAST, "brimful's own step (control)", lambda: _same_inside_autocast(_estimated("cpu"))),
    Case(
        UNTRAINED, "in reentrant checkpoints", lambda: _names_untrained(_reentrant, says="use_reentrant=False")
    ),
    Case(
        UNTRAINED,
        "in reentrant checkpoints, for a GPU",
        lambda: _names_untrained(_reentrant, says="8 trainable parameters", device=_GPU),
    ),
    Case(
        UNTRAINED,
        "detached",
        lambda: _names_untrained(lambda block, x: block(x).detach(), says="blocks.0.weight"),
    ),
    Case(
        UNTRAINED,
        "a bias that is not used",
        lambda: _names_untrained(lambda block, x: x @ block.weight, says="4 trainable parameters"),
    ),
    Case(UNTRAINED, "passed by", lambda: _names_untrained(lambda _block, x: x, says="blocks.0")),
    Case(UNTRAINED, "all trained (control)", lambda: _names_untrained(_not_reentrant, says=None)),
    Case(RECURRENT, "no advice that does not fit", _no_uncertain_advice),
    *(
        Case(
            RECURRENT,
            name,
            lambda made=made, precision=precision: _is_measured(
                made, (28, 28), samples=64, precision=precision
            ),
        )
        for name, (made, precision) in _RECURRENT.items()
    ),
    *(Case(CONVOLUTION, name, lambda made=made: _is_measured(*made)) for name, made in _NETWORKS.items()),
)
