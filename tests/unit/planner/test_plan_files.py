"""Plan files: what is not a plan is refused in one line with the file, the field and what was expected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brimful.codec import DOCUMENT_BYTES
from brimful.errors import FileFormatError
from brimful.planner import Alternative, JobSource, Plan, PlanStatus
from brimful.settings import Action, Settings, UnitAction

Document = dict[str, Any]

SETTINGS = Settings(
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    optimizer="adamw",
    units=(UnitAction(fqn="0", action=Action.RECOMPUTE), UnitAction(fqn="1", action=Action.KEEP)),
)
PLAN = Plan(
    status=PlanStatus.FEASIBLE,
    job="job",
    device="RTX 3090",
    device_kind="cuda",
    budget_bytes=2**30,
    settings=SETTINGS,
    predicted_peak_allocated_bytes=10,
    predicted_peak_reserved_bytes=20,
    predicted_peak_device_bytes=30,
    predicted_step_seconds=0.5,
    plain=Alternative(
        label="plain",
        settings=SETTINGS,
        predicted_peak_reserved_bytes=20,
        predicted_step_seconds=0.4,
        fits=True,
    ),
    alternatives=(),
    source=JobSource(name="resnet18", options={"image_size": 64}),
)


def at(*path: str | int, value: object) -> Callable[[Document], None]:
    def put(document: Document) -> None:
        inside: Any = document
        for name in path[:-1]:
            inside = inside[name]
        inside[path[-1]] = value

    return put


def without(*path: str) -> Callable[[Document], None]:
    def remove(document: Document) -> None:
        inside: Any = document
        for name in path[:-1]:
            inside = inside[name]
        del inside[path[-1]]

    return remove


def settings(name: str, value: object) -> Callable[[Document], None]:
    return at("settings", name, value=value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("brimful_plan"), "is not a brimful plan: it has no field `brimful_plan`"),
        (at("brimful_plan", value=2), "this is version 2; this brimful reads version 1"),
        (at("brimful_plan", value=True), "this is version True"),
        (at("brimful_plan", value=[1]), "this is version list"),
        (settings("micro_batch_size", 1.5), "field `settings.micro_batch_size`: expected `int`, got `float`"),
        (settings("micro_batch_size", True), "field `settings.micro_batch_size`: expected `int`, got `bool`"),
        (settings("micro_batch_size", 0), "field `settings.micro_batch_size`: expected `int` >= 1"),
        (settings("micro_batch_size", 10**30), "field `settings.micro_batch_size`: expected `int` <="),
        (settings("micro_batch_size", float("nan")), "is not valid JSON"),
        (
            settings("precision", "fp8"),
            "field `settings.precision`: invalid enum value 'fp8'; expected 'fp32' or 'tf32' or",
        ),
        (settings("optimizer", 5), r"field `settings.optimizer`: expected `str \| null`, got `int`"),
        (settings("units", [{"fqn": 5, "action": "keep"}]), r"field `settings.units\[0\].fqn`: expected `str`"),
        (settings("units", [{"fqn": "0", "action": "burn"}]), r"units\[0\].action`: invalid enum value 'burn'"),
        (settings("units", [{"fqn": "0", "action": "save"}]), r"units\[0\]`: unit '0' has action 'save' and 0"),
        (settings("units", [{"fqn": "0", "action": "nest"}]), "field `settings`: unit '0' is nested, so"),
        (settings("nodes", 2), "field `settings`: 1 ranks cannot be divided evenly among 2 nodes"),
        (settings("step_in_backward", True), "field `settings`: optimizer_in_backward updates each parameter"),
        (settings("ranks", "x"), r"field `settings\.ranks`: expected `int`"),
        (settings("world_size", 2), r"field `settings\.world_size`: unknown"),
        (settings("micro_batchsize", 3), "field `settings.micro_batchsize`: unknown"),
        (settings("a\x1b\n", 3), r"field `settings.a\\x1b\\n`: unknown"),
        (without("settings", "units"), "missing field `settings.units`"),
        (without("settings", "micro_batch_size"), "missing field `settings.micro_batch_size`"),
        (without("plain"), "missing field `plain`"),
        (without("notes"), "missing field `notes`"),
        (at("budget_bytes", value=0), "field `budget_bytes`: expected `int` >= 1"),
        (at("budget_bytes", value=-5), "field `budget_bytes`: expected `int` >= 1"),
        (at("budget_bytes", value="x"), "field `budget_bytes`: expected `int`, got `str`"),
        (at("budget_bytes", value=None), "field `budget_bytes`: expected `int`, got `null`"),
        (at("budget_bytes", value=1e308), "field `budget_bytes`: expected `int`, got `float`"),
        (at("predicted_step_seconds", value=0), "field `predicted_step_seconds`: expected `float` > 0"),
        (
            at("predicted_step_seconds", value="x"),
            "field `predicted_step_seconds`: expected `float`, got `str`",
        ),
        (at("predicted_step_seconds", value=None), "field `predicted_step_seconds`: expected `float`"),
        (at("predicted_step_seconds", value=float("inf")), "is not valid JSON"),
        (
            at("device_kind", value="tpu"),
            "field `device_kind`: invalid enum value 'tpu'; expected 'cpu' or 'cuda'",
        ),
        (at("device_kind", value="x" * 10_000), "field `device_kind`: invalid enum value 'xxx.*…"),
        (at("status", value="optimal"), "field `status`: invalid enum value 'optimal'"),
        (at("model_flops", value=10**400), "model_flops has 401 digits"),
        (at("source", value=5), r"field `source`: expected `object \| null`, got `int`"),
        (at("source", "name", value=5), "field `source.name`: expected `str`, got `int`"),
        (at("source", "name", value=""), "field `source.name`: expected `str` of length >= 1"),
        (at("source", "name", value="x" * 10_000), "field `source.name`: expected `str` of length <= 4096"),
        (at("source", "options", value=3), "field `source.options`: expected `object`, got `int`"),
        (at("source", "options", value={"a": []}), r"field `source.options\[\.\.\.\]`: expected `bool"),
    ],
)
def test_a_damaged_field_is_named_with_what_was_expected(
    damage: Callable[[Document], None], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    document = json.loads(json.dumps(PLAN.to_json()))
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=said) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"the plan {path}")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600 + len(str(path))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "null", "\x00", "NaN", "[" * 100_000, '{"a":' * 100_000]
)
def test_what_is_not_a_plan_at_all_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"the plan .*p\.json") as caught:
        Plan.load(tmp_path / "p.json")
    assert str(caught.value).isprintable()


def test_what_is_not_a_file_of_a_plans_size_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(DOCUMENT_BYTES + 1)
    for name in ("fifo", "link", "huge", ".", "none", "/dev/zero"):
        with pytest.raises(FileFormatError, match="the plan "):
            Plan.load(tmp_path / name)


def test_a_plan_is_written_with_the_keys_and_values_of_version_1(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["source"] == {
        "name": "resnet18",
        "options": {"image_size": 64},
    }
    assert Plan.load(tmp_path / "p.json") == PLAN
