"""Lines of code that made autograd's nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import traceback

from brimful.torch_utils.forward_lines import line_of, lines_are_recorded, record_again, recorded_lines


def made(x: Tensor) -> Tensor:
    return x * x  # made here


def here(words: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{next(number for number, text in enumerate(lines, start=1) if words in text)}"


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    own = traceback.format_stack
    yield
    assert traceback.format_stack is own
    assert not torch.is_anomaly_enabled()
    assert not lines_are_recorded()


def test_nodes_inside_have_their_lines() -> None:
    x = torch.ones(2, requires_grad=True)
    with recorded_lines():
        with recorded_lines():
            inner = made(x)
        outer = made(x)
        assert lines_are_recorded()
        assert not torch.is_anomaly_check_nan_enabled()
    after = made(x)
    assert line_of(inner.grad_fn) == line_of(outer.grad_fn)
    assert line_of(outer.grad_fn).endswith(f"test_forward_lines.py:{here('# made here')}")
    assert line_of(after.grad_fn) == ""


def test_an_error_ends_the_record() -> None:
    with pytest.raises(ValueError, match="mine"), recorded_lines():
        raise ValueError("mine")


def test_anomaly_detection_of_the_user_keeps_its_stacks() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        with recorded_lines():
            found = made(x).grad_fn
            assert not lines_are_recorded()
        assert torch.is_anomaly_check_nan_enabled()
        assert torch.is_anomaly_enabled()
    assert found is not None
    assert any("in made" in each for each in found.metadata["traceback_"])
    assert line_of(found) == ""


def test_lines_are_recorded_within_code_that_switches_anomaly_mode_off() -> None:
    """As Lightning's Trainer does, around a whole fit."""
    x = torch.ones(2, requires_grad=True)
    with recorded_lines(), torch.autograd.set_detect_anomaly(False):
        assert not lines_are_recorded()
        with recorded_lines():
            inner = made(x)
        torch.set_anomaly_enabled(False)
        record_again()
        again = made(x)
    assert line_of(inner.grad_fn)
    assert line_of(again.grad_fn)
    record_again()


def test_anomaly_detection_that_begins_inside_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    try:
        with recorded_lines():
            torch.autograd.set_detect_anomaly(True)
            found = made(x).grad_fn
            assert not lines_are_recorded()
        assert torch.is_anomaly_enabled()
        assert found is not None
        assert any("in made" in each for each in found.metadata["traceback_"])
    finally:
        torch.set_anomaly_enabled(False)


def test_results_and_compiled_code_are_the_same() -> None:
    def gradients(*, compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.GELU(), nn.Linear(8, 1))
        called = torch.compile(model, backend="aot_eager") if compiles else model
        called(torch.randn(4, 8)).sum().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    for compiles in (False, True):
        without = gradients(compiles=compiles)
        with recorded_lines():
            recorded = gradients(compiles=compiles)
        assert len(without) == len(recorded) == 4
        assert all(map(torch.equal, without, recorded))
