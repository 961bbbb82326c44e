"""A whole training run, predicted from one step of it: steps, hours, speed and cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Unpack

from brimful.errors import UsageError
from brimful.options import RunLength, RunLengthKeywords, takes_options
from brimful.settings import Settings
from brimful.utils.display import PrintedResult

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun(PrintedResult):
    """A whole training run, each of whose steps takes the predicted time.

    Each epoch ends with a smaller step if the global batch does not divide its samples; it counts as a whole
    one. Waiting for data, evaluation and checkpoints are not included.
    """

    epochs: int | None
    """None if the length was given in samples or tokens."""
    samples: int
    """Samples in all."""
    tokens: int | None
    """Tokens in all, padding included; None if the tokens of a sample are not known."""
    steps: int
    """Optimizer steps."""
    global_batch_size: int
    world_size: int
    """Devices that train together."""
    predicted_seconds: float
    predicted_seconds_interval: tuple[float, float] | None
    """Covers the measured time with 90 % probability; None if that of a step is not known."""
    predicted_samples_per_second: float
    predicted_tokens_per_second: float | None
    price_per_hour: float | None
    """Price of one device, in any currency; None without a price."""

    @property
    def predicted_cost(self) -> float | None:
        """Price of all devices for the predicted time; None without a price."""
        return self._cost(self.predicted_seconds)

    @property
    def predicted_cost_interval(self) -> tuple[float, float] | None:
        """The cost at both ends of the predicted time; None without a price or an interval."""
        if self.price_per_hour is None or self.predicted_seconds_interval is None:
            return None
        shortest, longest = map(self._cost, self.predicted_seconds_interval)
        assert shortest is not None
        assert longest is not None
        return shortest, longest

    def _cost(self, seconds: float) -> float | None:
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.world_size * seconds / SECONDS_PER_HOUR


class PredictedStep(Protocol):
    """The prediction of a step."""

    @property
    def settings(self) -> Settings:
        """How the step runs."""

    @property
    def predicted_step_seconds(self) -> float:
        """The time of the step."""

    @property
    def predicted_step_seconds_interval(self) -> tuple[float, float] | None:
        """Covers the measured time with 90 % probability."""

    @property
    def tokens_per_sample(self) -> float | None:
        """Tokens of each sample, padding included; None if they are not known."""


class PredictsRuns(PrintedResult):
    """The prediction of a step, from which that of a whole run follows."""

    __slots__ = ()

    @takes_options(RunLength, RunLengthKeywords)
    def predict_run(
        self: PredictedStep, *, price_per_hour: float | None = None, **length: Unpack[RunLengthKeywords]
    ) -> WholeRun:
        """Predict a whole training run: optimizer steps, time, speed and cost.

        Waiting for data, evaluation and checkpoints are not included.

        Args:
            price_per_hour: Price of one device, for the cost.
            **length: The fields of `RunLength`, of which epochs, samples or tokens is given.

        Returns:
            The run, which prints in a few lines.

        Raises:
            UsageError: No length or several are given, the tokens of a sample are not known, or the price is
                negative.
        """
        return whole_run(
            RunLength(**length),
            self.settings,
            step_seconds=self.predicted_step_seconds,
            step_seconds_interval=self.predicted_step_seconds_interval,
            tokens_per_sample=self.tokens_per_sample,
            price_per_hour=price_per_hour,
        )


def whole_run(
    length: RunLength,
    settings: Settings,
    *,
    step_seconds: float,
    step_seconds_interval: tuple[float, float] | None,
    tokens_per_sample: float | None,
    price_per_hour: float | None,
) -> WholeRun:
    """A run of some length, each of whose steps takes the same time.

    Raises `UsageError` as `PredictsRuns.predict_run` does.
    """
    length.check()
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise UsageError(f"price_per_hour is {price_per_hour}; it must be a number from 0 on.")
    batch, each = settings.global_batch_size, tokens_per_sample
    samples, steps = _samples_and_steps(length, batch, each)
    interval = step_seconds_interval
    return WholeRun(
        epochs=length.epochs,
        samples=samples,
        tokens=length.tokens if each is None or length.tokens else round(samples * each),
        steps=steps,
        global_batch_size=batch,
        world_size=settings.world_size,
        predicted_seconds=steps * step_seconds,
        predicted_seconds_interval=None if interval is None else (steps * interval[0], steps * interval[1]),
        predicted_samples_per_second=batch / step_seconds,
        predicted_tokens_per_second=None if each is None else each * batch / step_seconds,
        price_per_hour=price_per_hour,
    )


def _samples_and_steps(length: RunLength, batch: int, tokens_per_sample: float | None) -> tuple[int, int]:
    """Samples and optimizer steps of a run. An epoch ends with a smaller step, as in the trainer."""
    if length.epochs is not None:
        assert length.dataset_size is not None
        return length.epochs * length.dataset_size, length.epochs * -(-length.dataset_size // batch)
    samples = length.samples
    if samples is None:
        assert length.tokens is not None
        if not tokens_per_sample:
            raise UsageError(
                "a run in tokens needs to know the tokens of a sample: from `input_ids` in the batch, or from "
                'Job(count=…, counted="tokens"). This job has neither. Give samples or epochs.'
            )
        samples = math.ceil(length.tokens / tokens_per_sample)
    return samples, -(-samples // batch)
