"""Lets torchvision be imported where its compiled part is for another torch: importing this file does it.

Its models need none of its operators, but importing it gives fake forms to some that the compiled part would
have declared. So, if that part is missing, they are declared here, without a body. It must happen before
transformers is imported, which looks for torchvision too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []
"""Owns the declarations: they are gone with it."""


def why_not_imported(package: str) -> str | None:
    """Why a package cannot be imported; None if it can."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]


if importlib.util.find_spec("torchvision") is not None and "nms" in (why_not_imported("torchvision") or ""):
    _declare_operators()
