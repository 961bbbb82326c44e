"""What the codec does beside what test_plan_files.py shows: bounds, paths, special numbers, forms."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from brimful.codec import (
    ALWAYS_WRITTEN,
    JsonForm,
    NonNegativeFloat,
    PositiveInt,
    UnboundedFloat,
    decode_directly,
    decode_json,
    fields_of_version,
    from_json_document,
    json_form,
    parse_json,
    read_regular_file,
    to_json_document,
)
from brimful.errors import FileFormatError


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    size: PositiveInt = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    colour: Colour
    parts: tuple[Part, ...]
    seconds: float = 1.0


def test_a_document_becomes_the_record_that_its_annotations_describe() -> None:
    found = decode_json('{"colour": "red", "parts": [{"name": "a", "size": 2}]}', Whole, where="f.json")
    assert found == Whole(colour=Colour.RED, parts=(Part(name="a", size=2),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"colour": "blue", "parts": []}',
            r"f.json: field `colour`: invalid enum value 'blue'; expected 'red'\.",
        ),
        ('{"colour": "red"}', r"missing field `parts`"),
        (
            '{"colour": "red", "parts": [{"name": "a", "size": 0}]}',
            r"field `parts\[0\].size`: expected `int` >= 1",
        ),
        (
            '{"colour": "red", "parts": [{"name": "a", "size": 1.5}]}',
            r"field `parts\[0\].size`: expected `int`",
        ),
        (
            '{"colour": "red", "parts": [{"name": "a", "size": true}]}',
            r"field `parts\[0\].size`: expected `int`",
        ),
        ('{"colour": "red", "parts": [{"name": "a", "size": 1' + "0" * 30 + "}]}", r"size`: expected `int`"),
        ('{"colour": "red", "parts": [{"size": 1}]}', r"missing field `parts\[0\]\.name`"),
        ('{"colour": "red", "parts": [{"name": "a", "sise": 3}]}', r"field `parts\[0\].sise`: unknown"),
        ('{"colour": "red", "parts": [], "seconds": NaN}', "not valid JSON"),
        ('{"colour": "red", "parts": [], "seconds": "1"}', r"field `seconds`: expected `float`"),
        ("[1]", r"expected `object`"),
        ("", "not valid JSON"),
        ('{"colour": }', "JSON is malformed"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_damage_is_one_line_with_the_file_and_the_field(text: str, expected: str) -> None:
    with pytest.raises(FileFormatError, match=expected) as caught:
        decode_json(text, Whole, where="f.json")
    assert str(caught.value).startswith("f.json")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(FileFormatError, match="not valid JSON"):
        parse_json(b'{"a": "\xff"}', where="f.json")


def test_a_document_of_another_type_is_refused_after_parsing_too() -> None:
    with pytest.raises(FileFormatError, match="expected `object`, got `str`"):
        from_json_document("text", Whole, where="f.json")


def test_files_are_read_up_to_a_limit_and_odd_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "small", what="plan", limit_bytes=5) == b"12345"
    with pytest.raises(FileFormatError, match="at most 4 B are read"):
        read_regular_file(tmp_path / "small", what="plan", limit_bytes=4)
    for name, expected in (("x" * 300, "too long"), ("nul\0byte", "cannot be read")):
        with pytest.raises(FileFormatError, match=expected):
            read_regular_file(tmp_path / name, what="plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    parts: tuple[Part, ...]
    where: Path | None = None
    note: str = field(default="", metadata=ALWAYS_WRITTEN)


def test_a_field_that_is_always_written_must_be_there_although_it_has_a_default() -> None:
    assert decode_json('{"parts": [], "note": ""}', Noted, where="f.json") == Noted(parts=())
    with pytest.raises(FileFormatError, match=r"f\.json: missing field `note`"):
        decode_json('{"parts": []}', Noted, where="f.json")
    with pytest.raises(FileFormatError, match=r"f.json: missing field `\[1\].note`"):
        decode_json('[{"parts": [], "note": ""}, {"parts": []}]', list[Noted], where="f.json")


def test_a_path_is_read_from_text_and_from_nothing_else() -> None:
    assert from_json_document({"parts": [], "note": "", "where": "a/b"}, Noted, where="f").where == Path("a/b")
    with pytest.raises(FileFormatError, match="field `where`: expected `path`, got `int`"):
        from_json_document({"parts": [], "note": "", "where": 5}, Noted, where="f")


def test_the_name_of_an_unknown_field_cannot_fill_the_terminal() -> None:
    with pytest.raises(FileFormatError) as caught:
        decode_json(f'{{"colour": "red", "parts": [], "{"x" * 10_000}": 1}}', Whole, where="f.json")
    assert len(str(caught.value)) < 500


def test_text_with_half_a_surrogate_is_refused() -> None:
    for text in ('{"a": "\ud800"}', '{"a": "\\ud800"}'):
        with pytest.raises(FileFormatError, match="not valid JSON"):
            parse_json(text, where="f.json")


def test_a_version_must_be_the_number_itself() -> None:
    assert fields_of_version({"v": 2, "a": 1}, "v", 2, what="plan", where="f.json") == {"a": 1}
    for version, said in ((2.0, "this is version 2.0"), ("2", "version '2'"), (10**5000, "version int")):
        with pytest.raises(FileFormatError, match=said):
            fields_of_version({"v": version}, "v", 2, what="plan", where="f.json")


def test_a_value_inside_a_document_is_named_by_its_path() -> None:
    with pytest.raises(FileFormatError, match=r"f.json: field `a.rows\[1\]`: expected `int`, got `str`"):
        decode_directly(b'[1, "x"]', list[int], where="f.json", path="a.rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    free: UnboundedFloat
    bounded: NonNegativeFloat = 0.0
    by_name: dict[str, UnboundedFloat | None]


def test_numbers_that_json_lacks_are_text_and_become_numbers_where_the_field_may_hold_them() -> None:
    by_name = {"inf": math.inf, "-inf": -math.inf, "half": 0.5, "none": None}
    document = to_json_document(Numbers(free=math.nan, by_name=by_name))
    assert document == {
        "free": "nan",
        "bounded": 0.0,
        "by_name": {"inf": "inf", "-inf": "-inf", "half": 0.5, "none": None},
    }
    read = from_json_document(document, Numbers, where="f.json")
    assert math.isnan(read.free)
    assert read.by_name == by_name
    with pytest.raises(FileFormatError, match="field `bounded`: expected `float`, got `str`"):
        from_json_document(document | {"bounded": "inf"}, Numbers, where="f.json")


@json_form(JsonForm(derived={"holds": lambda part: part.size > 1}, order=("size", "holds"), omitted={"note"}))
@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    name: str
    size: PositiveInt
    note: str = ""


def test_a_record_declares_what_its_json_has_beside_its_fields() -> None:
    document = to_json_document(Form(name="a", size=2, note="secret"))
    assert list(document.items()) == [("size", 2), ("holds", True), ("name", "a")]
    assert from_json_document(document | {"holds": None}, Form, where="f.json") == Form(name="a", size=2)


class Cell(msgspec.Struct, array_like=True):
    number: int
    colour: Colour | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    rows: list[Cell]
    kinds: dict[str, tuple[int, Literal["a", "b"]]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"rows": [[1, "blue"]], "kinds": {}}',
            r"field `rows\[0\]\[1\]`: invalid enum value 'blue'; expected 'red'",
        ),
        ('{"rows": [], "kinds": {"x": [1, "c"]}}', r"invalid enum value 'c'; expected 'a' or 'b'"),
    ],
)
def test_what_an_enumeration_may_be_is_told_wherever_it_is(text: str, said: str) -> None:
    with pytest.raises(FileFormatError, match=said):
        decode_json(text, Table, where="f.json")


def test_a_small_file_takes_little_memory_however_large_the_limit_is(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    tracemalloc.start()
    try:
        assert read_regular_file(tmp_path / "p.json", what="plan", limit_bytes=2**30) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
