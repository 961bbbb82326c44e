"""Built-in architectures with random weights, and the way from a name to a Job."""

from brimful.architectures.resolve import architecture_names, find_architecture, resolve_job

__all__ = ["architecture_names", "find_architecture", "resolve_job"]
