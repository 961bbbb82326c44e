"""Recurrent layers in cuDNN: one op, its two buffers, and packed sequences."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from brimful.capture.corrections.cuda.cudnn_rnn import RnnSizes, reserve_bytes, workspace_bytes
from brimful.settings import Precision
from brimful.trace import Category, Phase, Trace
from brimful.utils.quantities import MIB
from helpers.captured_jobs import A100, capture, job, made_by, ops

# B micro-batch, T sequence, I input size, H hidden size

LSTM, GRU = 2, 3
SAMPLES, STEPS, INPUTS, HIDDEN = 8, 12, 10, 16


def sizes(mode: int, *, steps: int, samples: int, hidden: int, inputs: int, **others: Any) -> RnnSizes:
    values = {
        "layers": 1,
        "directions": 1,
        "projected_size": 0,
        "has_dropout": False,
        "element_bytes": 4,
    } | others
    gates = {LSTM: 4, GRU: 3}[mode] * hidden * values["directions"]
    deeper = (values["layers"] - 1) * gates * (hidden * values["directions"] + hidden)
    matrices = gates * (inputs + hidden) + deeper
    return RnnSizes(
        mode=mode,
        steps=steps,
        samples=samples,
        hidden_size=hidden,
        matrix_bytes=matrices * values["element_bytes"],
        **values,
    )


def test_the_reserve_is_what_public_logs_show() -> None:
    """pytorch issue 2895 (P100): 4 layers of 320 on 25,000 steps; deepspeech.pytorch issue 172 (V100): one of
    800 in both directions on 326 · 64 steps."""
    deep: dict[str, Any] = {"steps": 25000, "samples": 25, "hidden": 320, "inputs": 123, "layers": 4}
    assert reserve_bytes(sizes(LSTM, **deep))[0] == 736_000_000
    assert reserve_bytes(sizes(GRU, **deep))[0] == 864_000_000
    both = sizes(GRU, steps=326 * 64, samples=64, hidden=800, inputs=672, directions=2)
    assert reserve_bytes(both)[0] == 801_177_600


@pytest.mark.parametrize(
    ("mode", "layers", "measured"),
    [(LSTM, 1, 113.38), (LSTM, 2, 146.5), (GRU, 1, 110.63), (GRU, 2, 125.25)],
)
def test_the_workspace_is_at_most_a_sixth_larger_on_an_h100(mode: int, layers: int, measured: float) -> None:
    """benchmarks/results/gpu_record.json: MiB for 128 steps of 64 samples, 512 to 512, cuDNN 9.19."""
    shape: dict[str, Any] = {"steps": 128 * 64, "samples": 64, "hidden": 512, "inputs": 512, "layers": layers}
    likely, most = workspace_bytes(sizes(mode, **shape))
    assert likely <= measured * MIB <= most
    assert likely > measured * MIB * 5 / 6


def test_the_workspace_is_that_of_public_logs_and_six_outputs() -> None:
    """cuDNN 6 and 7 took two outputs in both directions, else none."""
    deep: dict[str, Any] = {"steps": 25000, "samples": 25, "hidden": 320, "inputs": 123, "layers": 4}
    output = 25000 * 320 * 4
    assert workspace_bytes(sizes(LSTM, **deep))[0] == 17_730_560 + 6 * output
    for inputs, logged in ((672, 313_344_000), (800, 315_801_600)):
        both = sizes(GRU, steps=326 * 64, samples=64, hidden=800, inputs=inputs, directions=2)
        assert workspace_bytes(both)[0] == logged + 4 * 326 * 64 * 800 * 2 * 4
    likely, most = workspace_bytes(sizes(GRU, **deep))
    assert (
        likely == 13_169_920 + 6 * output + 4 * 12 * 25 * 320 * 4
    )  # which says 32 states where the others say 44
    assert most == likely + 2 * output


def test_what_is_not_known_of_a_reserve_is_a_state_for_each_layer_and_the_dropped_elements() -> None:
    shape: dict[str, Any] = {"steps": 100, "samples": 10, "hidden": 32, "inputs": 8, "layers": 3}
    state = 100 * 32 * 4
    likely, most = reserve_bytes(sizes(LSTM, **shape))
    assert (likely, most) == ((15 + 2) * state, (15 + 2 + 3) * state)
    assert reserve_bytes(sizes(LSTM, **shape, has_dropout=True)) == (
        likely + 2 * 100 * 32 // 8,
        most + 2 * state,
    )
    projected = reserve_bytes(sizes(LSTM, **shape, projected_size=8))[0]
    assert projected == 15 * state + (2 + 3) * 100 * 8 * 4


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def trained(layer: Any, *, batch_first: bool = False, steps: int = STEPS, **others: Any) -> Trace:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch if batch_first else batch.transpose(0, 1).contiguous()).square().mean()

    recurrent = job(
        lambda: Recurrent(layer()), loss=loss, batch=lambda samples: torch.randn(samples, steps, INPUTS)
    )
    return capture(recurrent, A100, samples=SAMPLES, **others)


@pytest.mark.parametrize(("kind", "kept", "gates"), [(nn.LSTM, 5, 4), (nn.GRU, 6, 3), (nn.RNN, 1, 1)])
def test_a_recurrent_layer_is_one_op_that_keeps_a_reserve(kind: Any, kept: int, gates: int) -> None:
    trace = trained(lambda: kind(INPUTS, HIDDEN))
    (forward,) = ops(trace, "aten._cudnn_rnn.default")
    (backward,) = ops(trace, "aten._cudnn_rnn_backward.default")
    state = STEPS * SAMPLES * HIDDEN * 4
    made = made_by(trace, "aten._cudnn_rnn.default")
    assert kept * state in [s.size_bytes for s in made if s.category is Category.SAVED_TENSORS]
    (extra,) = {
        s.most_bytes
        for s in trace.storages
        if s.label == "cuDNN RNN reserve, uncertain part" and not s.size_bytes
    }
    assert extra == state
    assert forward.flops == 2 * STEPS * SAMPLES * gates * HIDDEN * (INPUTS + HIDDEN)
    assert backward.flops == 2 * forward.flops
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert forward.module == backward.module == "layer"


def test_the_reserve_and_its_uncertain_part_are_free_after_backward() -> None:
    trace = trained(lambda: nn.GRU(INPUTS, HIDDEN))
    reserve = 6 * STEPS * SAMPLES * HIDDEN * 4
    wanted = {
        index
        for index, s in enumerate(trace.storages)
        if s.size_bytes == reserve or s.label == "cuDNN RNN reserve, uncertain part"
    }
    freed = {event.storage: trace.ops[event.op] for event in trace.events if event.kind == "free"}
    assert len(wanted) == 2 * trace.captured_steps
    assert {freed[index].name for index in wanted} == {"aten._cudnn_rnn_backward.default"}


def test_the_gradients_of_all_weights_are_one_block() -> None:
    trace = trained(lambda: nn.LSTM(INPUTS, HIDDEN, num_layers=2, bidirectional=True))
    gradients = [s.size_bytes for s in made_by(trace, "aten._cudnn_rnn_backward", Phase.BACKWARD)]
    assert 4 * trace.parameter_count in gradients


def test_samples_that_come_first_are_copied_in_and_leave_the_output_in_the_order_of_steps() -> None:
    def copied(trace: Trace) -> set[int]:
        return {s.size_bytes for s in trace.storages if s.label == "copy of a recurrent layer's input"}

    assert copied(trained(lambda: nn.GRU(INPUTS, HIDDEN))) == set()
    first = trained(lambda: nn.GRU(INPUTS, HIDDEN, batch_first=True), batch_first=True)
    assert copied(first) == {SAMPLES * STEPS * INPUTS * 4}


def test_dropout_between_layers_makes_a_random_state_once() -> None:
    trace = trained(lambda: nn.LSTM(INPUTS, HIDDEN, num_layers=2, dropout=0.2))
    assert [s.size_bytes for s in trace.storages if s.label == "cuDNN dropout state"] == [2 << 20]
    assert not [
        s for s in trained(lambda: nn.LSTM(INPUTS, HIDDEN)).storages if s.label == "cuDNN dropout state"
    ]


def test_under_autocast_a_recurrent_layer_is_in_float16_with_copies_of_its_weights() -> None:
    trace = trained(lambda: nn.GRU(INPUTS, HIDDEN), precision=Precision.BF16)
    (op,) = ops(trace, "aten._cudnn_rnn.default")
    assert op.dtype == "float16"
    casts = [s.size_bytes for s in made_by(trace, "aten._to_copy") if s.category is Category.SAVED_TENSORS]
    for numel in (3 * HIDDEN * INPUTS, 3 * HIDDEN * HIDDEN, 3 * HIDDEN):
        assert 2 * numel in casts


def test_with_cudnn_switched_off_the_layer_runs_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not ops(trained(lambda: nn.GRU(INPUTS, HIDDEN)), "aten._cudnn_rnn")


def test_a_layer_over_512_steps_is_captured_in_less_than_a_second() -> None:
    trained(lambda: nn.GRU(INPUTS, HIDDEN))
    begun = time.process_time()
    trace = trained(lambda: nn.GRU(INPUTS, HIDDEN, num_layers=2), steps=512)
    assert time.process_time() - begun < 1.0
    assert len(trace.ops) < 200


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(INPUTS, HIDDEN, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def test_a_packed_batch_takes_as_many_steps_as_its_lengths_add_up_to() -> None:
    lengths = [3, 12, 7, 1, 9, 9, 2, 5]

    def batch(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, STEPS, INPUTS), "lengths": torch.tensor(lengths)}

    packed = job(Packed, loss=lambda model, batch: model(**batch).square().mean(), batch=batch)
    trace = capture(packed, A100, samples=SAMPLES)
    (forward,) = ops(trace, "aten._cudnn_rnn.default")
    assert forward.flops == 2 * sum(lengths) * 4 * HIDDEN * (INPUTS + HIDDEN)
    reserve = 5 * sum(lengths) * HIDDEN * 4
    assert reserve in [s.size_bytes for s in made_by(trace, "aten._cudnn_rnn.default")]
    assert sum(lengths) * INPUTS * 4 in [s.size_bytes for s in made_by(trace, "aten.clone")]
    assert [s.size_bytes for s in made_by(trace, "aten.new_full")] == [12 * SAMPLES * HIDDEN * 4]
