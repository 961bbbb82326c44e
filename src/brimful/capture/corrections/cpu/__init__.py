"""What CPU kernels do that fake tensors do not show. One rule a file, which has its name."""
