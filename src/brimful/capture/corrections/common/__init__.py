"""Differences between a capture and a real step on any device. One rule per file of the same name."""
