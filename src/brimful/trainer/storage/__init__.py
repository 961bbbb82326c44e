"""Checkpoints, weights and the run directory. Start reading at `checkpoint`."""
