"""Advice where a step failed because the job's loss expects other arguments than it is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from brimful.job import Job
from brimful.torch_utils.lines import defining_line

_OF_TORCH = ("torch.nn.modules", "torch.nn.functional", "torch._C")
"""Modules of torch that define losses of an output and a target."""
_NOT_A_MODEL = {
    "batch", "data", "input", "inputs", "logits", "output", "outputs", "pred", "preds", "prediction",
    "predictions", "x", "y_hat", "y_pred",
}  # fmt: skip
"""Names of a first parameter that is not meant to be the model: a choice."""
_NOT_A_BATCH = {"label", "labels", "model", "module", "net", "network", "target", "targets", "y", "y_true"}
"""Names of a second parameter that is not meant to be the batch: a choice."""


def signature_hint(job: Job, error: BaseException) -> str:
    """Advice on how the loss is called, if a step failed in a loss that seems to expect other arguments.

    Returns "" if the step failed elsewhere, if nothing speaks for a wrong signature, or if the job has its own
    loop.
    """
    if job.loop is not None or not _came_through(error, job.loss):
        return ""
    found = _suspicious(job)
    if found is None:
        return ""
    if job.embed is not None:
        return f"`loss` is called as loss(embeddings), and the loss of {job.name!r} is {found}."
    return (
        f"`loss` is called as loss(model, batch), and the loss of {job.name!r} is {found}. For example: "
        "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])."
    )


def _suspicious(job: Job) -> str | None:
    """A description of the loss, if it does not seem to be a function of the model and the batch."""
    loss = inspect.unwrap(job.loss)
    if (getattr(loss, "__module__", None) or "").startswith(_OF_TORCH):
        return f"{type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__} of torch"
    if isinstance(loss, nn.Module):
        loss = loss.forward
    names = _parameter_names(loss)
    if job.embed is not None or len(names) < len(("model", "batch")):
        return None
    if names[0].lower() in _NOT_A_MODEL or names[1].lower() in _NOT_A_BATCH:
        line = defining_line(loss)
        return f"a function of ({', '.join(names)}){f' ({line})' if line else ''}"
    return None


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one written in C
        return []
    return [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]


def _came_through(error: BaseException, loss: Callable[..., Any]) -> bool:
    """Whether the loss raised the error, or what it called; true for a loss without Python code."""
    codes = set(_codes(inspect.unwrap(loss)))
    traceback = error.__traceback__
    while traceback is not None and codes:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return not codes


def _codes(function: Any) -> Iterator[CodeType]:
    """The Python code of a function, a method, or a module's forward."""
    if isinstance(function, nn.Module):
        function = function.forward
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is not None:
        yield code
