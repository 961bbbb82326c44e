"""Which library's trainer a `Trainer` is, without importing that library.

Checked with trl 1.16 and sentence-transformers 6.2.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from transformers import Trainer

from brimful.errors import UsageError

_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers of TRL whose batches have the chosen texts in their first half, and then the rejected ones."""
_OTHERS_OF_TRL = "SFTTrainer"
_LEAST_VERSION = "5.19"
"""The first version of transformers whose `Trainer` has `loss_is_scaled_for_ga`: 5.18.0 has not, 5.19.0 has."""


def is_of_trl(trainer: Trainer, *names: str) -> bool:
    """Whether a trainer is of one of these classes of TRL, or derives from one; no names stand for all."""
    return _derives(trainer, "trl", names)


def is_of_sentence_transformers(trainer: Trainer) -> bool:
    """Whether a trainer is one of sentence-transformers', or derives from one."""
    return _derives(trainer, "sentence_transformers", ())


def has_pairs(trainer: Trainer) -> bool:
    """Whether a batch has two rows for each sample: all chosen texts, then all rejected ones."""
    return is_of_trl(trainer, *_PAIRS)


def check_kind(trainer: Trainer) -> None:
    """Raise `UsageError` for trainers whose steps cannot be read as a job.

    These do not derive from `Trainer`, are of TRL but of none of the supported classes, or have all samples of
    a batch in one row; and any trainer where the installed transformers is too old.
    """
    if not isinstance(trainer, Trainer):
        kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
        raise UsageError(
            f"this takes a transformers.Trainer, and got a {kind}, which does not derive from it. For a "
            "trainer with a loop of its own, describe its step as a bf.Job and use bf.prepare or "
            "bf.apply in the loop."
        )
    if not hasattr(trainer, "loss_is_scaled_for_ga"):
        raise UsageError(
            f"transformers {version('transformers')} is installed, whose Trainer does not report how it scales "
            f"the losses of micro-batches. Plans need {_LEAST_VERSION} or later: "
            f"pip install 'transformers>={_LEAST_VERSION},<6'."
        )
    if is_of_trl(trainer) and not is_of_trl(trainer, *_PAIRS, _OTHERS_OF_TRL):
        raise UsageError(
            f"{type(trainer).__name__} is not supported. Of TRL, plans are made for SFTTrainer, DPOTrainer and "
            "RewardTrainer: the steps of the others generate samples, or compare those of a batch."
        )
    if getattr(trainer, "padding_free", False):
        raise UsageError(
            "padding_free=True and packing with the strategy 'bfd' put all samples of a batch in one row, "
            "which a plan cannot divide. Set padding_free=False, and packing=False or "
            "packing_strategy='wrapped'."
        )


def _derives(trainer: Trainer, package: str, names: tuple[str, ...]) -> bool:
    kinds: tuple[type[Any], ...] = type(trainer).__mro__
    of_package = [kind for kind in kinds if kind.__module__.partition(".")[0] == package]
    return any(not names or kind.__name__ in names for kind in of_package)
