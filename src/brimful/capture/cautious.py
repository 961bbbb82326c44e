"""Captures for plans: where sizes are guessed, with the guess that takes more memory."""

from __future__ import annotations

from brimful.capture.step import capture_step
from brimful.devices import Device
from brimful.errors import CaptureError
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.settings import Settings
from brimful.trace import Guess, Trace


class CautiousCapture:
    """Captures steps with even choices, or with the most uneven ones if the first settings need more with them.

    Which of the two takes more memory depends on the allocator: an uneven choice gathers more rows at once, an
    even one leaves gaps between many blocks of one size. All settings get one guess, so that they can be
    compared.
    """

    def __init__(self, job: Job, device: Device) -> None:
        self._job = job
        self._device = device
        self._guess: Guess | None = None

    def __call__(self, settings: Settings, steps: int = 2) -> Trace:
        """Capture optimizer steps under some settings.

        Raises `CaptureError` if they cannot be run on fake tensors.
        """
        if self._guess is not None:
            return self._capture(settings, steps, self._guess)
        expected = self._capture(settings, steps, Guess.EXPECTED)
        if not expected.sizes_are_guessed:
            return expected
        try:
            most = self._capture(settings, steps, Guess.MOST)
        except CaptureError:  # code may want an even number of rows for each expert
            self._guess = Guess.EXPECTED
            return expected
        largest = max(expected, most, key=lambda trace: predict_memory(trace).peak_reserved_bytes)
        self._guess = largest.guess
        return largest

    def _capture(self, settings: Settings, steps: int, guess: Guess) -> Trace:
        return capture_step(self._job, settings, self._device, steps=steps, guess=guess)
