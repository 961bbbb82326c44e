"""Lines of the user's code, or of a library's, as people name them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

_PACKAGE = Path(__file__).parents[1]
_OWN_FOLDER, _OWN_MODELS = f"{_PACKAGE.as_posix()}/", f"{(_PACKAGE / 'models').as_posix()}/"
_CAPTURE_FILE = str(_PACKAGE / "capture" / "step.py")
"""Where capturing begins; callers of it are not part of the step."""
_TORCH_FOLDER = f"{Path(torch.__file__).parent.as_posix()}/"
_PYTHON_FOLDER = f"{Path(contextlib.__file__).parent.as_posix()}/"
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def calling_line() -> str:
    """The innermost calling line of the user's or a library's code, as "file.py:12"; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CAPTURE_FILE:
        name = shown_file(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def calling_lines() -> tuple[str, ...]:
    """The innermost calling line, and those of the user's own code around it, the innermost first."""
    own = [
        f"{shown_file(each.f_code.co_filename)}:{number}"
        for each, number in walk_stack(sys._getframe(1))
        if is_users_own(each.f_code.co_filename)
    ]
    return tuple(dict.fromkeys((calling_line(), *own)))


def defining_line(function: Any) -> str:
    """Where a function of the user's or a library's is defined, as "file.py:12"; "" for another's."""
    code: Any = getattr(function, "__code__", None)
    name = "" if code is None else shown_file(code.co_filename)
    return f"{name}:{code.co_firstlineno}" if name else ""


def is_users_own(file: str) -> bool:
    """Whether a source file is the user's: not of torch, Python, brimful or a package that is installed."""
    return bool(shown_file(file)) and not _is_installed(file.replace(os.sep, "/"))


def _is_installed(file: str) -> bool:
    return any(f"/{name}/" in file for name in _PACKAGE_FOLDERS)


def innermost_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The last line of the user's or a library's code, as "file.py:12"; "" if there is none.

    `frames` are running functions, outermost first, with their lines, as `traceback.walk_tb` gives them.
    """
    lines = [f"{name}:{number}" for each, number in frames if (name := shown_file(each.f_code.co_filename))]
    return lines[-1] if lines else ""


@cache
def shown_file(file: str) -> str:
    """A source file as people name it; "" for torch, Python and brimful but for the models it brings."""
    name = file.replace(os.sep, "/")
    is_own = name.startswith(_OWN_FOLDER) and not name.startswith(_OWN_MODELS)
    is_python = name.startswith(_PYTHON_FOLDER) and not _is_installed(name)
    if is_own or is_python or name.startswith(("<", _TORCH_FOLDER)):
        return ""
    path = Path(file)
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return str(path)
    for folder in map(Path, sys.path):
        if folder.name in _PACKAGE_FOLDERS and path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
