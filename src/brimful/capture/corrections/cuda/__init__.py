"""What CUDA does otherwise than fake tensors on a CPU. One rule a file, which has its name."""
