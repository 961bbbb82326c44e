"""Which published builds of torch have kernels for a GPU."""

from __future__ import annotations

from brimful.devices.device import Device

CHECKED_TORCH = "2.13"
NEWEST_BUILDS_FROM = (7, 5)
"""Least compute capability of torch's builds for CUDA 12.9, 13.0 and 13.2."""
OLDEST_BUILD_FROM = (5, 0)
"""Least compute capability of torch's builds for CUDA 12.6. Source of both: torch/cuda/__init__.py,
PYTORCH_RELEASES_CODE_CC (torch 2.13). Torch 1.12 has 3.7 too (pytorch's RELEASE.md, TORCH_CUDA_ARCH_LIST)."""


def torch_builds_note(device: Device) -> str | None:
    """What to know about torch's builds before training on a GPU.

    Args:
        device: Any device.

    Returns:
        A sentence if no build of torch 2.13, or only that for CUDA 12.6, has kernels for it; else None.
    """
    capability = device.compute_capability
    if capability is None or capability >= NEWEST_BUILDS_FROM:
        return None
    which = f"{device.name} has compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST_BUILD_FROM:
        return (
            f"{which}, and no build of torch {CHECKED_TORCH} has kernels below 5.0: training on it needs an "
            "old torch, such as 1.12, whose memory and time differ from what is predicted here."
        )
    return (
        f"{which}: of the builds of torch {CHECKED_TORCH} only that for CUDA 12.6 has kernels for it "
        "(--index-url https://download.pytorch.org/whl/cu126)."
    )


def cannot_run_torch(device: Device) -> bool:
    """Whether no build of the checked torch has kernels for a GPU."""
    return device.compute_capability is not None and device.compute_capability < OLDEST_BUILD_FROM
