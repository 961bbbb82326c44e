"""Lets torchvision be imported beside a build of torch for which there is none: importing this file does it.

torchvision's models need none of its compiled operators, but importing it registers their fake forms. So the
operators are declared first, without a body. It must happen before transformers is imported, which looks for
torchvision too.
"""

from __future__ import annotations

import torch

_OPERATORS = ("nms", "qnms")

library = torch.library.Library("torchvision", "FRAGMENT")  # keeps what is declared
"""Owns the declarations."""
for _name in _OPERATORS:
    if not hasattr(torch.ops.torchvision, _name):
        library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
