"""Every argument of the public functions, and every field of the public records, with values of other kinds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import brimful as bf
from attacks.case import Case, FailedError, Kind, Place, check_done, check_done_or_refused, control


class _Odd:
    """Its attributes raise."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


VALUES = (
    *(
        None,
        0,
        -1,
        -(10**30),
        10**30,
        1.5,
        float("nan"),
        float("inf"),
        True,
        b"x",
        [],
        {},
        (),
        [1, 2],
        {"a": 1},
    ),
    *(
        "",
        "0",
        "-1",
        "nan",
        "no",
        "∞",
        "１２",
        "é" * 300,
        "\x00",
        "50%",
        "nan%",
        "1e999GiB",
        "10 bananas",
        "\ud800",
    ),
    *(object(), _Odd(), torch.tensor(3), torch.float16, int, len, np.int64(4), np.float32(2.0), np.True_, 1j),
    *("cuda:99", "RTX 3090", "meta", "auto", ["T4"], [None], [_Odd()], nn.Linear, {1: {}}, "../..", range(3)),
)
_MOST_EPOCHS = 3
"""Longer runs are asked for rightly, and take long."""


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def _batch(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 8), "y": torch.randint(0, 4, (samples,))}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def _job() -> bf.Job:
    return bf.Job(
        model=_network, loss=_loss, batch=_batch, data=lambda: bf.Data(train=_batch(16), validation=_batch(8))
    )


@cache
def _plan() -> bf.Plan:
    return bf.plan(_job(), "T4", global_batch_size=8)


def _usual(name: str) -> dict[str, Any]:
    """Arguments with which a call does what it is for."""
    job, settings = _job(), bf.Settings(micro_batch_size=4)
    model = _network()
    usual: dict[str, dict[str, Any]] = {
        "estimate": {"job": job, "device": "T4", "micro_batch_size": 4},
        "plan": {"job": job, "device": "T4", "global_batch_size": 8},
        "gpus": {"job": job, "global_batch_size": 4, "devices": ["T4"]},
        "fit": {"job": job, "plan": settings, "steps": 1, "show_progress": False, "device": "cpu"},
        "trainer.Trainer": {"job": job, "plan": settings, "steps": 1, "show_progress": False, "device": "cpu"},
        "measure": {"job": job, "plan": settings, "device": "cpu"},
        "verify": {"job": job, "plan": settings, "device": "cpu"},
        "api.capture_trace": {"job": job, "settings": settings, "device": "T4"},
        "api.check_plan": {"job": job, "plan": _plan(), "device": "T4"},
        "api.export": {"job": job, "plan": _plan(), "tool": "accelerate"},
        "Data": {"train": torch.zeros(8, 3)},
        "prepare": {"plan": settings, "model": model, "optimizer": torch.optim.SGD(model.parameters())},
        "apply": {
            "plan": settings,
            "job": job,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters()),
        },
        "optimizers.named_optimizer": {"name": "adamw"},
        "devices.find_device": {"name": "T4"},
        "Settings": {"micro_batch_size": 4},
        "Job": {"model": _network, "loss": _loss, "batch": _batch},
        "trainer.Schedule": {},
        "settings.UnitAction": {"fqn": "0", "action": "recompute"},
    }
    return usual[name]


CALLED = (
    *("api.check_plan", "api.export", "Data"),
    *(
        "estimate",
        "plan",
        "gpus",
        "fit",
        "trainer.Trainer",
        "measure",
        "verify",
        "api.capture_trace",
        "prepare",
    ),
    *("apply", "optimizers.named_optimizer", "devices.find_device", "Settings", "Job"),
    *("trainer.Schedule", "settings.UnitAction"),
)


def call_cases(seed: int) -> Iterator[Case]:
    """Each argument with some of the values, and text for what is true or false."""
    random = Random(f"calls {seed}")
    for name in CALLED:
        yield control(name, partial(_call, name, {}, check=check_done))
        for parameter in inspect.signature(attrgetter(name)(bf)).parameters.values():
            for number, value in enumerate(random.sample(range(len(VALUES)), 3)):
                if not _is_long(parameter.name, VALUES[value]):
                    given = partial(_call, name, {parameter.name: VALUES[value]}, check=check_done_or_refused)
                    yield Case(f"{name}({parameter.name}=…) {number}: value {value}", given)
            if isinstance(parameter.default, bool):
                yield Case(
                    f'{name}({parameter.name}="no")',
                    partial(_call, name, {parameter.name: "no"}, check=_refused),
                )
        yield Case(f"{name}(nothing_such=1)", partial(_call, name, {"nothing_such": 1}, check=_refused))
    yield Case("measure(job, device, micro_batch_size=…)", _measured_as_estimated)


def _is_long(name: str, value: object) -> bool:
    return name in ("steps", "epochs") and isinstance(value, int) and value > _MOST_EPOCHS


def _call(name: str, given: dict[str, Any], place: Place, *, check: Callable[..., None]) -> None:
    check(place.start(action=partial(_ended, lambda: attrgetter(name)(bf)(**(_usual(name) | given)))).wait())


def _ended(call: Callable[[], object]) -> None:
    """Carry out a call, or end with the error's text as a command does."""
    try:
        str(call())
    except bf.BrimfulError as error:
        print(f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        raise SystemExit(2) from None
    except TypeError as error:
        if "unexpected keyword argument 'nothing_such'" not in str(error):
            raise
        print(f"TypeError: {error}", file=sys.stderr)  # Python's own, of a record
        raise SystemExit(2) from None


def _refused(ran: Any) -> None:
    check_done_or_refused(ran)
    if ran.status == 0:
        raise FailedError(Kind.WRONG, "accepted")


def _measured_as_estimated(place: Place) -> None:
    call = partial(bf.measure, _job(), "cpu", micro_batch_size=4)  # type: ignore[call-arg]
    ran = place.start(action=partial(_ended, call)).wait()
    _refused(ran)
    if "It takes (job, plan" not in ran.err:
        raise FailedError(Kind.WRONG, ran.err[-200:])
