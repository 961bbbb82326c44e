"""An option is declared once: Python functions, type checkers and the command line agree with the records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

import brimful as bf
from brimful.options import LoopOptions, PlanKeywords, PlanOptions
from brimful.settings import Action, MemoryFormat
from brimful.trainer.options import TrainKeywords, TrainOptions
from brimful.utils.field_docs import field_docstrings

TAKERS = [(bf.plan, PlanOptions), (bf.fit, TrainOptions), (bf.trainer.Trainer, TrainOptions)]


@pytest.mark.parametrize(("function", "record"), TAKERS)
def test_functions_show_every_option_with_its_default_and_its_help(
    function: Callable[..., Any], record: type
) -> None:
    parameters = inspect.signature(function).parameters
    documented = inspect.getdoc(function) or ""
    for field in fields(record):
        assert parameters[field.name].default == field.default, field.name
        assert f"\n    {field.name}: " in documented
    assert "**options" not in documented


@pytest.mark.parametrize(("keywords", "record"), [(PlanKeywords, PlanOptions), (TrainKeywords, TrainOptions)])
def test_type_checkers_know_every_option(keywords: type, record: type) -> None:
    assert list(keywords.__annotations__) == [field.name for field in fields(record)]


def test_what_is_not_an_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"brimful\.trainer\.Trainer\(\) has no option 'epoch_count'"):
        bf.trainer.Trainer(None, None, epoch_count=1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"fit\(\) has no option 'epoch'; did you mean epochs\?"):
        bf.fit(None, None, epoch=1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"plan\(\) has no option 'bugdet'; did you mean budget\?"):
        bf.plan(None, bugdet="50%")  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"plan\(\) has no option 'xyz'; help\(brimful\.plan\) lists them"):
        bf.plan(None, global_batch_size=1, xyz=1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(
        TypeError, match=r"brimful\.Plan\.check\(\) has no option 'budgt'; did you mean budget\?"
    ):
        bf.Plan.check(None, None, budgt="50%")  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"brimful\.Plan\.export\(\): missing a required argument: 'tool'"):
        bf.Plan.export(None, None)  # type: ignore[arg-type, call-arg]


def test_a_text_that_is_not_taken_is_refused_with_all_that_is_taken() -> None:
    with pytest.raises(bf.errors.UsageError, match=r"is '32'; it must be a whole number, \"largest\" or None"):
        bf.estimate(bf.find_architecture("gpt2"), "RTX 3090", micro_batch_size="32")  # type: ignore[arg-type]


def test_options_are_kept_as_text_whatever_their_form() -> None:
    given: PlanKeywords = {"budget": 11 * 2**30, "precision": ["bf16", "fp32"], "recompute": Action.RECOMPUTE}
    assert PlanOptions.of(given) == PlanOptions(budget="11811160064B", precision="bf16,fp32", recompute="all")
    assert PlanOptions.of({"recompute": None, "allow_optimizers": "adafactor"}) == PlanOptions(
        allow_optimizers=("adafactor",)
    )
    for named in ("channels_last", torch.channels_last, MemoryFormat.CHANNELS_LAST):
        assert PlanOptions.of({"memory_format": named}) == PlanOptions(memory_format="channels_last")
    assert PlanOptions.of({"memory_format": torch.preserve_format}) == PlanOptions(memory_format="preserve")


@pytest.mark.parametrize("record", [LoopOptions, PlanOptions, TrainOptions])
def test_every_option_has_its_help_below_it(record: type) -> None:
    assert field_docstrings(record).keys() == {field.name for field in fields(record)}
    assert all(text.endswith((".", "…")) for text in field_docstrings(record).values())
