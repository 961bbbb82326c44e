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
    """Where else a public name is, found without importing anything."""
    places = [] if name.startswith("_") else [each for each in _PACKAGES if name in _names_of(each)]
    return "".join(f"; it is brimful.{place}.{name}" for place in places[:1])


def _names_of(package: str) -> set[str]:
    """The names in `__all__` of a package, or those that a module without it defines."""
    path = Path(__file__).parent / package / "__init__.py"
    tree = ast.parse((path if path.exists() else path.parent.with_suffix(".py")).read_text(encoding="utf-8"))
    assigned = {
        name.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    if "__all__" in assigned:
        return set(ast.literal_eval(assigned["__all__"]))
    return {
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    } | assigned.keys()


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
