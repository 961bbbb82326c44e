"""What an entry of the zoo of jobs is, and how one is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from brimful.job import Job

SPLIT = "is NOT the same training"
"""Of the sentence that refuses to split a batch whose loss is not made of the losses of its parts. As one
micro-batch it is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCase:
    """A whole small job, as a user writes it, and what is expected of it."""

    name: str
    kind: str
    job: Callable[[], Job]
    samples: int
    """In the global batch."""
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    budget: str = "60%"
    """Of the baseline's peak, to plan within."""
    refused: str = ""
    """A part of the sentence with which brimful refuses it; empty if it is supported."""
    is_warned: bool = False
    """Whether brimful trains it split and warns that the loss may not be that of the whole batch."""
    named: str = ""
    """Why a prediction is more than 1 % off; empty if none is."""
    gpu: str = ""
    """A GPU that it is predicted for, where it cannot run on a CPU; there is no truth then."""

    @property
    def missing(self) -> str:
        """The first package it needs that is not installed; empty if all are."""
        return next((package for package in self.needs if find_spec(package) is None), "")


JOBS: list[JobCase] = []
"""All entries, in the order in which their modules are imported."""


def job_case(
    samples: int,
    *,
    needs: tuple[str, ...] = (),
    budget: str = "60%",
    refused: str = "",
    is_warned: bool = False,
    named: str = "",
    gpu: str = "",
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Add a function that makes a job to the zoo, under its own name; the arguments are `JobCase`'s."""

    def add(function: Callable[[], Job]) -> Callable[[], Job]:
        case = JobCase(
            name=function.__name__.replace("_", " "),
            kind=function.__module__.rpartition(".")[2].replace("_", " "),
            job=function,
            samples=samples,
            needs=needs,
            budget=budget,
            refused=refused,
            is_warned=is_warned,
            named=named,
            gpu=gpu,
        )
        JOBS.append(case)
        return function

    return add
