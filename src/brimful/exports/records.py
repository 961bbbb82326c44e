"""What an export is made from, and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from brimful.settings import Settings
from brimful.utils.display import PrintedResult
from brimful.utils.files import write_file


class ExportTool(StrEnum):
    """A tool that trains by a file."""

    TRANSFORMERS = "transformers"
    """`TrainingArguments` as JSON, for `HfArgumentParser.parse_json_file`."""
    ACCELERATE = "accelerate"
    """YAML for `accelerate launch --config_file`."""
    DEEPSPEED = "deepspeed"
    """JSON for `deepspeed.initialize(config=…)`."""
    FSDP = "fsdp"
    """JSON with keyword arguments of torch's `fully_shard` (FSDP2), and the modules to call it on."""
    LIGHTNING = "lightning"
    """YAML with keyword arguments of `lightning.Trainer`, and the batch size of the data."""

    @property
    def file_name(self) -> str:
        """Default name of the file."""
        return f"brimful-{self}.{'yaml' if self in (ExportTool.ACCELERATE, ExportTool.LIGHTNING) else 'json'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A plan's settings, and what an export needs to know of the job."""

    settings: Settings
    device_kind: Literal["cuda", "cpu"]
    optimizer: str | None
    """Name of the optimizer to train with; None if a function of the job makes it."""
    counts: bool = False
    """Whether the loss is a mean over something other than samples, such as tokens (`Job.count`)."""
    sums: bool = False
    """Whether the losses of micro-batches are added (`Job.reduction`)."""
    couples: bool = False
    """Whether the loss couples all samples of the global batch (`Job.embed`)."""
    parameter_count: int = 0
    """Parameters of the model; only DeepSpeed's ZeRO needs it."""
    sharded_modules: tuple[tuple[str, str], ...] = ()
    """Under FSDP2, path and class name of each module whose parameters are gathered together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(PrintedResult):
    """A plan as a file of another tool, and what that file leaves to its user."""

    tool: ExportTool
    text: str
    """Content of the file."""
    settings: Settings
    """How a step runs in that tool: the plan's settings without those that it cannot express."""
    not_expressed: tuple[str, ...] = ()
    """What of the plan has no effect in that tool."""
    remarks: tuple[str, ...] = ()
    """What the file cannot set and you do, and what differs from the prediction."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables to set, by name."""
    budget_bytes: int | None = None
    """Bytes permitted by the plan; None before the export is predicted."""
    predicted_peak_device_bytes: int | None = None
    """Predicted with `settings`, the CUDA context included; None before the export is predicted."""

    @property
    def fits(self) -> bool | None:
        """Whether the predicted peak is within the plan's budget; None before it is predicted."""
        if self.predicted_peak_device_bytes is None or self.budget_bytes is None:
            return None
        return self.predicted_peak_device_bytes <= self.budget_bytes

    def save(self, path: Path | str) -> None:
        """Write the file.

        Args:
            path: The file; an existing one is overwritten.

        Raises:
            SaveError: The file cannot be written.
        """
        write_file(path, self.text)
