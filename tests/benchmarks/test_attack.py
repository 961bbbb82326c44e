"""`benchmarks/attack.py` tries as much as it says, and finds each kind of failure where it happens."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from attacks import case as cases
from attacks.areas import AREAS
from attacks.case import FailedError, Kind, Place, check_ended, check_equal, check_nothing_lost, check_untouched
from attacks.material import Material
from attacks.mutations import field_name, mutate_bytes, mutate_json, replaced
from attacks.pool import run_all
from attacks.process import Ran, call

ROOT = Path(__file__).resolve().parents[2]

LEAST = {
    "kills of one process": 66,  # runs that are killed up to three times each: 92 kills
    "kills of ranks": 69,
    "kills of adapters": 32,
    "errors at random ops": 374,
    "errors in a whole fit": 100,
    "allocations that fail": 2,
    "errors in a step": 5,
    "errors under prepare": 40,
    "memory of a process": 6,
    "saves and run directories": 203,
    "disks": 83,
    "file operations that fail": 72,
    "clocks": 18,
    "data workers": 24,
    "trackers and callbacks": 19,
    "signals": 23,
    "two processes": 5,
    "standard streams": 8,
    "plan.json": 280,
    "traces": 194,
    "calibrations and homes": 22,
    "calibrations at once": 4,
    "exports": 24,
    "weights and models of others": 9,
    "paths, encodings, environment": 65,
    "arguments": 355,
    "arguments of functions": 580,
    "job files": 152,
    "images, tables and texts": 144,
}
"""Cases of each area in a first attack by hand, which found what was then mended."""


def test_every_area_has_as_many_cases_as_the_first_attack_and_their_names_are_unique() -> None:
    assert {area.name for area in AREAS} == set(LEAST)
    for area in AREAS:
        names = [each.name for each in area.cases(0)]
        attacks = [name for name in names if not name.startswith("unchanged")]
        assert len(attacks) >= LEAST[area.name], area.name
        assert len(set(names)) == len(names), area.name


def test_another_seed_gives_other_cases_of_the_random_areas() -> None:
    areas = {area.name: area for area in AREAS}
    for name in ("plan.json", "traces", "errors at random ops", "kills of one process"):
        first, second = ({each.name for each in areas[name].cases(seed)} for seed in (0, 1))
        assert second - first


# Each kind of failure


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "work").mkdir()
    return Place(root=tmp_path, material=Material(tmp_path))


def kind_of(check: Callable[[], object]) -> Kind:
    with pytest.raises(FailedError) as failure:
        check()
    return failure.value.kind


def test_a_command_that_waits_is_a_hang(place: Place) -> None:
    ran = place.start(action=lambda: time.sleep(60)).wait(idle_seconds=0.3)
    assert ran.status is None
    assert kind_of(lambda: check_ended(ran)) is Kind.HANG


def test_a_command_that_computes_without_end_is_a_hang(place: Place) -> None:
    def spin() -> None:
        while True:
            pass

    assert kind_of(lambda: check_ended(place.start(action=spin).wait(seconds=0.5))) is Kind.HANG


def test_an_error_that_is_not_brimfuls_is_a_traceback(place: Place) -> None:
    ran = place.run(action=call(lambda: {}["missing"]))
    assert kind_of(lambda: check_ended(ran)) is Kind.TRACEBACK
    check_ended(ran, own=Path(__file__).name)  # of a job's own file it is shown rightly


def test_a_crash_is_not_a_refusal(place: Place) -> None:
    def crash() -> None:
        faulthandler.disable()  # pytest's, which would print it
        os.kill(os.getpid(), signal.SIGSEGV)

    ran = place.run(action=crash)
    assert kind_of(lambda: cases.check_refused(ran)) is Kind.TRACEBACK


def test_reading_without_end_is_unbounded(place: Place) -> None:
    ran = place.run(action=lambda: Path("/dev/zero").read_bytes(), memory_bytes=1 << 28)
    assert kind_of(lambda: check_ended(ran)) is Kind.UNBOUNDED


def test_a_refusal_needs_a_message_and_a_status() -> None:
    assert kind_of(lambda: cases.check_refused(Ran(status=1, out="", err=""))) is Kind.WRONG
    assert kind_of(lambda: cases.check_refused(Ran(status=0, out="", err="UsageError: no"))) is Kind.WRONG
    cases.check_refused(Ran(status=2, out="", err="UsageError: no plan."))


def test_a_file_that_is_gone_or_changed_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"trained for days")
    before, names = cases.contents(tmp_path), cases.kept_names(tmp_path)
    check_untouched(tmp_path, before)
    path.write_bytes(b"random")
    assert kind_of(lambda: check_untouched(tmp_path, before)) is Kind.LOST
    path.unlink()
    assert kind_of(lambda: check_untouched(tmp_path, before)) is Kind.LOST
    assert kind_of(lambda: check_nothing_lost(tmp_path, names)) is Kind.LOST


def test_one_bit_of_a_loss_is_a_wrong_result(tmp_path: Path) -> None:
    for name, loss in {"a": 0.1 + 0.2, "b": 0.3}.items():
        (tmp_path / name).mkdir()
        entry = {"kind": "step", "step": 1, "loss": loss, "seconds": loss}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    check_equal(tmp_path / "a", tmp_path / "a")
    assert kind_of(lambda: check_equal(tmp_path / "a", tmp_path / "b")) is Kind.WRONG


def test_code_that_ran_is_found_whatever_the_case_says(tmp_path: Path) -> None:
    material = Material(tmp_path / "material")
    material.folder.mkdir()
    material.job.touch()
    attacks = [
        ("files", cases.Case("runs code", lambda place: place.canary.touch())),
        ("files", cases.Case("is itself broken", lambda place: 1 / 0)),
        ("files", cases.Case("holds", lambda place: None)),
    ]
    results = run_all(iter(attacks), material, tmp_path, workers=1, report=print)
    assert [result.kind for result in results] == ["executed", "broken", None]


# Changes


def test_a_value_of_another_type_or_beyond_its_range_is_invalid() -> None:
    document = {"micro_batch_size": 4, "seconds": 0.5, "fits": True, "name": "a", "units": []}
    for name, value in [
        *(("micro_batch_size", each) for each in (1.5, True, "4", None, 10**30, -5, 0)),
        *(("seconds", each) for each in (float("nan"), float("inf"), "0.5", True, -1)),
        *(("fits", each) for each in (1, None, "true")),
        *(("name", each) for each in (5, None, ["a"])),
        *(("units", each) for each in ({}, "", None)),
    ]:
        assert replaced(document, (name,), value).is_invalid, (name, value)
    for name, value in [
        ("micro_batch_size", 5),
        ("seconds", 1),
        ("fits", False),
        ("name", ""),
        ("units", ["x"]),
    ]:
        assert not replaced(document, (name,), value).is_invalid, (name, value)


def test_a_cell_of_a_table_belongs_to_its_column() -> None:
    document = {"ops": {"columns": ["name", "flops"], "rows": [["a", 1], ["b", 2]]}}
    assert field_name(document, ("ops", "rows", 1, 1)) == "flops"
    assert field_name(document, ("ops", "columns", 1)) == "columns"


def test_changes_reach_every_node_and_leave_the_document_as_it_was() -> None:
    document = {"a": [1, {"b": "x"}], "c": None}
    before = json.dumps(document)
    whats = {mutate_json(document, Random(seed)).what.partition(" ")[0] for seed in range(600)}
    assert {"all", "a", "a.0", "a.1", "a.1.b", "c"} <= whats
    assert json.dumps(document) == before


def test_bytes_are_changed() -> None:
    content = bytes(range(256))
    changed = [mutate_bytes(content, Random(seed))[0] != content for seed in range(100)]
    assert sum(changed) > 90  # to put zeros where there are some, or to turn by none, changes nothing


@pytest.mark.slow
def test_attacks_run_as_a_command() -> None:
    """One case of some areas, on files that brimful writes for it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "attack.py"), "--cases", "1", "--areas"]
    areas = ["signals", "saves and run directories", "plan.json"]
    done = subprocess.run(
        [*command, *areas], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'as_expected'") == len(areas)
