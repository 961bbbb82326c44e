"""What is set of this machine before training."""

import pytest
import torch

from brimful.execution import setup as local
from brimful.execution.setup import set_up_allocator
from brimful.settings import Settings

GROWING = Settings(micro_batch_size=1, expandable_segments=True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told; it was told of a split size and fixed segments before."""
    said: list[str] = []
    monkeypatch.setattr(local, "_expands_segments", False)
    before = "max_split_size_mb:128,expandable_segments:False"
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: said[-1] if said else before)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    return said


def test_the_allocator_expands_segments_and_keeps_its_other_options(told: list[str]) -> None:
    set_up_allocator(GROWING, torch.device("cuda"))
    assert told == ["max_split_size_mb:128,expandable_segments:True"]


def test_the_allocator_is_left_alone_on_a_cpu_and_where_nothing_is_asked(told: list[str]) -> None:
    set_up_allocator(GROWING, torch.device("cpu"))
    set_up_allocator(Settings(micro_batch_size=1), torch.device("cuda"))
    assert told == []


def test_what_one_plan_set_another_that_does_not_ask_for_it_undoes(told: list[str]) -> None:
    set_up_allocator(GROWING, torch.device("cuda"))
    set_up_allocator(GROWING, torch.device("cuda"))
    set_up_allocator(Settings(micro_batch_size=1), torch.device("cuda"))
    assert told[1:] == ["max_split_size_mb:128,expandable_segments:False"]


def test_the_user_s_options_stay_where_torch_does_not_report_them(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has the function that sets them, and not the one that reports them."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    set_up_allocator(GROWING, torch.device("cuda"))
    assert told == ["max_split_size_mb:64,expandable_segments:True"]
