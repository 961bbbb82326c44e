"""What a run writes and reads: checkpoints, weights, the run directory. Start reading at `checkpoint`."""
