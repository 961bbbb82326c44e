"""Adapters over frozen weights, quantised by bitsandbytes or not, are captured as they train."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.execution.attached import attached_tensors
from brimful.execution.setup import build_model
from brimful.prediction import estimate_trace
from brimful.settings import Action, UnitAction
from brimful.trace import Category, Trace
from helpers.captured_jobs import A100, CPU, capture
from lora_models import FAMILIES, WEIGHTS, Weights, adapted_job, adapted_model, base_model, quantise

bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6",  # peft's calls of transformers
)

QUANTISED = [name for name, weights in WEIGHTS.items() if weights.quantised is not None]
SAMPLES = 2


def storage_bytes(*tensors: Tensor) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held_bytes(trace: Trace, category: Category) -> int:
    """Of what is there before the first step."""
    return sum(storage.size_bytes for storage in trace.storages if storage.category is category)


@pytest.mark.parametrize("is_built", [False, True], ids=["function", "module"])
@pytest.mark.parametrize("kept", QUANTISED)
def test_weights_and_what_is_attached_to_them_take_the_bytes_of_their_storages(
    kept: str, is_built: bool
) -> None:
    model = adapted_model("llama", WEIGHTS[kept])
    real = storage_bytes(*model.parameters(), *model.buffers(), *attached_tensors(model).values())
    trace = capture(adapted_job("llama", WEIGHTS[kept], is_built=is_built), samples=SAMPLES)
    assert held_bytes(trace, Category.PARAMETERS) == sum(real.values())


@pytest.mark.parametrize("kept", ["nf4, double", "int8"])
def test_only_adapters_have_gradients_and_optimizer_state(kept: str) -> None:
    model = adapted_model("llama", WEIGHTS[kept])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = adapted_job("llama", WEIGHTS[kept]).loss
    optimizer = torch.optim.AdamW(trained)
    assert callable(loss)
    loss(model, torch.randint(3, 100, (SAMPLES, 8))).backward()
    optimizer.step()
    gradients = storage_bytes(*(parameter.grad for parameter in trained if parameter.grad is not None))
    state = storage_bytes(*(value for values in optimizer.state.values() for value in values.values()))
    trace = capture(adapted_job("llama", WEIGHTS[kept]), samples=SAMPLES)
    assert held_bytes(trace, Category.GRADIENTS) == trace.captured_steps * sum(gradients.values())
    assert held_bytes(trace, Category.OPTIMIZER_STATE) == sum(state.values())


def test_scales_are_named_after_their_weights() -> None:
    trace = capture(adapted_job("llama", WEIGHTS["nf4, double"]), samples=SAMPLES)
    names = {storage.label for storage in trace.storages if storage.category is Category.PARAMETERS}
    layer = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight quant_state"
    parts = ("absmax", "code", "offset", "state2.absmax", "state2.code")
    assert {f"{layer}.{part}" for part in parts} <= names


def test_a_model_that_was_trained_before_has_its_8_bit_weights_once() -> None:
    job = adapted_job("llama", WEIGHTS["int8"], is_built=True)
    before = capture(job, samples=SAMPLES)
    assert isinstance(job.model, nn.Module)
    job.loss(job.model, job.batch(SAMPLES))  # moves CB from the weight to the layer's state
    assert held_bytes(capture(job, samples=SAMPLES), Category.PARAMETERS) == held_bytes(
        before, Category.PARAMETERS
    )


@pytest.mark.parametrize("quantised", ["nf4", "int8"])
def test_weights_that_are_not_quantised_yet_are_as_the_device_gets_them(quantised: str) -> None:
    layer: nn.Module
    if quantised == "nf4":
        layer = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    model = nn.Sequential(nn.Linear(8, 64), layer)
    there = copy.deepcopy(model).to("cpu")
    job = bf.Job(
        model=model, loss=lambda m, x: m(x).square().mean(), batch=lambda n: torch.randn(n, 8), name="layers"
    )
    real = storage_bytes(*there.parameters(), *attached_tensors(there).values())
    assert held_bytes(capture(job), Category.PARAMETERS) == sum(real.values())
    assert model[1].weight.dtype is torch.float32


def test_capture_leaves_the_tables_of_bitsandbytes_real() -> None:
    capture(adapted_job("llama", WEIGHTS["nf4, double"]), samples=SAMPLES)
    assert all(table.device.type == "cpu" for table in bitsandbytes.functional.name2qmap.values())


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_4_bit_weights_on_a_cpu_is_as_measured(family: str) -> None:
    job = adapted_job(family, WEIGHTS["nf4, double"])
    predicted = bf.estimate(job, "cpu", micro_batch_size=SAMPLES).predicted_peak_allocated_bytes
    measured = bf.measure(job, bf.Settings(micro_batch_size=SAMPLES), device="cpu")
    assert predicted == pytest.approx(measured.measured_peak_allocated_bytes, rel=1e-3)


@pytest.mark.parametrize("kept", ["nf4", "int8", "int8, checkpointed"])
def test_the_peak_of_a_copied_module_is_as_measured(kept: str) -> None:
    job = adapted_job("llama", WEIGHTS[kept], is_built=True)
    for parameter in job.model.parameters():
        parameter._is_hf_initialized = True  # as from_pretrained leaves them
    predicted = bf.estimate(job, "cpu", micro_batch_size=SAMPLES).predicted_peak_allocated_bytes
    measured = bf.measure(job, bf.Settings(micro_batch_size=SAMPLES), device="cpu")
    assert predicted == pytest.approx(measured.measured_peak_allocated_bytes, rel=1e-3)


def test_dora_dequantises_4_bit_weights_as_measured() -> None:
    job = adapted_job("llama", WEIGHTS["nf4"], "dora")
    predicted = bf.estimate(job, "cpu", micro_batch_size=SAMPLES).predicted_peak_allocated_bytes
    measured = bf.measure(job, bf.Settings(micro_batch_size=SAMPLES), device="cpu")
    assert predicted == pytest.approx(measured.measured_peak_allocated_bytes, rel=1e-3)


def test_recomputed_layers_have_the_same_gradients_and_the_predicted_peak() -> None:
    layers = tuple(
        UnitAction(fqn=f"base_model.model.model.layers.{index}", action=Action.RECOMPUTE) for index in range(2)
    )
    settings = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=2, units=layers)
    job = adapted_job("llama", WEIGHTS["nf4, double"])
    assert bf.verify(job, settings, "cpu").holds
    predicted = estimate_trace(capture_step(job, settings, CPU), CPU).predicted_peak_allocated_bytes
    measured = bf.measure(job, settings, device="cpu").measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=1e-3)


def test_4_bit_weights_have_gradients_after_an_evaluation() -> None:
    job = adapted_job("llama", WEIGHTS["nf4"])
    model, batch = build_model(job), job.batch(SAMPLES)
    with torch.no_grad():
        job.loss(model.eval(), batch)
    job.loss(model.train(), batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_4_bit_weights_that_an_evaluation_packed_are_refused() -> None:
    job = adapted_job("llama", WEIGHTS["nf4"], is_built=True)
    assert isinstance(job.model, nn.Module)
    if not any(getattr(module, "support_avx512bf16_for_cpu", False) for module in job.model.modules()):
        pytest.skip("this processor's kernels need no packed weights")
    with torch.no_grad():
        job.loss(job.model.eval(), job.batch(SAMPLES))
    with pytest.raises(bf.errors.UsageError, match="packed weights have no gradient"):
        build_model(job)


def test_a_gpu_multiplies_8_bit_weights_as_integers_and_a_cpu_does_not() -> None:
    job = adapted_job("llama", WEIGHTS["int8"])
    on_gpu, on_cpu = ({op.name for op in capture(job, device, samples=SAMPLES).ops} for device in (A100, CPU))
    product = "bitsandbytes.int8_linear_matmul.default"
    assert product in on_gpu
    assert product not in on_cpu


def test_a_gpu_dequantises_4_bit_weights_in_forward_and_in_backward() -> None:
    trace = capture(adapted_job("llama", WEIGHTS["nf4"]), A100, samples=SAMPLES)
    dequantised = [op for op in trace.ops if op.name == "bitsandbytes.dequantize_4bit.default"]
    layers = sum(
        isinstance(module, bitsandbytes.nn.Linear4bit)
        for module in quantise(base_model("llama"), WEIGHTS["nf4"]).modules()
    )
    first_layer_inputs = 3  # query, key and value of the first layer: its input needs no gradient
    assert len(dequantised) == trace.captured_steps * (2 * layers - first_layer_inputs)


@pytest.mark.parametrize("kept", ["nf4", "int8"])
def test_arithmetic_is_that_of_weights_that_are_not_quantised(kept: str) -> None:
    plain, quantised = (
        sum(op.flops for op in capture(adapted_job("llama", weights), A100, samples=SAMPLES).ops)
        for weights in (Weights(), replace(WEIGHTS[kept]))
    )
    assert quantised == plain
