"""Contexts in which libraries do in a captured step what they do in a real one, except for writing files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from brimful.capture.recording.facts import StepFacts
from brimful.execution.attached import ATTRIBUTES
from brimful.torch_utils.replaced import replaced


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
def quantised_weights_known() -> Iterator[None]:
    """Let peft dequantise fake weights, as DoRA does, while the context is open.

    peft knows quantised weights by the name of their class.

    Source: peft.utils.integrations, `dequantize_module_weight` (checked: 0.21).
    """
    name = "dequantize_module_weight"
    library: Any = sys.modules.get("bitsandbytes")
    loaded = [module for path, module in [*sys.modules.items()] if path.startswith("peft.")]
    users = [module for module in loaded if name in vars(module)]
    if library is None or not users:
        yield
        return
    dequantise = vars(users[0])[name]

    def dequantised(module: Any) -> Any:
        weight = module.weight
        if hasattr(weight, ATTRIBUTES) and getattr(weight, "quant_state", None) is not None:
            return library.functional.dequantize_4bit(weight.data, weight.quant_state)
        if hasattr(weight, ATTRIBUTES) and weight.dtype is torch.int8:
            scales = weight.SCB if module.state.SCB is None else module.state.SCB
            return library.functional.int8_vectorwise_dequant(weight.data, scales)
        return dequantise(module)

    with ExitStack() as stack:
        for user in users:
            stack.enter_context(replaced(user, name, dequantised))
        yield


@contextmanager
def meta_errors_unlogged() -> Iterator[None]:
    """Let torch log no traceback of an op that fails while the context is open: the error itself is raised.

    Source: torch._subclasses.fake_tensor, `log.exception` (checked: 2.13).
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def nothing_is_saved() -> Iterator[None]:
    """Let `torch.save` do nothing while the context is open: fake tensors have no values to write.

    `torch.save` would open its file first, and so empty a checkpoint that is there. On a GPU it allocates
    nothing.
    """
    with replaced(torch, "save", lambda *_args, **_options: None):
        yield


@contextmanager
def checkpoints_without_gradient_noted(facts: StepFacts) -> Iterator[None]:
    """Note reentrant checkpointing whose inputs need no gradient; torch only warns, once in a process.

    Source: torch/utils/checkpoint.py, check_backward_validity (checked: 2.13).
    """

    def noted(inputs: Iterable[Any]) -> None:
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        if not any(each.requires_grad for each in tensors):
            facts.checkpoints_without_gradient = True

    with replaced(torch.utils.checkpoint, "check_backward_validity", noted):
        yield
