"""When Python looks for reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from brimful.utils.one_at_a_time import one_at_a_time


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector while the context is open.

    A capture must not depend on when cycles are collected. And traces are hundreds of thousands of small
    records without cycles, which the collector would scan repeatedly: planning a Llama of 100 layers, without
    captures, took 14.1 to 16.0 s of CPU time with the collector and 9.6 s without it.

    Other threads that do so wait: only one captures at a time.
    """
    with one_at_a_time():
        if not gc.isenabled():
            yield
            return
        with one_at_a_time(undo=gc.enable):
            gc.disable()
            try:
                yield
            finally:
                gc.enable()
