"""Which of several processes that a launcher started this is, known without torch."""

from __future__ import annotations

import os

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables by which torchrun, Open MPI, MPICH and `srun` number processes; torchrun may be started by srun."""


def is_first_rank() -> bool:
    """Whether this is the first rank, or the only one."""
    ranks = (value for name in _RANKS if (value := os.environ.get(name)))
    return next(ranks, "0") == "0"
