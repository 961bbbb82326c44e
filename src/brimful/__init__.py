"""Fill your GPU to the brim, never over it.

Names load their stage, and torch, on first use, so that `import brimful` is quick. `__init__.pyi` has them; the
rest is in the packages that it lists first, such as `brimful.trainer` and `brimful.errors`.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
_PACKAGES = [name for name, module in _MODULES.items() if module == __name__]

__all__ = sorted(_MODULES.keys() - set(_PACKAGES))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}{_place_of(name)}")
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(_MODULES[name]), name)
    if isinstance(value, type) and "__dataclass_fields__" in vars(value):
        from brimful.utils.field_docs import list_fields_in_help

        list_fields_in_help(value)
    globals()[name] = value
    return value


def _place_of(name: str) -> str:
    """Where else a name is; only asked of names that are not private, as importing packages takes a while."""
    packages = () if name.startswith("_") else _PACKAGES
    places = [each for each in packages if hasattr(import_module(f"{__name__}.{each}"), name)]
    return "".join(f"; it is brimful.{place}.{name}" for place in places[:1])


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
