"""How a capture differs from a real step on any device. One rule a file, which has its name."""
