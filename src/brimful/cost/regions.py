"""Overhead of recomputing a region, in addition to its ops: Python code around `torch.utils.checkpoint`."""

from __future__ import annotations

from brimful.devices import Device

SAVED_OP_SECONDS = 16e-6
"""Host time that saving results of some ops of a region adds per op of its forward, saved or not: two dispatch
modes see each, in the forward and in the recomputation.

Measured: 32 linear layers of 16 with tanh, one region with and without the modes (3.42 and 2.39 ms); torch
2.13, 2 cores of an AMD EPYC (family 25). With 8 layers it was 19 µs.
"""

COPY_SECONDS = 35e-6
"""Host time of an op that begins a copy to or from the host, with its share of what autograd's hooks take for
the tensors that a unit saves.

Measured: 9 units of 2, 8 and 16 linear layers of 16 with tanh, 8 of them offloaded and none, on a CPU, where
the copies themselves are next to nothing: 43 to 82 µs for a copy and its way back; torch 2.13, 2 cores of an
AMD EPYC (family 25), not idle. What CUDA's streams and events add is not measured.
"""


NESTED_FORWARD_SECONDS = 90e-6
"""Host time of a forward that runs again for a nested unit, beside its ops, with linking the two regions.

Measured: 32 units of two linear layers of 16 with tanh, all recomputed, and one segment of them, less 31 plain
forwards (77 to 113 µs in three rounds; a region took 360 µs); torch 2.13, 2 cores of an AMD EPYC (family 25),
not idle.
"""


def saving_seconds(op_count: int) -> float:
    """Host seconds that saving some results adds to one recomputed region, beside `region_seconds`.

    `op_count` has the ops of the region's forward, without those that only make views.
    """
    return op_count * SAVED_OP_SECONDS


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
