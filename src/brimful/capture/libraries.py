"""Libraries do in a captured step what they do in a real one, but for writing files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brimful.capture.replaced import replaced


@contextmanager
def answers_of_a_real_step() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones while the context is open.

    For fake tensors, transformers always builds a full attention mask, while a real step first checks whether
    one is needed; and a mask rules out flash attention. The check works here too, because the values that it
    reads are known, see `brimful.capture.values.known`.

    Source: transformers.utils.import_utils, `is_tracing` and `is_fake_tensor` (checked: 5.23).
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if module is None or not hasattr(module, "is_fake_tensor"):
        yield
        return
    with replaced(module, "is_fake_tensor", lambda _tensor: False):
        yield


@contextmanager
def nothing_is_saved() -> Iterator[None]:
    """Let `torch.save` do nothing while the context is open: fake tensors have no values to write.

    It would open its file first, and so empty a checkpoint that is there. On a GPU it allocates nothing.
    """
    with replaced(torch, "save", lambda *_args, **_options: None):
        yield
