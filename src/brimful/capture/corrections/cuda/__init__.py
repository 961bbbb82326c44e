"""Differences between CUDA and fake tensors on a CPU. One rule per file of the same name."""
