"""Overhead of recomputing a region, in addition to its ops: Python code around `torch.utils.checkpoint`."""

from __future__ import annotations

from brimful.devices import Device
from brimful.settings import Action
from brimful.trace import Phase, Trace, unit_of_each_op

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


def ops_seen_by_saving(trace: Trace) -> list[bool]:
    """Whether each op of a trace runs in the forward of a unit of which some results are saved.

    False for ops that are run again.
    """
    saving = [unit.fqn for unit in trace.settings.units if unit.action is Action.SAVE]
    if not saving:
        return [False] * len(trace.ops)
    units = unit_of_each_op(trace, saving)
    return [unit >= 0 and op.phase is Phase.FORWARD for op, unit in zip(trace.ops, units, strict=True)]


def saving_seconds(device: Device, op_count: int) -> float:
    """Host seconds that saving some results adds to one recomputed region, beside `region_seconds`.

    Two dispatch modes see each op, saved or not: one in the forward, one in the recomputation. `op_count` is
    the number of ops of the region's forward, without those that only make views.
    """
    return op_count * sum(device.dispatch.selective_seconds)


def region_seconds(device: Device, *, stashes_rng: bool = True) -> float:
    """Host seconds that one recomputed region adds to a micro-batch, beside those of its ops.

    On a CPU all of it delays the step. On CUDA the kernels already queued hide it as long as the host is ahead
    of the GPU; `step_seconds` counts what is left. The host of a device that is not calibrated is taken to be
    as fast as the one measured.
    """
    generators = (2 if device.kind == "cuda" else 1) if stashes_rng else 0
    return device.dispatch.region_seconds + generators * device.dispatch.rng_stash_seconds
