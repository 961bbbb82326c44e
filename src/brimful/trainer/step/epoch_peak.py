"""The peak memory of the epoch in progress."""

from __future__ import annotations

import torch

from brimful.profiling import PeakMemory, larger_peak
from brimful.profiling.cuda_memory import process_device_bytes


class EpochPeak:
    """The peak memory of an epoch: on CUDA of all that runs, on a CPU of the steps that are measured.

    CUDA's counters of the peak are reset for each epoch and, within it, to measure a step: `before_reset` keeps
    what they have counted. Reading and resetting them does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak: PeakMemory | None = None
        self._is_whole = False
        self._earlier_reserved_bytes = 0
        """The peak of reserved bytes in the epochs before."""

    def begin(self, *, is_whole: bool) -> None:
        """Count from here; `is_whole` is whether the epoch begins here too, as it does unless it is resumed."""
        if self._peak is not None:
            self._earlier_reserved_bytes = max(self._earlier_reserved_bytes, self._peak.reserved_bytes)
        self._peak, self._is_whole = None, is_whole
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def before_reset(self) -> None:
        """Keep the peak that CUDA has counted, before its counters are reset."""
        if self._device.type == "cuda":
            self.add(
                PeakMemory(
                    allocated_bytes=torch.cuda.max_memory_allocated(self._device),
                    reserved_bytes=torch.cuda.max_memory_reserved(self._device),
                )
            )

    def add(self, peak: PeakMemory) -> None:
        """Add what was measured."""
        self._peak = larger_peak(self._peak, peak)

    @property
    def run_reserved_bytes(self) -> int:
        """The peak of reserved bytes in the steps so far, whatever was reset."""
        self.before_reset()
        return max(self._earlier_reserved_bytes, 0 if self._peak is None else self._peak.reserved_bytes)

    def found(self) -> PeakMemory | None:
        """The peak of the epoch; None if it is not known: the epoch was resumed, or no step was measured."""
        self.before_reset()
        if self._peak is None or not self._is_whole:
            return None
        if self._device.type == "cuda" and (process_bytes := process_device_bytes(self._device)) is not None:
            # The driver reports current memory, which differs from that of the peak by the allocator's.
            context_bytes = process_bytes - torch.cuda.memory_reserved(self._device)
            self._peak.device_bytes = context_bytes + self._peak.reserved_bytes
        return self._peak
