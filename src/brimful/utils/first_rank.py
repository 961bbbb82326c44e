"""Which of several processes that a launcher started this is, known without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables by which torchrun, Open MPI, MPICH and `srun` number processes; torchrun may be started by srun."""


def is_first_rank() -> bool:
    """Whether this is the first rank, or the only one."""
    return next(_numbers(_RANKS), "0") == "0"


def srun_task() -> str:
    """The number of a task that `srun` alone numbers, and that may be a run of its own; "" for the first."""
    *others, of_srun = _RANKS
    number = "0" if any(_numbers(others)) else next(_numbers([of_srun]), "0")
    return "" if number == "0" else number


def _numbers(names: Iterable[str]) -> Iterator[str]:
    return (value for name in names if (value := os.environ.get(name)))
