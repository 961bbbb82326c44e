"""Training scripts of public repositories as jobs, and what becomes of one."""

from public import graphs, images, points, sequences, sounds, tables, texts  # noqa: F401  # each adds its own
from public.case import SCRIPTS, Script, imported_from

__all__ = ["SCRIPTS", "Script", "imported_from"]
