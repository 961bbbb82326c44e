"""What recomputing a region costs beside its ops: Python's work around `torch.utils.checkpoint`."""

from __future__ import annotations

from brimful.hardware import Device


def region_seconds(device: Device, *, stashes_rng: bool = True) -> float:
    """Host seconds that one recomputed region adds to a micro-batch.

    On a CPU all of it delays the step. On CUDA the kernels already queued hide it as long as the host is ahead
    of the GPU; `step_seconds` counts what is left.

    Args:
        device: Where the region runs; not calibrated, its host is taken to be as fast as the one measured.
        stashes_rng: Whether the random state is kept for the recomputation.

    Returns:
        Seconds, beside those of the region's ops.
    """
    generators = (2 if device.kind == "cuda" else 1) if stashes_rng else 0
    return device.dispatch.region_seconds + generators * device.dispatch.rng_stash_seconds
