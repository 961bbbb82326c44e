"""Values that some fake tensors stand for: those of the batch and buffers, and what is computed from them."""
