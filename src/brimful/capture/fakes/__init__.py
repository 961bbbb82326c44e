"""Fake tensors: a job's model without weights, stand-ins for real tensors, and the results of ops on them."""
