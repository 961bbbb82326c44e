"""A name → a `Job` with a built-in architecture and random weights. Start reading at `resolve.resolve_job`."""

from brimful.models.dimensions import Dimension, dimension
from brimful.models.resolve import architecture_names, find_architecture, resolve_job

__all__ = [
    "Dimension",
    "architecture_names",
    "dimension",
    "find_architecture",
    "resolve_job",
]
