"""What a trace says of parameters, gradients, modules, phases and recomputation."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brimful.capture import capture_step
from brimful.memory import live_profile, predict_memory
from brimful.settings import Settings
from brimful.trace import Category, EventKind, Phase, Trace
from helpers.captured_jobs import (
    A100,
    CLASSES,
    CPU,
    HIDDEN,
    INPUTS,
    SAMPLES,
    bytes_of,
    capture,
    cross_entropy,
    job,
    made_by,
    mlp,
    ops,
    rows,
)
from helpers.trained_alike import nesting, recomputing


def first_step_ops(trace: Trace) -> list[str]:
    return [op.name for op in trace.ops if op.step == 0 and op.phase is not Phase.SETUP]


def test_parameters_and_optimizer_state_have_their_sizes() -> None:
    trace = capture(job())
    count = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    assert trace.parameter_count == trace.trainable_parameter_count == count
    assert bytes_of(trace, Category.PARAMETERS) == 4 * count
    assert (
        bytes_of(trace, Category.OPTIMIZER_STATE) == 2 * 4 * count + 4 * 4
    )  # AdamW: and a count for each tensor


BATCH_BYTES = SAMPLES * INPUTS * 4 + SAMPLES * 8


def test_on_a_gpu_inputs_are_a_copy_of_every_micro_batch() -> None:
    trace = capture(job(), A100, gradient_accumulation_steps=2)
    assert bytes_of(trace, Category.INPUTS) == 4 * BATCH_BYTES  # two steps of two
    assert trace.global_batch == ()


def test_on_a_cpu_inputs_are_the_global_batch_itself() -> None:
    trace = capture(job(), gradient_accumulation_steps=5)
    assert bytes_of(trace, Category.INPUTS) == 5 * BATCH_BYTES
    assert {trace.storages[index].label for index in trace.global_batch} == {'batch["x"]', 'batch["y"]'}
    held = {event.storage for event in trace.events if event.op == -1} - {
        event.storage for event in trace.events if event.kind is EventKind.FREE
    }
    assert held >= set(trace.global_batch)


def test_a_tensor_that_stands_twice_in_a_batch_is_there_once() -> None:
    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, CLASSES, (samples,))
        return {"x": torch.randn(samples, INPUTS), "y": ids, "again": ids}

    assert bytes_of(capture(job(batch=batch)), Category.INPUTS) == BATCH_BYTES


def test_what_the_loss_writes_to_in_place_is_copied_on_a_cpu_too() -> None:
    def writes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].mul_(2)
        return cross_entropy(model, batch)

    trace = capture(job(loss=writes), gradient_accumulation_steps=3)
    copies = 2 * 2 * SAMPLES * INPUTS * 4  # of two micro-batches in two steps
    assert bytes_of(trace, Category.INPUTS) == 3 * BATCH_BYTES + copies


def test_a_trace_of_more_micro_batches_holds_a_larger_global_batch() -> None:
    two, seven = (capture(job(), gradient_accumulation_steps=steps) for steps in (2, 7))
    scaled = two.with_settings(seven.settings)
    assert [s.size_bytes for s in scaled.storages] == [s.size_bytes for s in seven.storages]
    assert Trace.from_json(json.loads(json.dumps(seven.to_json()))) == seven


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(CLASSES, HIDDEN)
            self.head = nn.Linear(HIDDEN, CLASSES, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    trace = capture(job(Tied, lambda model, batch: F.cross_entropy(model(batch["y"]), batch["y"])))
    assert trace.parameter_count == CLASSES * HIDDEN
    assert bytes_of(trace, Category.PARAMETERS) == 4 * CLASSES * HIDDEN


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    def half_frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    trace = capture(job(half_frozen))
    trained = HIDDEN * CLASSES + CLASSES
    assert trace.trainable_parameter_count == trained < trace.parameter_count
    assert {s.label for s in trace.storages if s.category is Category.GRADIENTS} == {"2.weight", "2.bias"}
    assert bytes_of(trace, Category.OPTIMIZER_STATE) == 2 * 4 * trained + 2 * 4


def test_a_module_that_is_given_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES)).eval()
    before = copy.deepcopy(model.state_dict())
    capture(job(model), recompute=("0",))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())


def test_ops_belong_to_the_module_that_ran_them_and_their_backward_to_the_same() -> None:
    trace = capture(job())
    assert [op.module for op in ops(trace, "aten.addmm")] == ["0", "2"]
    assert [op.module for op in ops(trace, "aten.relu")] == ["1"]
    assert [op.module for op in ops(trace, "aten.threshold_backward")] == ["1"]
    # backward: gradient of the last weight, of its input, of the first weight (the batch needs none)
    assert [op.module for op in ops(trace, "aten.mm", Phase.BACKWARD)] == ["2", "2", "0"]
    assert {op.module for op in ops(trace, "aten.nll_loss")} == {"<loss>"}
    assert {op.module for op in trace.ops if op.phase is Phase.OPTIMIZER} == {"<optimizer>"}
    assert trace.module_classes == (("", "Sequential"), ("0", "Linear"), ("1", "ReLU"), ("2", "Linear"))


def test_what_runs_twice_is_flagged_and_belongs_to_the_same_module() -> None:
    plain, recomputed = capture(job()), capture(job(), recompute=("[0..1]",))
    assert not any(op.recomputed for op in plain.ops)
    again = [op for op in recomputed.ops if op.recomputed and op.step == 0]
    assert all(op.phase is Phase.BACKWARD for op in again)
    assert [(op.name, op.module) for op in again] == [("aten.addmm.default", "0"), ("aten.relu.default", "1")]


def test_what_runs_again_for_a_nested_unit_is_flagged_and_belongs_to_the_unit_it_is_of() -> None:
    class Doubling(nn.Module):
        """Works in its own forward, not in a child's."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(INPUTS, INPUTS)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * 2

    model = nn.Sequential(*(Doubling() for _ in range(3)), nn.Linear(INPUTS, CLASSES))
    settings = replace(nesting(("0", "1", "2")), micro_batch_size=SAMPLES)
    trace = capture_step(job(model), settings, CPU)
    again = [op for op in trace.ops if op.recomputed and op.step == 0]
    assert all(op.phase is Phase.BACKWARD for op in again)
    assert [op.module for op in again if op.name == "aten.addmm.default"] == [
        *("0.linear", "1.linear"),  # for the input of the last
        *("2.linear", "1.linear", "0.linear"),
    ]
    assert [op.module for op in again if op.name == "aten.mul.Tensor"] == ["0", "1"]  # others stop early


def test_inputs_of_nested_units_are_freed_in_forward_and_made_again() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh(), nn.GELU()) for _ in range(4)))
    live = {}
    for name, settings in (
        ("flat", recomputing("0", "1", "2", "3")),
        ("nested", nesting(("0", "1", "2", "3"))),
    ):
        trace = capture_step(job(model), replace(settings, micro_batch_size=SAMPLES), CPU)
        first_backward = next(i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
        profile = live_profile(trace, 1)
        live[name] = int(profile.live_bytes[profile.ops == first_backward][0])
    # Three inputs; the last unit's result is the loss's input. The random states are as many.
    assert live["flat"] - live["nested"] == 3 * SAMPLES * INPUTS * 4


def test_recomputing_saves_less() -> None:
    wide = [nn.Linear(INPUTS, 400), nn.GELU(), nn.Tanh(), nn.Linear(400, CLASSES)]
    plain = capture(job(nn.Sequential(*wide)))
    recomputed = capture(job(nn.Sequential(*wide)), recompute=("[0..2]",))
    assert bytes_of(recomputed, Category.SAVED_TENSORS) < bytes_of(plain, Category.SAVED_TENSORS)


def test_categories_sum_to_the_live_bytes() -> None:
    trace = capture(job(), gradient_accumulation_steps=3)
    profile = live_profile(trace, 1)
    for position in range(len(trace.events)):
        assert sum(size for _, size in profile.breakdown_at(position)) == profile.live_bytes[position]


def test_nothing_is_freed_that_was_not_allocated_and_steps_leave_nothing_behind() -> None:
    trace = capture(job())
    live: set[int] = set()
    for event in trace.events:
        if event.kind is EventKind.ALLOCATE:
            assert event.storage not in live
            live.add(event.storage)
        else:
            live.remove(event.storage)
    kept = {Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.INPUTS, Category.SAVED_TENSORS}
    # the last step's loss and norm may be alive as the capture ends; gradients are cleared
    assert {trace.storages[index].category for index in live} <= kept | {Category.TEMPORARIES}
    assert all(trace.storages[i].category is not Category.GRADIENTS for i in live)


def test_both_steps_run_the_same_ops_but_for_the_making_of_optimizer_state() -> None:
    trace = capture(job())
    assert not [op for op in trace.ops if op.phase is Phase.SETUP]
    first, second = ([op for op in trace.ops if op.step == n] for n in (0, 1))
    made = [op.name for op in first if op.phase is Phase.OPTIMIZER and op.name.startswith("aten.zeros_like")]
    assert len(made) == 2 * len(list(job().model().parameters()))  # two moments each
    without = [op.name for op in first if not (op.phase is Phase.OPTIMIZER and op.name in made)]
    assert without == [op.name for op in second]


@pytest.mark.parametrize("step_count", [1, 2])
def test_optimizer_state_is_made_after_the_first_backward_unless_one_step_stands_for_all(
    step_count: int,
) -> None:
    trace = capture_step(job(), Settings(micro_batch_size=8), CPU, steps=step_count)
    makers = {trace.ops[s.op].phase for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.op}
    assert makers == {Phase.SETUP if step_count == 1 else Phase.OPTIMIZER}


def test_the_first_backward_is_predicted_without_optimizer_state() -> None:
    prediction = predict_memory(
        capture(job(lambda: nn.Sequential(nn.Linear(INPUTS, 4096), nn.Linear(4096, CLASSES))))
    )
    assert prediction.first_step_peak_allocated_bytes < prediction.steady_peak_allocated_bytes


def test_a_trace_is_the_same_after_a_trip_through_json_and_a_file(tmp_path: Path) -> None:
    trace = capture(job(), recompute=("0",), gradient_accumulation_steps=2)
    assert Trace.from_json(trace.to_json()) == trace
    for name in ("trace.json", "trace.json.gz"):
        trace.save(tmp_path / name)
        assert Trace.load(tmp_path / name) == trace


def test_captures_are_repeatable() -> None:
    assert capture(job()) == capture(job())


def test_two_captures_tell_a_third_size() -> None:
    small, large = capture(job(), samples=4), capture(job(), samples=8)
    assert small.at_micro_batch_size(large, 16) == capture(job(), samples=16)


def test_a_checkpoint_inside_the_model_is_followed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    trace = capture(job(Own))
    # torch stops early: the last layer's output is not needed again
    assert [op.module for op in ops(trace, "aten.addmm") if op.recomputed] == ["inner.0"]


def test_an_lstm_is_followed_with_the_workspace_it_keeps() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUTS, HIDDEN, batch_first=True)
            self.head = nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    def batch(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 7, INPUTS), "y": torch.randint(0, CLASSES, (samples,))}

    trace = capture(job(Recurrent, batch=batch))
    assert ops(trace, "aten.mkldnn_rnn_layer_backward")
    assert {op.module for op in ops(trace, "aten.mkldnn_rnn_layer")} == {"lstm"}
    (memory,) = [c for c in trace.corrections if c.name == "lstm_memory"]
    assert memory.occurrences == 2  # forward and backward of the last step
    workspace = max(made_by(trace, "aten.mkldnn_rnn_layer.default"), key=lambda storage: storage.size_bytes)
    inside = [s for s in trace.storages if s.label == "inside aten.mkldnn_rnn_layer_backward.default"]
    assert workspace.size_bytes + inside[-1].size_bytes == memory.changed_bytes
    assert workspace.category is Category.SAVED_TENSORS


def test_a_parameter_that_no_loss_reaches_has_no_optimizer_state() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(INPUTS, CLASSES)
            self.unused = nn.Linear(INPUTS, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    trace = capture(job(Partly))
    profile = live_profile(trace, 1)
    held = dict(profile.breakdown_at(len(trace.events) - 1))
    used = INPUTS * CLASSES + CLASSES
    state = 2 * 4 * used + 2 * 4  # two moments each, and a step count
    assert held[Category.OPTIMIZER_STATE] == state
    in_step = [
        i
        for i, event in enumerate(trace.events)
        if (trace.ops[event.op].step, trace.ops[event.op].phase) == (1, Phase.FORWARD)
    ]
    assert {dict(profile.breakdown_at(i))[Category.OPTIMIZER_STATE] for i in in_step} == {state}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


def test_an_autograd_function_of_ones_own_is_followed() -> None:
    class WithFunction(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.inner(x))

    trace = capture(job(WithFunction))
    assert [op.phase for op in ops(trace, "aten.mul.Tensor")] == [Phase.FORWARD, Phase.BACKWARD]


def test_a_loss_that_is_a_module_is_followed() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    trace = capture(job(loss=lambda model, batch: criterion(model(batch["x"]), batch["y"])))
    assert {op.module for op in ops(trace, "aten._log_softmax")} == {"<loss>"}


def test_accumulating_captures_two_micro_batches_and_adds_the_second_gradient_in_place() -> None:
    trace = capture(job(), gradient_accumulation_steps=4)
    assert trace.captured_micro_batches == 2
    added = [op for op in ops(trace, "aten.add_", Phase.BACKWARD) if op.micro_batch == 1]
    assert len(added) == 4  # two weights, two biases


def test_flops_of_a_linear_layer() -> None:
    trace = capture(job())
    first, _second = ops(trace, "aten.addmm")
    assert first.flops == 2 * SAMPLES * INPUTS * HIDDEN
    assert first.written_bytes == SAMPLES * HIDDEN * 4
    assert first.read_bytes == (HIDDEN + SAMPLES * INPUTS + INPUTS * HIDDEN) * 4


def test_the_device_is_asked_for_without_a_trace() -> None:
    """`tensor.device` is answered by the recorder itself; ops that only look are not recorded."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert batch["x"].device == torch.device("cpu")
        return cross_entropy(model, batch)

    trace = capture(job(loss=loss))
    assert not any(name.startswith("prim") for name in first_step_ops(trace))


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "adagrad", "adafactor", "adamw8bit"])
def test_every_optimizer_by_name_can_be_captured(name: str) -> None:
    trace = capture(job(optimizer=name), A100)
    assert trace.uncertain_ops == ()
    assert bytes_of(trace, Category.OPTIMIZER_STATE) > 0


def test_the_batch_may_be_any_nest() -> None:
    def batch(samples: int) -> tuple[list[Tensor], Tensor]:
        made = rows(samples)
        return [made["x"]], made["y"]

    trace = capture(job(loss=lambda model, b: F.cross_entropy(model(b[0][0]), b[1]), batch=batch), CPU)
    assert bytes_of(trace, Category.INPUTS) == BATCH_BYTES


def test_flops_of_an_lstm() -> None:
    def model() -> nn.Module:
        return nn.LSTM(INPUTS, HIDDEN)

    the_job = job(model, lambda m, batch: m(batch["x"][None])[0].sum())
    trace = capture(the_job)
    forward = 2 * SAMPLES * 4 * HIDDEN * (INPUTS + HIDDEN)
    assert [op.flops for op in ops(trace, "aten.mkldnn_rnn_layer.default")] == [forward]
    assert [op.flops for op in ops(trace, "aten.mkldnn_rnn_layer_backward")] == [2 * forward]
