"""The version of torch whose kernels are assumed: the one that captures."""

from __future__ import annotations

import re

import torch


def torch_version() -> tuple[int, int]:
    """Major and minor number of torch's version."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)
