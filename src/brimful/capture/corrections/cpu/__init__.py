"""Behaviour of CPU kernels that fake tensors do not show. One rule per file of the same name."""
