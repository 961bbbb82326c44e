"""A user's own training loop, captured as it is written: the loop, optimizers with closures, growth."""

from brimful.capture.own_loop.loop import run_loop

__all__ = ["run_loop"]
