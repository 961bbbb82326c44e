"""Facts about a step that a trace records in addition to ops and memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepFacts:
    """Collected while a step runs; the fields of `Trace` of the same names."""

    uncertain: dict[str, None] = field(default_factory=dict)
    """Uncertain facts, in the order of their first occurrence."""
    sizes_depend_on_values: bool = False
    """Whether values of the batch decided the size of anything, so that another batch may have others."""
    sizes_are_guessed: bool = False
    """Whether values that are not known decided sizes."""
    global_batch: tuple[int, ...] = ()
    """Blocks that hold the samples of the global batch."""
    host_state_bytes: int = 0
    """Optimizer state in the host's memory."""
    host_staging_bytes: int = 0
    """Pinned memory between there and the device."""

    def note(self, what: str) -> None:
        """Note what is not known for sure."""
        self.uncertain.setdefault(what)
