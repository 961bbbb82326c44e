"""Stack for destructors that call one another, such as those of a long autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_STACK_BYTES = 512 * 2**20


@contextmanager
def deep_stack() -> Iterator[None]:
    """Let the stack of the main thread grow to 512 MiB while the context is open, where the system permits it.

    Torch frees autograd nodes that Python has seen by recursion, about 240 bytes a node (torch 2.13). With the
    8 MiB that Linux permits by default, a chain of 34,000 nodes, such as 2,000 layers of a Llama, ends the
    process with a segmentation fault.
    """
    try:
        import resource
    except ImportError:  # Windows, where a stack has a fixed size
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
