"""Overhead of Python, autograd and dispatch per op: a small model's step, less the work of its ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from brimful.capture import capture_step
from brimful.cost import Roofline
from brimful.devices import NATIVE_LOOP_SECONDS, Device, Dispatch
from brimful.job import Job
from brimful.profiling.timing import Duration, host_timed, one_thread, typical, wait_for
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Op, Phase, Trace
from brimful.transforms.selective import SavedOps

_BLOCKS = 6
_WIDTH, _HEADS, _TOKENS, _SAMPLES = 32, 2, 8, 2
"""So small that nearly all of the time is not work."""

_TIME_STEPS = 64
"""Time steps of the timed recurrent layer."""

_ROUNDS = 25

_WRITTEN_OUT_OPS = 17
"""Ops of a `_WrittenOutBlock`, without views: 4 products, 8 of GELU, 2 norms, 2 sums and attention."""

_SAVED = ("addmm#0", "addmm#2")
"""Saved results of a block: every second product, as torchtitan's selective checkpointing saves."""


class _Block(nn.Module):
    """A transformer's block from torch's own modules, as most models are written."""

    # B samples, T tokens, D width

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.project_in, self.project_out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        heads = self.project_in(self.norm_1(x)).view(samples, tokens, 3, _HEADS, width // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, T, D / heads)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        added: Tensor = x + self.narrow(self.activation(self.widen(self.norm_2(x))))
        return added


class _WrittenOutGELU(nn.Module):
    """GELU as transformers writes it for GPT-2, in eight ops."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        written_out: Tensor = 0.5 * x * (1.0 + torch.tanh(inner))
        return written_out


class _WrittenOutBlock(_Block):
    """A `_Block` with as many views per op as blocks of transformers have: 1.1, where those have 0.8 to 1.3.

    Dispatch modes see views too, and a trace does not have them. `_Block` has 1.8.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activation = _WrittenOutGELU()  # type: ignore[assignment]


def measure_dispatch(device: Device, where: torch.device) -> Dispatch:
    """Host seconds per op by phase, and per recomputed region.

    `device` is the record of `where`; its curves and launch price the work of the ops. Times per op are typical
    ones of several steps, less the ops' work, and at least a launch.
    """
    model = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(where)
    x = torch.randn(_SAMPLES, _TOKENS, _WIDTH, device=where)
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job(
        model=lambda: nn.Sequential(*(_Block() for _ in range(_BLOCKS))),
        loss=lambda module, batch: module(batch).sum(),
        batch=lambda samples: torch.randn(samples, _TOKENS, _WIDTH),
        optimizer="adamw",
        name="dispatch",
    )
    trace = capture_step(job, Settings(micro_batch_size=_SAMPLES), device)
    with one_thread():  # Python has no more, and ops are too small for several
        forward, backward, update = _phase_seconds(model, x, optimizer, where)
        region_seconds, rng_stash_seconds = _region_seconds(model, x, where)
    roofline = Roofline(device, Precision.FP32)

    def per_op(seconds: float, phase: Phase) -> float:
        ops = _last_ops(trace, phase)
        # Beside a GPU its work runs meanwhile; on a CPU it comes first, a bare launch in it.
        if device.kind == "cpu":
            seconds -= sum(roofline.work_seconds(op) - device.launch_seconds for op in ops)
        return max(seconds / len(ops), device.launch_seconds)

    generators = 2 if where.type == "cuda" else 1
    forward_seconds = per_op(forward, Phase.FORWARD)
    with one_thread():
        selective_forward, selective_recompute = _selective_seconds(where)
    return Dispatch(
        forward_seconds=forward_seconds,
        backward_seconds=per_op(backward, Phase.BACKWARD),
        optimizer_seconds=per_op(update, Phase.OPTIMIZER),
        region_seconds=region_seconds,
        rng_stash_seconds=rng_stash_seconds / generators,
        native_loop_seconds=(
            _native_loop_seconds(device, roofline) if device.kind == "cpu" else NATIVE_LOOP_SECONDS
        ),
        selective_forward_seconds=selective_forward,
        # A saved op is not priced in the recomputation, where its dispatch still takes time.
        selective_recompute_seconds=selective_recompute + len(_SAVED) / _WRITTEN_OUT_OPS * forward_seconds,
    )


def _native_loop_seconds(device: Device, roofline: Roofline) -> float:
    """Host seconds per op of a recurrent layer's loop on a CPU, forward and backward, less the ops' work."""
    layer = nn.RNN(_WIDTH, _WIDTH)
    x = torch.randn(_TIME_STEPS, 1, _WIDTH)
    job = Job(
        model=lambda: nn.RNN(_WIDTH, _WIDTH),
        loss=lambda module, batch: module(batch)[0].sum(),
        batch=lambda samples: torch.randn(_TIME_STEPS, samples, _WIDTH),
        batch_dim=1,
        optimizer="sgd",
        name="dispatch of a loop",
    )
    trace = capture_step(job, Settings(micro_batch_size=1), device)
    ops = _last_ops(trace, Phase.FORWARD) + _last_ops(trace, Phase.BACKWARD)
    work_seconds = sum(roofline.work_seconds(op) - device.launch_seconds for op in ops)
    with one_thread():
        durations = [host_timed(lambda: layer(x)[0].sum().backward())[1] for _ in range(_ROUNDS)]
    return max((typical(durations) - work_seconds) / len(ops), device.launch_seconds)


def _last_ops(trace: Trace, phase: Phase) -> list[Op]:
    return [op for op in trace.ops if op.phase is phase and op.step == trace.captured_steps - 1]


def _phase_seconds(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, where: torch.device
) -> tuple[float, float, float]:
    """Typical forward, backward and update; the host is not kept waiting for the device."""
    phases: tuple[list[Duration], ...] = ([], [], [])
    for _ in range(_ROUNDS):
        wait_for(where)
        loss, forward = host_timed(lambda: model(x).sum())
        _, backward = host_timed(loss.backward)
        _, update = host_timed(lambda: (optimizer.step(), optimizer.zero_grad()))
        for durations, duration in zip(phases, (forward, backward, update), strict=True):
            durations.append(duration)
    forward_seconds, backward_seconds, update_seconds = (typical(durations) for durations in phases)
    return forward_seconds, backward_seconds, update_seconds


def _region_seconds(model: nn.Module, x: Tensor, where: torch.device) -> tuple[float, float]:
    """Seconds that a region takes beyond running its ops again, and that keeping the random states adds.

    (step with every block recomputed − plain step − forward) / blocks.
    """

    def step(stashes_rng: bool | None) -> None:
        y = x
        for block in model.children():
            if stashes_rng is None:
                y = block(y)
            else:
                y = checkpoint(block, y, use_reentrant=False, preserve_rng_state=stashes_rng)
        y.sum().backward()

    def forward() -> None:
        model(x)  # with gradients: a recomputation saves its tensors too

    runs: tuple[Callable[[], None], ...] = (
        lambda: step(None),
        forward,
        lambda: step(False),
        lambda: step(True),
    )
    timings: tuple[list[Duration], ...] = tuple([] for _ in runs)
    for _ in range(_ROUNDS):  # in turns, so that a slow moment meets all
        for run, durations in zip(runs, timings, strict=True):
            wait_for(where)
            durations.append(host_timed(run)[1])
    model.zero_grad()
    plain, again, without_rng, with_rng = (typical(durations) for durations in timings)
    # A difference of measurements may come out below zero, which no work takes.
    region = max(without_rng - plain - again, 0.0) / _BLOCKS
    stash = max(with_rng - without_rng, 0.0) / _BLOCKS
    return region, stash


def _selective_seconds(where: torch.device) -> tuple[float, float]:
    """Seconds that an op takes more with some results saved than recomputed wholly: forward, backward."""
    blocks = [_WrittenOutBlock().to(where) for _ in range(_BLOCKS)]
    x = torch.randn(_SAMPLES, _TOKENS, _WIDTH, device=where)
    units = [UnitAction(fqn=str(number), action=Action.SAVE, saved=_SAVED) for number in range(_BLOCKS)]
    modes = [SavedOps(unit, [block]) for unit, block in zip(units, blocks, strict=True)]

    def forward(saves: bool) -> Tensor:
        y = x
        for block, saved in zip(blocks, modes, strict=True):
            contexts = saved.contexts if saves else noop_context_fn
            y = checkpoint(block, y, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return y.sum()

    timings: dict[bool, tuple[list[Duration], list[Duration]]] = {False: ([], []), True: ([], [])}
    for _ in range(_ROUNDS):  # in turns, so that a slow moment meets both
        for saves, (forwards, backwards) in timings.items():
            wait_for(where)
            loss, duration = host_timed(partial(forward, saves))
            forwards.append(duration)
            backwards.append(host_timed(loss.backward)[1])
    whole, some = ([typical(each) for each in timings[saves]] for saves in (False, True))
    # A difference of measurements may come out below zero, which no work takes.
    more_forward, more_backward = (
        max(b - a, 0.0) / (_BLOCKS * _WRITTEN_OUT_OPS) for a, b in zip(whole, some, strict=True)
    )
    return more_forward, more_backward
