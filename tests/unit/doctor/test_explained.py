"""What `brimful.explain_out_of_memory` says of an error, without having recorded the run."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import brimful as bf
from brimful.execution import explained, setup
from brimful.execution.out_of_memory import RanOut, unless_out_of_memory
from brimful.memory import HeldStorage
from brimful.memory.at_error import MemoryAtError, changes
from brimful.torch_utils.forward_lines import recorded_lines
from brimful.trace import Category, Phase
from brimful.utils.quantities import GIB, MIB, format_bytes, parse_bytes
from helpers.tiny_jobs import Net as TinyNet
from helpers.tiny_jobs import all_samples, make_job

WIDTH, BLOCKS, SAMPLES = 64, 8, 512
TOO_MUCH = 1 << 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        wide = nn.functional.gelu(wide)
        return x + self.down(wide)


class Net(nn.Module):
    def __init__(self, fails_in: int | None = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.fails_in, self.checkpoints = fails_in, checkpoints
        self.calls = 0

    def forward(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        x = inputs if scale is None else inputs * scale
        for place, block in enumerate(self.blocks):
            self.calls += 1
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if place == self.fails_in:
                torch.empty(TOO_MUCH, dtype=torch.uint8)  # asked for here
        return x


def line_with(words: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f":{next(number for number, text in enumerate(lines, start=1) if words in text)}"


def found_of(action: Callable[[], object]) -> MemoryAtError:
    with recorded_lines():
        ran_out = unless_out_of_memory(action)
    assert isinstance(ran_out, RanOut)
    assert ran_out.explanation is not None
    assert ran_out.explanation.found is not None, ran_out.explanation.failure
    return ran_out.explanation.found


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    gc.collect()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(torch.optim.Adam, "Adam in 8 bits"), (torch.optim.AdamW, "AdamW in 8 bits"), (torch.optim.NAdam, None)],
)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_optimizer_in_8_bits_is_that_of_the_script(kind: Any, name: str | None, amsgrad: bool) -> None:
    model = Net(fails_in=5)
    optimizer = kind(model.parameters(), **({"amsgrad": amsgrad} if name else {}))
    found = found_of(lambda: model(torch.randn(1, WIDTH)).sum().backward())
    named = {every for each in changes(found).listed for every in re.findall(r"\w+ in 8 bits", each.change)}
    assert named == ({name} if name and not amsgrad else set())
    assert optimizer.state == {}


def test_a_forward_is_explained_by_category_module_and_line() -> None:
    model = Net(fails_in=5)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        batch = torch.randn(SAMPLES, WIDTH)
        model(batch).sum().backward()

    found = found_of(train)
    assert optimizer.state == {}
    assert found.requested_bytes == TOO_MUCH
    assert found.line.endswith(line_with("# asked for here"))
    assert found.peak_op == "torch.empty(TOO_MUCH, dtype=torch.uint8)"
    assert (found.peak_phase, found.samples, found.reached_fraction) == (Phase.FORWARD, SAMPLES, 0.75)
    wide, narrow = SAMPLES * 4 * WIDTH * 4, SAMPLES * WIDTH * 4
    lines = {each.line.rpartition(":")[2]: each for each in found.largest if each.line}
    of_up, of_gelu, of_sum = (
        lines[line_with(words)[1:]] for words in ("wide = self.up", "wide = nn.functional", "return x + ")
    )
    assert (of_up.held_bytes, of_gelu.held_bytes, of_sum.held_bytes) == (6 * wide, 6 * wide, 6 * narrow)
    assert of_up.category is of_gelu.category is Category.SAVED_TENSORS
    assert of_gelu.module == "blocks"
    held = dict(found.breakdown)
    assert held[Category.INPUTS] == narrow
    assert held[Category.PARAMETERS] >= sum(each.nbytes for each in model.parameters())
    blocks = next(each for each in found.modules if each.fqn == "blocks.3")
    of_block = sum(each.nbytes for each in model.blocks[3].parameters())
    assert blocks.held_bytes >= 2 * wide + of_block


def test_checkpointing_frees_what_is_inside_of_all_blocks_but_one() -> None:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4))

    def train() -> None:
        out = model(torch.randn(SAMPLES, WIDTH))
        out + torch.empty(TOO_MUCH, dtype=torch.uint8)

    inside = 2 * SAMPLES * 4 * WIDTH * 4  # before and after GELU; the sum is the input of the next block
    # The first block's input is in none, and is counted with what it saves.
    of_all = BLOCKS * inside + SAMPLES * WIDTH * 4
    assert found_of(train).recomputable_bytes == of_all * (BLOCKS - 1) // BLOCKS


def test_what_ends_a_block_is_of_the_block_and_what_all_have_is_in_none() -> None:
    """A ReLU has no parameters: its place is between two linear layers of different blocks."""
    count = 4
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    def train() -> None:
        out = model(torch.randn(SAMPLES, WIDTH))
        out + torch.empty(TOO_MUCH, dtype=torch.uint8)

    found = found_of(train)
    assert {"0.0.weight and 9 more": ""}.items() <= {each.label: each.module for each in found.largest}.items()
    of_blocks = [each.held_bytes for each in found.modules if each.fqn in map(str, range(count))]
    of_result = SAMPLES * WIDTH * 4
    of_block = sum(each.nbytes for each in blocks[0].parameters()) + of_result
    assert of_blocks == [of_block + of_result, *[of_block] * (count - 1)]  # the first one saves the input too


def test_the_error_stays_the_same_and_its_traceback_shows_the_explanation() -> None:
    model = Net(fails_in=1)
    with pytest.raises(RuntimeError, match="allocate") as raised, bf.explain_out_of_memory():
        model(torch.randn(SAMPLES, WIDTH))
    error = raised.value
    assert type(error) is RuntimeError
    frames = [each.name for each in traceback.extract_tb(error.__traceback__)]
    assert frames[0] == "test_the_error_stays_the_same_and_its_traceback_shows_the_explanation"
    assert frames[-1] == "forward"
    shown = "".join(traceback.format_exception(error))
    assert "asked for 1048576 GiB more" in shown
    assert "saved tensors" in shown
    with pytest.raises(RuntimeError) as again, bf.explain_out_of_memory(), bf.explain_out_of_memory():
        model(torch.randn(SAMPLES, WIDTH))
    assert notes_of(again.value).count("out of memory") == 1


def test_other_errors_and_results_stay_as_they_are() -> None:
    model, batch = Net(), torch.randn(SAMPLES, WIDTH)
    plain = model(batch).sum()

    @bf.explain_out_of_memory()
    def explained_forward() -> Tensor:
        return model(batch).sum()

    @bf.explain_out_of_memory
    def without_parentheses() -> Tensor:
        return model(batch).sum()

    assert torch.equal(plain, explained_forward())
    assert torch.equal(plain, without_parentheses())
    with pytest.raises(ValueError, match="mine") as raised, bf.explain_out_of_memory():
        raise ValueError("mine")
    assert notes_of(raised.value) == ""


def test_a_function_whose_call_returns_before_its_body_runs_is_not_decorated() -> None:
    def batches() -> Iterator[int]:
        yield 1

    async def train() -> None:
        pass

    async def stream() -> AsyncIterator[int]:
        yield 1

    for each in (batches, train, stream):
        for decorator in (bf.explain_out_of_memory, bf.explain_out_of_memory()):
            with pytest.raises(TypeError, match=r"around the loop over it, or around what awaits it"):
                decorator(each)


def test_an_error_raised_while_an_out_of_memory_error_is_handled_has_no_note() -> None:
    """The note is with the out-of-memory error; an error that is raised from it has the note."""
    model = Net(fails_in=1)

    def handles(*, of_it: bool) -> None:
        try:
            model(torch.randn(SAMPLES, WIDTH))
        except RuntimeError as error:
            if of_it:
                raise ValueError("the step failed") from error
            raise KeyError("labels")  # noqa: B904  # as a handler with a fault of its own does

    with pytest.raises(KeyError) as other, bf.explain_out_of_memory():
        handles(of_it=False)
    assert notes_of(other.value) == ""
    assert other.value.__context__ is not None
    assert "asked for 1048576 GiB more" in notes_of(other.value.__context__)
    with pytest.raises(ValueError, match="the step failed") as caused, bf.explain_out_of_memory():
        handles(of_it=True)
    assert "asked for 1048576 GiB more" in notes_of(caused.value)


def test_an_error_that_was_handled_before_is_not_explained() -> None:
    def handles() -> None:
        try:
            Net(fails_in=1)(torch.randn(SAMPLES, WIDTH))
        except RuntimeError:
            with bf.explain_out_of_memory():
                raise KeyError("labels") from None

    with pytest.raises(KeyError) as other:
        handles()
    assert other.value.__context__ is not None
    assert (notes_of(other.value), notes_of(other.value.__context__)) == ("", "")


def test_backward_is_explained_by_the_line_of_its_forward() -> None:
    model = Net()

    def train() -> None:
        x = torch.randn(SAMPLES, WIDTH)
        for block in model.blocks:
            x = block(x)
        hook = model.blocks[2].down.weight.register_hook(lambda _grad: torch.empty(TOO_MUCH, dtype=torch.uint8))
        x.sum().backward()
        hook.remove()

    found = found_of(train)
    assert found.peak_phase is Phase.BACKWARD
    assert found.further_bytes > 0
    saved = dict(found.breakdown)[Category.SAVED_TENSORS]
    assert 0 < saved < BLOCKS * 3 * SAMPLES * 4 * WIDTH * 4  # what backward has freed is not counted


def test_models_that_do_not_run_do_not_change_what_is_expected_of_the_rest() -> None:
    model, teacher = Net(fails_in=5), Net()

    def train() -> Tensor:
        batch = torch.randn(SAMPLES, WIDTH)
        return model(batch)

    assert found_of(train).reached_fraction == 0.75
    assert len(teacher.blocks) == BLOCKS  # it is alive


class FailsIn(TorchDispatchMode):
    """Raises as torch does on a CPU where an op of a kind runs."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self._op = op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would put a function around what raises

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket._qualified_op_name == f"aten::{self._op}":
            raise RuntimeError(
                f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {MIB} bytes."
            )
        return func(*args, **(kwargs or {}))


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)  # in a function of its own


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        attended = attention(self.first(x))
        return self.down(nn.functional.silu(self.gate(attended)) * self.up(attended))  # five ops in a line


def test_ops_in_functions_and_nested_calls_have_their_own_lines() -> None:
    model = Gated()

    def train() -> None:
        batch = torch.randn(SAMPLES, WIDTH)
        output = model(batch)
        torch.empty(TOO_MUCH, dtype=torch.uint8)
        output.sum().backward()

    found = found_of(train)
    saved = {each.line: each for each in found.largest if each.category is Category.SAVED_TENSORS}
    (of_attention,) = [
        each for line, each in saved.items() if line.endswith(line_with("# in a function of its"))
    ]
    (of_gate,) = [each for line, each in saved.items() if line.endswith(line_with("# five ops in a line"))]
    (of_first,) = [each for line, each in saved.items() if line.endswith(line_with("attended = attention("))]
    size = SAMPLES * WIDTH * 4
    assert of_attention.held_bytes >= size
    assert of_gate.held_bytes == 5 * size  # gate, silu, up, product, down
    assert of_first.held_bytes == size


def test_ops_of_torchs_modules_have_the_line_that_calls_the_model() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    for samples in (SAMPLES, 2 * SAMPLES):

        def train(samples: int = samples) -> None:
            batch = torch.randn(samples, WIDTH)
            output = model(batch)  # the call
            torch.empty(TOO_MUCH, dtype=torch.uint8)
            output.sum().backward()

        of_call = [each for each in found_of(train).largest if each.line.endswith(line_with("# the call"))]
        assert [each.held_bytes for each in of_call] == [3 * samples * WIDTH * 4]


def test_an_op_of_backward_has_the_line_of_its_forward() -> None:
    model = Net()

    def train() -> None:
        with FailsIn("gelu_backward"):
            model(torch.randn(SAMPLES, WIDTH)).sum().backward()

    with pytest.warns(UserWarning, match="Error detected in GeluBackward0"):
        found = found_of(train)
    assert (found.peak_phase, found.peak_op) == (Phase.BACKWARD, "backward of Gelu")
    assert found.line.endswith(line_with("wide = nn.functional"))


def test_without_recorded_lines_tensors_are_listed_by_op() -> None:
    model = Net(fails_in=3)
    ran_out = unless_out_of_memory(lambda: model(torch.randn(SAMPLES, WIDTH)))
    assert isinstance(ran_out, RanOut)
    assert ran_out.explanation is not None
    found = ran_out.explanation.found
    assert found is not None
    lines = {each.label.partition(" ")[0]: each.line for each in found.largest}
    assert lines["Gelu"] == lines["Addmm"] == ""


def test_the_first_update_is_known_although_its_state_is_there() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(*, fails: bool) -> None:
        model(torch.randn(SAMPLES, WIDTH)).sum().backward()
        with FailsIn("sqrt") if fails else nullcontext():
            optimizer.step()
        optimizer.zero_grad()

    first = found_of(lambda: step(fails=True))
    assert (first.peak_phase, first.makes_state) == (Phase.OPTIMIZER, True)
    optimizer.state.clear()
    step(fails=False)
    assert not found_of(lambda: step(fails=True)).makes_state


def test_graphs_of_earlier_steps_are_named_and_are_the_first_thing_to_change() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @bf.explain_out_of_memory()
    def train() -> None:
        total = torch.zeros(())
        for step in range(3):
            loss = model(torch.randn(SAMPLES, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss
            if step == 2:
                torch.empty(TOO_MUCH, dtype=torch.uint8)

    with pytest.raises(RuntimeError) as raised:
        train()
    notes = notes_of(raised.value)
    assert "keep no graphs of earlier steps: add to " in notes
    assert f"total (tests/unit/doctor/test_explained.py{line_with('total = total + loss')})" in notes


def test_an_evaluation_with_gradients_is_told_to_run_without() -> None:
    model = Net(fails_in=3).eval()
    first = changes(found_of(lambda: model(torch.randn(SAMPLES, WIDTH)))).listed
    assert any("torch.no_grad()" in each.change for each in first)
    assert not any("micro-batches" in each.change for each in first)
    with torch.no_grad():
        without = changes(found_of(lambda: model(torch.randn(SAMPLES, WIDTH)))).listed
    assert not any("torch.no_grad()" in each.change for each in without)
    assert any("evaluation batches of " in each.change for each in without)


def test_models_and_optimizers_of_earlier_runs_do_not_count() -> None:
    before = [Net() for _ in range(2)]
    earlier = [torch.optim.AdamW(each.parameters()) for each in before]
    found = found_of_training()
    assert len(earlier) == len(before)
    of_model = sum(each.nbytes for each in Net().parameters())
    largest = 4 * WIDTH * WIDTH * 4
    assert found.further_bytes == 3 * of_model + largest  # gradients, and two states of AdamW


def found_of_training() -> MemoryAtError:
    model = Net(fails_in=1)
    optimizer = torch.optim.AdamW(model.parameters())
    found = found_of(lambda: model(torch.randn(SAMPLES, WIDTH)))
    optimizer.zero_grad()
    return found


def test_a_number_among_the_inputs_has_no_samples() -> None:
    model = Net(fails_in=1)
    assert found_of(lambda: model(torch.randn(SAMPLES, WIDTH), torch.tensor(2.0))).samples == SAMPLES


def test_what_checkpointing_has_packed_is_not_computed_again() -> None:
    model = Net(fails_in=5, checkpoints=True)
    found = found_of(lambda: model(torch.randn(SAMPLES, WIDTH, requires_grad=True)))
    assert model.calls == 6
    assert found.is_checkpointed
    assert not any("checkpointing" in each.change for each in changes(found).listed)


def test_an_explanation_keeps_no_tensor_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def train() -> None:
        batch = torch.randn(SAMPLES, WIDTH)
        alive.append(weakref.ref(batch))
        out = Net(fails_in=2)(batch)
        alive.append(weakref.ref(out))

    gc.disable()
    try:
        ran_out = unless_out_of_memory(train)
        assert [each() for each in alive] == [None]
    finally:
        gc.enable()
    assert isinstance(ran_out, RanOut)


def test_an_error_of_the_explanation_is_a_note_and_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> MemoryAtError:
        raise KeyError("of its own")

    monkeypatch.setattr(explained, "memory_at", fails)
    with pytest.raises(RuntimeError, match="allocate") as raised, bf.explain_out_of_memory():
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert "could not find what held the memory, please report it: KeyError: 'of its own'" in notes_of(
        raised.value
    )


MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which "
    "512.00 MiB is free. Process {own} has 1.00 GiB memory in use. Process 4711 has 3.00 GiB memory in "
    "use. Including non-PyTorch memory, this process has 20.00 GiB memory in use. Of the allocated memory "
    "16.00 GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
    "3.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large …"
)


def test_the_message_of_cuda_says_what_is_unused_and_what_others_hold() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError(MESSAGE.format(own=os.getpid()))

    found = found_of(fails)
    assert (found.requested_bytes, found.unused_bytes, found.free_bytes) == (2 * GIB, 3.5 * GIB, 512 * MIB)
    assert found.others == ((4711, 3 * GIB),)
    said = [each.change for each in changes(found).listed]
    assert any("expandable_segments" in each for each in said)
    assert any("process 4711" in each for each in said)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_not_suggested_where_they_are_on(variable: str) -> None:
    code = (
        "import brimful as bf, torch\n"
        f"message = {MESSAGE.format(own=1)!r}\n"
        "with bf.explain_out_of_memory():\n    raise torch.OutOfMemoryError(message)\n"
    )
    found = {}
    for setting in ("expandable_segments:False", "max_split_size_mb:64,expandable_segments:True"):
        environment = {**os.environ, variable: setting}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert "3.5 GiB reserved by torch, in pieces" in ran.stderr, ran.stderr
        found[setting] = "expandable_segments:True: unused" in ran.stderr
    assert list(found.values()) == [True, False]


def test_a_snapshot_is_written_on_cuda_and_refused_in_words_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "oom.pickle"
    with pytest.raises(RuntimeError) as raised, bf.explain_out_of_memory(snapshot=path):
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert f"{path} was not written" in notes_of(raised.value)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    record = torch.cuda.memory
    monkeypatch.setattr(record, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(record, "_dump_snapshot", calls.append)
    with pytest.raises(RuntimeError) as raised, bf.explain_out_of_memory(snapshot=path):
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert calls[1:] == [str(path), {"enabled": None}]
    assert "memory_viz opens" in notes_of(raised.value)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits of a GPU with 10 GiB, as torch was told them."""
    found = [1.0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _index: found[-1])
    properties = SimpleNamespace(total_memory=10 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, _index: found.append(fraction)
    )
    return found


def test_a_budget_limits_what_torch_reserves_until_it_is_removed(limits: list[float]) -> None:
    cuda = torch.device("cuda")
    before = setup.limit_reserved(8 * GIB, cuda)
    after = setup.limit_reserved(9 * GIB, cuda)  # the last plan trains
    assert limits == [1.0, 0.8, 0.9]
    before()
    assert limits[-1] == 0.9
    after()
    after()
    assert limits[-1] == 1.0
    setup.limit_reserved(GIB, torch.device("cpu"))()
    assert limits == [1.0, 0.8, 0.9, 0.9, 1.0]


def test_a_lower_limit_of_the_users_stays(limits: list[float]) -> None:
    limits.append(0.5)
    remove = setup.limit_reserved(8 * GIB, torch.device("cuda"))
    assert limits[-1] == 0.5
    remove()
    assert limits[-1] == 0.5


def held(**changed: Any) -> MemoryAtError:
    """10 GiB of saved tensors beside 4 GiB of parameters, gradients and state."""

    def of(category: Category, gib: int) -> Any:
        return HeldStorage(label="x", category=category, module="", held_bytes=gib * GIB, line="")

    values: dict[str, Any] = {
        "message": "",
        "requested_bytes": GIB,
        "line": "",
        "peak_op": None,
        "peak_module": "",
        "peak_phase": Phase.BACKWARD,
        "held": (of(Category.PARAMETERS, 4), of(Category.SAVED_TENSORS, 10)),
        "module_classes": (),
        "samples": 16,
    }
    return MemoryAtError(**(values | changed))


def test_micro_batches_become_as_small_as_the_step_needs() -> None:
    first = changes(held()).listed[0]
    assert first.change.startswith("micro-batches of 8 samples in place of 16, two of them accumulated")
    less = changes(held(reached_fraction=0.25)).listed[0]  # 44 GiB at the end of the forward, and room for 10
    assert "micro-batches of 2 samples in place of 16" in less.change
    assert changes(held()).lacking_bytes == 0


def test_what_cannot_fit_is_said_not_to() -> None:
    found = changes(held(further_bytes=12 * GIB))  # gradients and state alone are more than there is
    assert found.lacking_bytes == (4 + 12) * GIB + 11 * GIB // 16 - 14 * GIB
    both = (held().held[0], replace(held().held[1], held_bytes=GIB))
    several = changes(held(held=both, further_bytes=2 * GIB, adam_bytes=2 * GIB))  # each alone is too little
    assert several.lacking_bytes == 0
    assert re.search(r"micro-batches of 1 sample.*; and AdamW in 8 bits", several.listed[0].change)
    assert several.listed[0].size_bytes >= 3 * GIB


def test_changes_together_free_no_more_than_there_is() -> None:
    settings = {"further_bytes": 12 * GIB, "recomputable_bytes": 8 * GIB}
    found = changes(
        held(**settings)
    )  # of the 11 GiB of a batch a sixteenth is left, and half of that recomputed
    assert found.lacking_bytes == (4 + 12) * GIB + (11 - 8) * GIB // 16 - 14 * GIB
    assert re.match(r"micro-batches of 1 sample.*; and activation checkpointing", found.listed[0].change)


def test_the_batch_before_the_first_update_may_have_taken_all_that_there_is() -> None:
    of_update = {"peak_phase": Phase.OPTIMIZER, "held": (held().held[0],), "makes_state": True}
    assert changes(held(**of_update, update_bytes=GIB)).listed[0].change.startswith("the optimizer with fused")
    with_state = replace(held().held[0], category=Category.OPTIMIZER_STATE)
    several = changes(held(**of_update | {"held": (held().held[0], with_state)}, update_bytes=GIB)).listed[0]
    assert re.match(r"the optimizer with fused=True.*; and micro-batches of ", several.change)


def test_micro_batches_are_suggested_only_where_a_batch_takes_memory() -> None:
    no_batch = held(held=(held().held[0],), samples=None, peak_phase=Phase.FORWARD)
    in_update = held(held=(held().held[0],), peak_phase=Phase.OPTIMIZER, update_bytes=GIB)
    for found in (no_batch, in_update):
        assert not any("micro-batches" in each.change for each in changes(found).listed)


@cache
def tiny_plan() -> bf.Plan:
    return bf.plan(make_job(), "cpu", global_batch_size=16, micro_batch_size=16, budget="1GiB")


def sixteen() -> dict[str, Tensor]:
    return {name: tensor[:16] for name, tensor in all_samples().items()}


def no_more(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
    return loss


def applied(plan: bf.Plan, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    job = make_job(loss=no_more)
    bf.apply(plan, job, model, optimizer, verify=False, **options)(sixteen())


def prepared(plan: bf.Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    bf.prepare(plan, model, optimizer).retry(no_more, model, sixteen())


def fitted(plan: bf.Plan, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    bf.fit(make_job(loss=no_more), plan, device="cpu", steps=1, verify=False, show_progress=False)


@pytest.mark.parametrize("train", [applied, partial(applied, recover=False), prepared, fitted])
def test_training_under_a_plan_compares_the_error_with_the_plan(train: Callable[..., None]) -> None:
    plan = tiny_plan()
    model = TinyNet()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((torch.OutOfMemoryError, bf.OutOfMemoryError)) as raised:
        train(plan, model, optimizer)
    notes = notes_of(raised.value)
    assert "asked for 1 MiB more" in notes
    assert "parameters" in notes
    assert f"peak of {format_bytes(plan.predicted_peak_allocated_bytes)}" in notes
    assert re.search(r"saved tensors: [\w. ]+\s+\(tests/helpers/tiny_jobs\.py:\d+\)", notes)
    budget = re.search(r'bf\.plan\(…, global_batch_size=16, budget="(\S+)"\)', notes)
    assert budget is not None
    assert parse_bytes(budget[1]) < GIB


def test_a_step_that_recovers_is_as_before_and_says_nothing() -> None:
    calls = []

    def once(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    job, model = make_job(loss=once), TinyNet()
    plan = tiny_plan()
    step = bf.apply(plan, job, model, torch.optim.AdamW(model.parameters()), verify=False)
    assert len(step(sixteen()).recoveries) == 1


SCRIPT = """
import torch
import brimful as bf
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

@bf.explain_out_of_memory()
def main():
    out = net(torch.randn(512, 64))
    torch.empty(1 << 50, dtype=torch.uint8)

main()
"""


def test_a_script_ends_with_the_explanation_below_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    after = done.stderr.partition("can't allocate memory")[2]
    assert "torch.empty(1 << 50, dtype=torch.uint8) in train.py:11 asked for 1048576 GiB more" in after
    assert "saved tensors" in after
    assert "(train.py:10)" in after
