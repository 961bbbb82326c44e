"""What a user asks of a plan is declared once: the command line and `brimful.plan` agree with the record."""

from __future__ import annotations

import inspect
from dataclasses import fields

import brimful as bf
from brimful.cli.options import field_docstrings
from brimful.options import PlanOptions
from brimful.settings import Precision

BESIDES = {"job", "device", "global_batch_size", "world_size", "num_nodes", "network"}
"""Parameters of `bf.plan` that say what is planned, and for what."""


def test_bf_plan_takes_every_option_with_the_same_default() -> None:
    parameters = inspect.signature(bf.plan).parameters
    assert set(parameters) - BESIDES == {field.name for field in fields(PlanOptions)}
    same = {"recompute": {None: "auto"}, "precision": {Precision.FP32: "fp32"}}
    for field in fields(PlanOptions):
        default = parameters[field.name].default
        assert same.get(field.name, {}).get(default, default) == field.default, field.name


def test_every_option_has_its_help_below_it() -> None:
    assert field_docstrings(PlanOptions).keys() == {field.name for field in fields(PlanOptions)}
    assert all(text.endswith((".", "…")) for text in field_docstrings(PlanOptions).values())
