"""Python loads this at its start, for a script that is watched and for one that is not: seeds, and a digest.

Seeds are fixed, as many scripts set none. The digest is of all parameters after each optimizer step, written to
the file that `RESULTS_DIGEST` names when Python exits. torchvision's compiled part is for another torch: the
operators that importing it asks for are declared, without a body.
"""

import atexit
import hashlib
import os
import random
from pathlib import Path

if "RESULTS_DIGEST" in os.environ:
    import numpy
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _digest, _steps = hashlib.sha256(), []

    def _after_step(optimizer, _args, _kwargs):
        _steps.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy())

    def _write():
        Path(os.environ["RESULTS_DIGEST"]).write_text(f"{len(_steps)} {_digest.hexdigest()}", encoding="utf-8")

    register_optimizer_step_post_hook(_after_step)
    atexit.register(_write)
