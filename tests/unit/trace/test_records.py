"""Trace files: what is loaded equals what was saved; anything else is refused by its field, in one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from brimful.errors import FileFormatError
from brimful.memory import predict_memory
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Category, Kernel, Phase, Trace
from brimful.trace import file_format as trace_module
from helpers.traces import TraceWriter

Document = dict[str, Any]


def written() -> Trace:
    writer = TraceWriter()
    weight = writer.allocate(4096, "0.weight", Category.PARAMETERS)
    writer.op("aten.mm.default", module="0")
    result = writer.allocate(2048, "aten.mm.default", Category.SAVED_TENSORS)
    writer.op("aten.sum.dim_IntList", module="0", phase=Phase.BACKWARD)
    writer.allocate(1024, "reduction staging")
    writer.free(result)
    writer.free(weight)
    trace = writer.trace()
    kernel = Kernel(name="reduction staging", numbers=(82, 1536, 4, 8, 8, 1, 1, 0))
    return dataclasses.replace(
        trace,
        settings=Settings(micro_batch_size=1, units=(UnitAction(fqn="0", action=Action.RECOMPUTE),)),
        storages=(*trace.storages[:2], structs.replace(trace.storages[2], kernel=kernel)),
        module_classes=(("", "Net"), ("0", "Linear"), ("1", "Linear")),
    )


def cell(table: str, row: int, column: str, value: object) -> Callable[[Document], None]:
    def put(document: Document) -> None:
        document[table]["rows"][row][document[table]["columns"].index(column)] = value

    return put


def field(name: str, value: object) -> Callable[[Document], None]:
    return lambda document: document.__setitem__(name, value)


def without(name: str) -> Callable[[Document], None]:
    return lambda document: document.__delitem__(name)


def document_of(trace: Trace) -> Document:
    """As JSON readers give it: lists, not tuples."""
    document: Document = json.loads(json.dumps(trace.to_json()))
    return document


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_loaded_trace_equals_the_saved_one(tmp_path: Path, name: str) -> None:
    written().save(tmp_path / name)
    assert Trace.load(tmp_path / name) == written()


def test_a_trace_of_an_earlier_release_lacks_columns_and_fields_that_have_defaults() -> None:
    document = document_of(written())
    for later in ("couples_samples", "host_state_bytes", "host_staging_bytes", "paged_state_bytes"):
        del document[later]
    place = document["ops"]["columns"].index("on_host")
    for row in (document["ops"]["columns"], *document["ops"]["rows"]):
        del row[place]
    assert Trace.from_json(document) == written()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("brimful_trace"), "not a brimful trace"),
        (field("brimful_trace", 1), "this is version 1; this brimful reads version 2"),
        (field("brimful_trace", True), "field `brimful_trace`: expected `int`, got `bool`"),
        (without("job"), "missing field `job`"),
        (without("corrections"), "missing field `corrections`"),
        (field("jobs", 1), "field `jobs`: unknown"),
        (field("job\n", 1), r"field `job\\n`: unknown"),
        (field("job", 5), "field `job`: expected `str`, got `int`"),
        (field("device_kind", "tpu"), "field `device_kind`: invalid enum value 'tpu'"),
        (field("captured_steps", 0), "field `captured_steps`: expected `int` >= 1"),
        (field("captured_micro_batches", 1.5), "field `captured_micro_batches`: expected `int`"),
        (field("host_state_bytes", -1), "field `host_state_bytes`: expected `int` >= 0"),
        (field("module_classes", [["a"]]), r"field `module_classes\[0\]`: expected `array` of length 2"),
        (field("settings", {"micro_batch_size": 0}), "settings: field `micro_batch_size`: expected `int` >= 1"),
        (field("settings", None), "settings: expected `object`"),
        (field("ops", []), "field `ops`: expected `object`"),
        (field("ops", {"columns": ["name"], "rows": []}), "field `ops.columns`: it lacks dtype"),
        (lambda d: d["ops"]["columns"].__setitem__(0, "title"), "field `ops.columns`: it lacks name"),
        (lambda d: d["ops"]["columns"].append("cost"), "field `ops.columns`: one is unknown"),
        (lambda d: d["ops"]["columns"].append("name"), "field `ops.columns`: one is unknown, or there twice"),
        (lambda d: d["ops"]["rows"].append([]), r"field `ops.rows\[2\]`: expected `array` of"),
        (lambda d: d["ops"]["rows"][0].append(1), "field `ops.rows`: expected `array` of at most length 17"),
        (
            cell("ops", 1, "phase", "middle"),
            r"field `ops.rows\[1\].phase`: invalid enum value 'middle'; expected 'setup' or",
        ),
        (cell("ops", 1, "phase", None), r"field `ops.rows\[1\].phase`: expected `str`"),
        (cell("ops", 0, "flops", -1), r"field `ops.rows\[0\].flops`: expected `int` >= 0"),
        (cell("ops", 0, "flops", 10**30), r"field `ops.rows\[0\].flops`: expected `int` <="),
        (cell("ops", 0, "read_bytes", "1"), r"field `ops.rows\[0\].read_bytes`: expected `int`"),
        (cell("ops", 0, "recomputed", 1), r"field `ops.rows\[0\].recomputed`: expected `bool`"),
        (cell("ops", 0, "module", "x" * 5000), r"field `ops.rows\[0\].module`: expected `str` of length <="),
        (cell("storages", 0, "size_bytes", -1), r"field `storages.rows\[0\].size_bytes`: expected `int` >= 0"),
        (cell("storages", 0, "category", "junk"), r"field `storages.rows\[0\].category`: invalid enum value"),
        (cell("storages", 2, "kernel", "x"), r"field `storages.rows\[2\].kernel`: expected `array \| null`"),
        (cell("events", 0, "kind", "move"), r"field `events.rows\[0\].kind`: invalid enum value 'move'"),
    ],
)
def test_a_damaged_field_is_named_with_what_was_expected(
    damage: Callable[[Document], None], said: str, tmp_path: Path
) -> None:
    document = document_of(written())
    damage(document)
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=said) as caught:
        Trace.load(tmp_path / "t.json")
    assert str(caught.value).startswith(f"the trace {tmp_path / 't.json'}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cell("ops", 0, "step", 1), r"ops.rows\[0\].step`: expected 0 to 0, got 1"),
        (cell("ops", 1, "micro_batch", 1), r"ops.rows\[1\].micro_batch`: expected at most 0, got 1"),
        (cell("ops", 1, "made_ops_ago", 2), r"ops.rows\[1\].made_ops_ago`: expected at most 1, got 2"),
        (cell("storages", 1, "op", 2), r"storages.rows\[1\].op`: expected less than 2, got 2"),
        (cell("storages", 1, "size_bytes", 2**62), "storages`: they have more than"),
        (cell("storages", 1, "most_bytes", 2**62), "storages`: they have more than"),
        (
            cell("storages", 2, "kernel", ["no such", []]),
            r"storages.rows\[2\].kernel`: its name or its numbers",
        ),
        (cell("storages", 2, "kernel", ["embedding backward", [1]]), r"rows\[2\].kernel`: its name or its num"),
        (cell("events", 0, "storage", 3), r"events.rows\[0\].storage`: expected less than 3, got 3"),
        (cell("events", 0, "op", 2), r"events.rows\[0\].op`: expected -1 to 1, got 2"),
        (cell("events", 2, "op", -1), r"events.rows\[2\].op`: expected 0 to 1, got -1"),
        (cell("events", 0, "kind", "free"), r"events.rows\[0\]`: storage 0 is freed, and is not allocated"),
        (cell("events", 1, "storage", 0), r"events.rows\[1\]`: storage 0 is allocated a second time"),
        (
            lambda d: d["settings"]["units"].append({"fqn": "[0..2]", "action": "keep"}),
            r"settings.units\[1\].fqn`: no module of the trace is called '2' there",
        ),
    ],
)
def test_what_refers_to_something_that_does_not_exist_is_refused(
    damage: Callable[[Document], None], said: str
) -> None:
    document = document_of(written())
    damage(document)
    with pytest.raises(FileFormatError, match=f"the trace: field `.*{said}"):
        Trace.from_json(document)


def test_a_trace_that_loads_can_be_replayed() -> None:
    document = document_of(written())
    document["settings"]["units"].append({"fqn": "[0..1]", "action": "keep"})
    assert predict_memory(Trace.from_json(document)).peak_allocated_bytes > 0


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "\x00", '{"brimful_trace": 2', "[" * 100_000, "NaN"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_is_not_a_trace_at_all_is_refused(tmp_path: Path, name: str, content: str) -> None:
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    with pytest.raises(FileFormatError, match=name):
        Trace.load(tmp_path / name)


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_a_damaged_archive_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.json.gz"
    written().save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FileFormatError, match=r"t\.json\.gz"):
        Trace.load(path)


def test_an_archive_that_grows_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "TRACE_BYTES", 2**20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**24))
    assert path.stat().st_size < 2**20
    with pytest.raises(FileFormatError, match=r"larger than 1 MiB when decompressed"):
        Trace.load(path)
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(FileFormatError, match="at most 1 MiB are read"):
        Trace.load(path)


def test_what_is_not_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    for name in ("fifo.json", "link.json", ".", "/dev/zero", "none.json"):
        with pytest.raises(FileFormatError, match="the trace "):
            Trace.load(tmp_path / name)
