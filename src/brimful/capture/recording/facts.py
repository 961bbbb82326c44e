"""Facts about a step that a trace records in addition to ops and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from brimful.trace.modules import shown_module


@dataclass(slots=True)
class StepFacts:
    """Facts that are collected while a step runs, for the fields of `Trace`."""

    uncertain: dict[str, None] = field(default_factory=dict)
    """Uncertain facts, in the order of their first occurrence."""
    drawn_in: dict[str, None] = field(default_factory=dict)
    """Modules that drew numbers at random, which are taken for their means."""
    sizes_depend_on_values: bool = False
    """Whether values of the batch decided the size of anything, so that another batch may have others."""
    sizes_are_guessed: bool = False
    """Whether values that are not known decided sizes."""
    global_batch: tuple[int, ...] = ()
    """Blocks that hold the samples of the global batch."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters that backward gave no gradient."""
    checkpoints_without_gradient: bool = False
    """Whether reentrant checkpointing ran a region whose input needs no gradient."""
    host_state_bytes: int = 0
    """Optimizer state in the host's memory."""
    paged_state_bytes: int = 0
    """Optimizer state in CUDA's managed memory."""
    host_staging_bytes: int = 0
    """Pinned memory for copies between the host's memory and the device's."""

    @property
    def all_uncertain(self) -> tuple[str, ...]:
        """All uncertain facts, with one entry for all random draws."""
        if not self.drawn_in:
            return tuple(self.uncertain)
        first, *others = self.drawn_in
        modules = f" and {len(others)} more module{'s' if len(others) > 1 else ''}" if others else ""
        mean = "means" if others else "mean"
        numbers = "numbers" if others else "a number"
        its = "their" if others else "its"
        return (
            *self.uncertain,
            f"{numbers} drawn at random in {shown_path(first)}{modules}, taken for {its} {mean}",
        )

    def note(self, what: str) -> None:
        """Note what is not known for sure."""
        self.uncertain.setdefault(what)


def shown_path(module: str) -> str:
    """The path of a module in quotes, or words for what is outside of all."""
    shown = shown_module(module)
    return shown if shown != module else repr(module)
