"""Tiny jobs as fixtures."""

from helpers.tiny_jobs import job_with, one_thread, recompute, samples, trained

__all__ = ["job_with", "one_thread", "recompute", "samples", "trained"]
