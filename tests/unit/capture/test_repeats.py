"""Blocks that repeat are captured once: the trace is that of a whole capture, to the last field."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from brimful import find_architecture
from brimful.api.job_changes import PREFIX_OF_ADAPTED
from brimful.capture import capture_step
from brimful.capture.cache import CachedCapture
from brimful.capture.repeats import RepeatedBlocks, Shortening, rows_of_alike_blocks
from brimful.capture.step import capture_short_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.models.variants import with_adapters
from brimful.settings import Action, OptimizerImplementation, Precision, Settings, UnitAction
from brimful.trace import Trace
from helpers.models import GPT, Block
from helpers.planned_jobs import PostNormBlock, language_job

LAYERS = 14
DEVICE = find_device("RTX 3090")
PLAIN = Settings(micro_batch_size=3, gradient_accumulation_steps=2)


class Post(GPT):
    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.blocks = nn.ModuleList(PostNormBlock(16) for _ in range(LAYERS))


class Counting(GPT):
    """Looks its blocks up by number."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in range(LAYERS):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class Collecting(GPT):
    """Reads what all blocks return together."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, collected = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            collected.append(x)
        return self.head(self.norm(torch.stack(collected).mean(0)))


class Uneven(GPT):
    """One block of another width in the middle."""

    def __init__(self) -> None:
        super().__init__(layers=2 * LAYERS)
        self.blocks[LAYERS].mlp[0] = nn.Linear(16, 32)
        self.blocks[LAYERS].mlp[2] = nn.Linear(32, 16)


JOBS: dict[str, Job] = {
    "gpt": language_job(lambda: GPT(layers=LAYERS)),
    "post-norm": language_job(Post),
    "uneven": language_job(Uneven),
}


@cache
def first(name: str) -> tuple[Trace, tuple[tuple[str, ...], ...]]:
    trace = capture_step(JOBS[name], PLAIN, DEVICE, steps=1)
    return trace, tuple(rows_of_alike_blocks(trace))


def short(name: str, settings: Settings) -> tuple[Trace | None, list[int]]:
    """A short capture, and how many blocks ran."""
    ran: list[int] = []

    def capture(settings: Settings, shortening: Shortening) -> Trace | None:
        ran.append(len(shortening.blocks))
        return capture_short_step(JOBS[name], settings, DEVICE, shortening)

    repeated = RepeatedBlocks([capture])
    repeated.learn(PLAIN, first(name)[0])
    return repeated.captured(settings), ran


def actions(name: str, *parts: tuple[int, UnitAction]) -> tuple[UnitAction, ...]:
    """Actions of the first blocks, given as rows; the rest is kept."""
    given = [action for count, action in parts for _ in range(count)]
    blocks = [fqn for row in first(name)[1] for fqn in row]
    keep = UnitAction(fqn="", action=Action.KEEP)
    padded = given + [keep] * (len(blocks) - len(given))
    return tuple(replace(action, fqn=fqn) for fqn, action in zip(blocks, padded, strict=True))


RECOMPUTE = UnitAction(fqn="", action=Action.RECOMPUTE)
SAVE = UnitAction(fqn="", action=Action.SAVE, saved=("addmm#0", "addmm#2"))
OFFLOAD = UnitAction(fqn="", action=Action.OFFLOAD)
PARTLY = UnitAction(fqn="", action=Action.OFFLOAD, most_offloaded_bytes=5000)

CASES = {
    "kept": ({}, ()),
    "one micro-batch": ({"gradient_accumulation_steps": 1}, ()),
    "bf16": ({"precision": Precision.BF16}, ()),
    "fp16": ({"precision": Precision.FP16}, ()),
    "fp16, recomputed, adafactor": (
        {"precision": Precision.FP16, "optimizer": "adafactor"},
        ((LAYERS, RECOMPUTE),),
    ),
    "fused": ({"optimizer_implementation": OptimizerImplementation.FUSED}, ()),
    "adafactor": ({"optimizer": "adafactor"}, ()),
    "optimizer on the host": ({"offload_optimizer": True}, ()),
    "recomputed": ({}, ((LAYERS, RECOMPUTE),)),
    "recomputed in bf16": ({"precision": Precision.BF16}, ((LAYERS, RECOMPUTE),)),
    "one in part": ({}, ((7, RECOMPUTE), (7, SAVE))),
    "offloaded": ({}, ((12, OFFLOAD),)),
    "offloaded in part": ({}, ((10, PARTLY), (1, RECOMPUTE))),
    "offloaded in part, then kept": ({}, ((2, PARTLY),)),
    "saved in part, then offloaded": ({}, ((10, SAVE), (2, OFFLOAD))),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt", "post-norm"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_a_short_capture_gives_the_trace_of_a_whole_one(name: str, case: str) -> None:
    changes, rows = CASES[case]
    settings = replace(PLAIN, **changes, units=actions(name, *rows) if rows else ())
    found, ran = short(name, settings)
    assert found is not None
    assert found == capture_step(JOBS[name], settings, DEVICE, steps=1)
    assert all(count < LAYERS for count in ran)


@pytest.mark.sweep
@pytest.mark.parametrize("failed", [0, 1, 2], ids=["none", "joined updates", "all"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_what_holds_on_one_device_shortens_captures_on_another(precision: Precision, failed: int) -> None:
    """Short captures that failed there are not tried."""
    settings, other = replace(PLAIN, precision=precision), find_device("V100 16GB PCIe")
    job = JOBS["gpt"]

    class Ran:  # a capture restores what closures hold, and not what a class holds
        modules: list[str] = []  # noqa: RUF012

    ran = Ran.modules

    def counted_model() -> nn.Module:
        model = job.model()
        model.register_forward_pre_hook(lambda *_: Ran.modules.append("model"))
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: Ran.modules.append("block"))
        return model

    counted = replace(job, model=counted_model)
    with CachedCapture(counted, DEVICE) as found:
        found(PLAIN)
        found(replace(PLAIN, micro_batch_size=2))
        found._repeated._captures = found._repeated._captures[failed:]
        ran.clear()
        with CachedCapture(counted, other, like=found) as capture:
            trace = capture(settings)
            tried = len(capture._repeated._captures)
    is_short = ran.count("block") < ran.count("model") * LAYERS
    assert ran
    assert (is_short, tried) == (failed < 2, 2 - failed)
    assert trace == capture_step(counted, settings, other, steps=1)


@pytest.mark.parametrize("name", ["gpt", "post-norm"])
def test_what_holds_for_samples_shortens_captures_of_shorter_ones(name: str) -> None:
    shorter = language_job(JOBS[name].model, length=16)
    with CachedCapture(JOBS[name], DEVICE) as found:
        found(PLAIN)
        found(replace(PLAIN, micro_batch_size=2))
        with CachedCapture(shorter, DEVICE, like=found) as capture:
            trace = capture(PLAIN)
    assert capture.counts == {"short": 1}
    assert trace == capture_step(shorter, PLAIN, DEVICE, steps=1)


def test_what_holds_for_a_model_shortens_captures_of_it_with_adapters() -> None:
    options = {"num_hidden_layers": 8, "hidden_size": 256, "vocab_size": 100}
    job = find_architecture("llama-3.2-1b", sequence_length=8, **options)
    adapted = with_adapters(job, "r=2")
    with CachedCapture(job, DEVICE) as found:
        found(PLAIN)
        found(replace(PLAIN, micro_batch_size=2))
        with CachedCapture(adapted, DEVICE, like=found, prefix=PREFIX_OF_ADAPTED) as capture:
            trace = capture(PLAIN)
    assert capture.counts == {"short": 1}
    assert trace == capture_step(adapted, PLAIN, DEVICE, steps=1)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_setting_of_the_allocator_takes_no_other_capture(steps: int) -> None:
    expandable = replace(PLAIN, expandable_segments=True)
    with CachedCapture(JOBS["gpt"], DEVICE) as capture:
        traces = [capture(settings, steps) for settings in (PLAIN, expandable)]
    assert capture.counts == {"whole": 1}
    assert traces[1] == capture_step(JOBS["gpt"], expandable, DEVICE, steps=steps)


def test_rows_end_where_a_block_differs() -> None:
    """A block of another width, and the rows before and behind it."""
    assert [len(row) for row in first("uneven")[1]] == [LAYERS, LAYERS - 1]
    found, ran = short("uneven", PLAIN)
    assert found == first("uneven")[0]
    assert ran[-1] < LAYERS


@pytest.mark.parametrize("model", [Counting, Collecting])
def test_a_model_that_does_not_run_its_blocks_alone_is_captured_whole(model: type[GPT]) -> None:
    job = language_job(model)
    recomputed = replace(
        PLAIN, units=tuple(replace(RECOMPUTE, fqn=f"blocks.{index}") for index in range(LAYERS))
    )
    with CachedCapture(job, DEVICE) as capture:
        capture(PLAIN)
        trace = capture(recomputed)
    assert trace == capture_step(job, recomputed, DEVICE, steps=1)


def test_blocks_that_change_from_capture_to_capture_are_captured_whole() -> None:
    """The first capture shows them alike; in later ones neighbours differ."""

    class Changing(Block):
        made = 0

        def __init__(self, width: int) -> None:
            super().__init__(width)
            Changing.made += 1
            self.number = Changing.made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x.sin() if self.number > 2 * LAYERS and self.number % 2 else x

    class Model(GPT):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.blocks = nn.ModuleList(Changing(16) for _ in range(LAYERS))

    job = language_job(Model)
    with CachedCapture(job, DEVICE) as capture:
        capture(PLAIN)
        trace = capture(replace(PLAIN, micro_batch_size=2))
    assert sum(op.name == "aten.sin.default" for op in trace.ops) == LAYERS


def test_an_error_in_putting_blocks_in_is_raised_and_captures_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CachedCapture(JOBS["gpt"], DEVICE) as capture:
        for settings in (PLAIN, replace(PLAIN, precision=Precision.BF16)):
            capture(settings)
        assert capture.counts == {"whole": 1, "short": 1}
        monkeypatch.setattr("brimful.capture.repeats.with_all_blocks", {}.__getitem__)
        with pytest.raises((KeyError, TypeError)):
            capture(replace(PLAIN, gradient_accumulation_steps=1))


def test_rows_are_of_the_outermost_lists() -> None:
    blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))) for _ in range(6))

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    job = Job(
        model=Nested,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.zeros(n, 8),
    )
    trace = capture_step(job, Settings(micro_batch_size=2), DEVICE, steps=1)
    assert list(rows_of_alike_blocks(trace)) == [tuple(f"blocks.{index}" for index in range(6))]
