"""What a user asks of a plan is declared once: the command line and `brimful.plan` agree with the record."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

import brimful as bf
from brimful.cli.options import field_docstrings
from brimful.options import PlanOptions
from brimful.settings import Precision
from brimful.trainer.options import TrainKeywords, TrainOptions

BESIDES = {"job", "device", "global_batch_size", "world_size", "num_nodes", "network"}
"""Parameters of `bf.plan` that say what is planned, and for what."""


def test_bf_plan_takes_every_option_with_the_same_default() -> None:
    parameters = inspect.signature(bf.plan).parameters
    assert set(parameters) - BESIDES == {field.name for field in fields(PlanOptions)}
    same = {"recompute": {None: "auto"}, "precision": {Precision.FP32: "fp32"}}
    for field in fields(PlanOptions):
        default = parameters[field.name].default
        assert same.get(field.name, {}).get(default, default) == field.default, field.name


def test_the_trainer_takes_every_train_option_with_the_same_default() -> None:
    names = [field.name for field in fields(TrainOptions)]
    shown = inspect.signature(bf.Trainer).parameters
    assert list(shown) == ["job", "plan", *names]
    assert list(get_type_hints(TrainKeywords)) == names
    assert get_type_hints(TrainKeywords) == get_type_hints(TrainOptions)
    with pytest.raises(TypeError, match="epoch_count"):
        bf.Trainer(None, None, epoch_count=1)  # type: ignore[arg-type, call-arg]


def test_bf_fit_takes_train_options_with_the_same_default() -> None:
    parameters = inspect.signature(bf.fit).parameters
    for field in fields(TrainOptions):
        assert parameters[field.name].default == field.default, field.name


@pytest.mark.parametrize("record", [PlanOptions, TrainOptions])
def test_every_option_has_its_help_below_it(record: type) -> None:
    assert field_docstrings(record).keys() == {field.name for field in fields(record)}
    assert all(text.endswith((".", "…")) for text in field_docstrings(record).values())
