"""Make the C library keep freed memory, so that a training step on a CPU reuses the pages of the last one.

By default, the GNU C library's malloc, from which torch allocates CPU tensors, returns large freed blocks to
the operating system: those above a threshold of at most 32 MiB, and the end of its heap. The next step then
pays a page fault for every 4 KiB of them, in which the kernel clears the page: a fifth of the time of a step of
BERT's layers on two cores (benchmarks/results/host_allocator.json).

Source: mallopt(3) of the Linux manual, and malloc/malloc.c of glibc 2.36.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h."""
_NEVER_TRIM = -1
_NO_BLOCKS_OF_THEIR_OWN = 0

_USERS_OPTIONS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables by which a user configures what is configured here."""


@cache
def keep_freed_memory() -> bool:
    """Configure malloc for the whole process to serve all blocks from its heap, and never to shrink that.

    The process's peak does not change; what it has freed stays with it until it ends. Returns whether malloc is
    configured so: not if the user configured it by an environment variable, nor without the GNU C library.
    """
    is_configured = any(name in os.environ for name in _USERS_OPTIONS)
    if is_configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # AttributeError with another C library
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl, Windows
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)) and bool(mallopt(_MMAP_MAX, _NO_BLOCKS_OF_THEIR_OWN))
