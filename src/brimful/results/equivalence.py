"""Results of comparing training under a plan with the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from brimful.codec import (
    JsonForm,
    NonNegativeFloat,
    PositiveInt,
    UnboundedNonNegativeFloat,
    from_json_document,
    json_form,
)
from brimful.utils.display import PrintedResult


def _holds(comparison: Comparison) -> bool | None:
    """Whether a comparison holds; None if it was not made."""
    return None if comparison.why_not_compared else comparison.holds


OVER_LABELS = "a mean over labels other than"
"""How `Comparison.evidence` describes a loss that ignores some labels."""
SPLITTING_WAY_OUT = (
    "The loss of the batch is not the mean of those of its parts. If it averages over something other than "
    "samples, such as unmasked tokens, pass their number: "
    'Job(count=lambda batch: batch["mask"].sum()). If it compares samples with each other, as a '
    "contrastive loss does, pass Job(embed=…, loss=lambda embeddings: …). Otherwise do not split: "
    "set micro_batch_size to the global batch size."
)
"""What a user of a `Job` does about a batch that may not be split."""
LABELS_WAY_OUT = (
    "The loss averages over the labels that it does not ignore: pass their number, as in "
    'Job(count=lambda batch: (batch["labels"] != -100).sum()). Otherwise do not split: set micro_batch_size to '
    "the global batch size."
)
"""What to do if it is known that the loss is a mean over labels."""


@json_form(
    JsonForm(derived={"holds": _holds}, order=("name", "holds"), keys={"why_not_compared": "left_out_because"})
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(PrintedResult):
    """A comparison of loss, gradients and buffers of one batch, computed in two ways."""

    name: str
    """The technique of the plan that is compared with the baseline: "recomputing", "computing the loss in
    chunks", "splitting"; "splitting, in evaluation mode" compares the loss alone, "the memory format" is of
    float64."""
    is_bitwise: bool = False
    """Whether all of them are bitwise equal."""
    largest_difference: UnboundedNonNegativeFloat = 0.0
    """Largest difference of any entry, relative to the largest entry of its tensor."""
    where: str = ""
    """Name of the tensor with that difference; empty if there is none."""
    bound: NonNegativeFloat = 0.0
    """The largest difference allowed; 0 if the plan only changes the order of operations."""
    why_not_compared: str = ""
    """Why the comparison was not made; empty if it was."""
    evidence: str = ""
    """What the loss is, if that alone shows that the two differ; else empty."""
    is_known_to_differ: bool = False
    """Whether the comparison was not made because the two are known to differ: BatchNorm over micro-batches, or
    state that a forward updates and the next one reads."""

    @property
    def holds(self) -> bool:
        """Whether the difference is within the bound, or the comparison was not made."""
        if self.evidence:
            return False
        return self.is_bitwise or bool(self.why_not_compared) or 0 < self.largest_difference <= self.bound


@json_form(JsonForm(derived={"holds": attrgetter("holds")}, order=("holds",)))
@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceReport(PrintedResult):
    """Whether training under a plan computes the same as the baseline."""

    job: str
    device: str
    """The device of the comparison, which may differ from the plan's."""
    samples: PositiveInt
    """Samples in the compared batch."""
    comparisons: tuple[Comparison, ...]

    @property
    def holds(self) -> bool:
        """Whether every comparison holds."""
        return all(comparison.holds for comparison in self.comparisons)

    @property
    def known_differences(self) -> tuple[str, ...]:
        """Why the plan is known to differ from the baseline; empty if it does not."""
        return tuple(each.why_not_compared for each in self.comparisons if each.is_known_to_differ)

    @property
    def why_split_is_unknown(self) -> str:
        """Why a split batch could not be compared with a whole one; empty if it was, or is not split."""
        made = [each for each in self.comparisons if each.name.startswith("splitting")]
        reasons = [each.why_not_compared for each in made]
        return reasons[-1] if len(made) > 1 and all(reasons) else ""

    @property
    def way_out(self) -> str:
        """Advice for comparisons that do not hold; empty if all hold."""
        failed = [comparison.name for comparison in self.comparisons if not comparison.holds]
        ways = []
        if any(name.startswith("splitting") for name in failed):
            is_over_labels = any(each.evidence == f"{OVER_LABELS} -100" for each in self.comparisons)
            ways.append(LABELS_WAY_OUT if is_over_labels else SPLITTING_WAY_OUT)
        if any(not name.startswith(("splitting", "the memory format")) for name in failed):
            ways.append(
                "A forward that depends on more than its inputs, its random numbers and its buffers cannot be "
                "recomputed. Plan without what differs: recompute='none', offload_activations=False, "
                "chunked_loss=False, optimizer_in_backward=False, prefetch_inputs=False."
            )
        if "the memory format" in failed:
            ways.append(
                "Code of the model or the loss reads tensors in the order of memory, which differs between "
                "memory formats. Plan with memory_format='preserve'."
            )
        return " ".join(ways)

    @classmethod
    def from_json(cls, document: Any, *, where: str = "the certificate") -> EquivalenceReport:
        """Read the certificate that `to_json` wrote.

        Args:
            document: As read from JSON.
            where: Names the document in errors.

        Returns:
            A certificate equal to the one written.

        Raises:
            FileFormatError: A field is unknown, missing, of another type or out of range.
        """
        return from_json_document(document, cls, where=where)
