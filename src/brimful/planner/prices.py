"""Prices of GPUs per hour, from a mapping or a file, checked against the GPUs that are known."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.codec import parse_json, read_regular_file
from brimful.devices import find_device, known_devices
from brimful.errors import FileFormatError, UnknownNameError, UsageError

PRICES_BYTES = 1 << 20
"""Largest file of prices that is read. A choice."""
COLUMNS = ("gpu", "price_per_hour")
"""Columns of a CSV file; others are ignored."""
_HIGHEST_PRICE = 1e6


def prices_of(prices: Mapping[str, float] | str | Path, names: Sequence[str]) -> dict[str, float]:
    """The price of each GPU that has one.

    Args:
        prices: Prices per hour in any one currency, by a name that `find_device` knows or one of `names`; or
            the file that has them: a CSV file with the columns `gpu` and `price_per_hour`, or a JSON object.
        names: The GPUs that are compared.

    Returns:
        By the names that the GPUs have in the table, or in `names`.

    Raises:
        UnknownNameError: A name is not that of a GPU; the message has the nearest.
        UsageError: A price is not a number from 0 on; a name is not text, that of a CPU, or may mean several
            GPUs; or one has two prices.
        FileFormatError: The file cannot be read, or is neither.
    """
    where = "the prices" if isinstance(prices, Mapping) else f"the prices {prices}"
    given = prices.items() if isinstance(prices, Mapping) else _read(Path(prices), where)
    found: dict[str, float] = {}
    for name, value in given:
        device = _device_name(name, names, where)
        price = _price(value, name, where)
        if found.get(device, price) != price:
            raise UsageError(f"{where}: {device} has two prices, {found[device]:g} and {price:g} ({name!r}).")
        found[device] = price
    return found


def _read(path: Path, where: str) -> list[tuple[str, Any]]:
    content = read_regular_file(path, what="prices", limit_bytes=PRICES_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{where}: this is not UTF-8: {error}.") from None
    if text.lstrip()[:1] in ("{", "["):
        if not isinstance(parse_json(text, where=where), dict):
            raise FileFormatError(
                f'{where}: write a JSON object such as {{"L4": 0.8}}, price by name of a GPU.'
            )
        try:
            # A dict would keep the last of each name.
            pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{where}: this is not JSON: {error}.") from None
        return pairs
    return _rows(text, where)


def _rows(text: str, where: str) -> list[tuple[str, Any]]:
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise FileFormatError(
                f"{where}: the first line has no column {' and no '.join(missing)}. Write {','.join(COLUMNS)} "
                "there, or a JSON object."
            )
        return [(row["gpu"] or "", row["price_per_hour"]) for row in reader]
    except csv.Error as error:
        raise FileFormatError(f"{where}: line {reader.line_num} is not CSV: {error}.") from None


def _device_name(name: Any, names: Sequence[str], where: str) -> str:
    if not isinstance(name, str):
        raise UsageError(
            f"{where}: the key {name!r} is of type {type(name).__name__}, not the name of a GPU. Write one "
            "such as 'RTX 3090'."
        )
    if name in names:
        return name
    known = {*names, *(device.name for device in known_devices())}
    try:
        device = find_device(name)
    except UnknownNameError:
        raise UnknownNameError(f"GPU in {where}:", name, known) from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if device.kind != "cuda":
        raise UsageError(f"{where}: {name!r} is not a GPU. `brimful gpus` compares GPUs alone.")
    return device.name


def _price(value: Any, name: str, where: str) -> float:
    try:
        price = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        price = math.nan
    if not 0 <= price <= _HIGHEST_PRICE:  # NaN is neither
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        raise UsageError(
            f"{where}: the price of {name!r} is {shown}, not a number per hour from 0 on, without a currency."
        )
    return price
