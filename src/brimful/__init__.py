"""Fill your GPU to the brim, never over it.

Names load their stage, and torch, on first use, so that `import brimful` is quick. `__init__.pyi` has them.
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

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    if isinstance(value, type) and "__dataclass_fields__" in vars(value):
        from brimful.utils.field_docs import list_fields_in_help

        list_fields_in_help(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
