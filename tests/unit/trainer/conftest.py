"""Tiny jobs as fixtures."""

from tests.helpers.tiny_jobs import job_with, one_thread, recompute, samples, trained

__all__ = ["job_with", "one_thread", "recompute", "samples", "trained"]
