"""The first forwards of `model.generate` of transformers on fake tensors → `Trace`.

The library's own code runs: it decides which logits are computed, what is copied to float32, and how the cache
grows and follows the beams. It is stopped after some forwards, or when it has all tokens.

Private API used here: `GenerationMixin._beam_search_has_unfinished_sequences` (checked: transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from brimful.capture.recording.recorder import Recorder
from brimful.capture.recording.update import Recorded
from brimful.capture.step import capture_inference
from brimful.capture.step_part import recorded_by
from brimful.devices import Device
from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.torch_utils.replaced import replaced
from brimful.trace import Phase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCapture:
    """Captures a generation, greedy or with beams, for any micro-batch size.

    The batch of `job` is `input_ids` alone. Sequences end after `new_tokens`, as if no token ended them.
    """

    job: Job
    device: Device
    new_tokens: int
    num_beams: int
    forwards: int
    """Forwards to capture, of the `new_tokens` that there are."""
    cache_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Bytes of the key/value cache after each captured forward, by micro-batch size."""

    def __call__(self, settings: Settings) -> Trace:
        """The trace, whose `step` counts forwards; CaptureError if they cannot run on fake tensors."""
        noted: list[_Forwards] = []

        def run(model: nn.Module, batch: Batch, recorder: Recorder) -> Recorded:
            noted.append(_Forwards(recorder, self.forwards))
            generator = _generator(model)
            with noted[-1].of(generator), _beams_go_on(generator):
                self._generate(model, batch)
            return noted[-1].recorded or recorded_by(recorder)

        trace = capture_inference(self.job, settings, self.device, run)
        self.cache_bytes[settings.micro_batch_size] = tuple(noted[-1].cache_bytes)
        return trace

    def cache_bytes_at(self, micro_batch_size: int) -> tuple[int, ...]:
        """Bytes of the cache after each captured forward for any size, as one was captured."""
        captured, sizes = next(iter(self.cache_bytes.items()))
        return tuple(size_bytes * micro_batch_size // captured for size_bytes in sizes)

    def _generate(self, model: Any, batch: Batch) -> None:
        for module in model.modules():
            if getattr(module, "generation_config", None) is not None:
                module.generation_config.eos_token_id = None
        model.generate(
            **batch,
            max_new_tokens=self.new_tokens,
            num_beams=self.num_beams,
            do_sample=False,
            use_cache=True,
        )


def check_generates(model: Any, job: str) -> None:
    """Raise `UsageError` if a model has no `generate` of transformers, or none that its head can serve."""
    can = getattr(model, "can_generate", None)
    if not callable(getattr(model, "generate", None)) or (callable(can) and not can()):
        raise UsageError(
            f"{job!r} is a {type(model).__name__}, which does not generate text: it has no generate() of "
            "transformers. Give a causal language model or an encoder-decoder, such as gpt2, llama-3.2-1b or "
            "t5-small, or leave new_tokens (--new-tokens) out to predict a training step."
        )


def _generator(model: nn.Module) -> nn.Module:
    """The model whose forwards `generate` calls: of peft's, the one with the adapters."""
    return next((each for each in model.modules() if hasattr(type(each), "can_generate")), model)


class _EnoughError(Exception):
    """All forwards that are captured have run."""


class _Forwards:
    """Counts the forwards of a model as steps, notes the cache after each, and ends after the last."""

    def __init__(self, recorder: Recorder, most: int) -> None:
        self._recorder, self._most = recorder, most
        self.cache_bytes: list[int] = []
        self.recorded: Recorded | None = None
        """What was recorded until the end; None if the last token ended the generation."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Follow a model while the context is open, which is left after the last forward."""
        handles = model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)
        try:
            yield
        except _EnoughError:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, *_given: Any) -> None:
        if len(self.cache_bytes) == self._most:
            self.recorded = recorded_by(self._recorder)  # before this error releases what the loop holds
            raise _EnoughError
        self._recorder.position.enter(Phase.EVALUATION, 0, len(self.cache_bytes))

    def _after(self, _module: nn.Module, _given: Any, output: Any) -> None:
        cache = getattr(output, "past_key_values", None)
        self.cache_bytes.append(0 if cache is None else _cache_bytes(cache))


def _beams_go_on(model: nn.Module) -> Any:
    """Let a search of beams go on: whether better ones can come depends on scores, which are not known."""
    name = "_beam_search_has_unfinished_sequences"
    owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
    return nullcontext() if owner is None else replaced(owner, name, staticmethod(lambda *_, **__: True))


def _cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache of transformers; of a decoder, those of the encoder included."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = [getattr(cache, name) for name in names] if hasattr(cache, names[0]) else [cache]
    layers = [layer for part in parts for layer in getattr(part, "layers", ())]
    return sum(value.nbytes for layer in layers for value in vars(layer).values() if isinstance(value, Tensor))
