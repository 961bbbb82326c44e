"""Adapters over frozen weights that torchao quantised: tensors made of others are captured as they train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import brimful as bf
from brimful.distributed.ranks import Ranks
from brimful.distributed.strategies import data_parallel
from brimful.execution.setup import build_model
from brimful.settings import Action, Parallelism, UnitAction
from brimful.torch_utils.module_names import plain_state
from brimful.torch_utils.wrapper_tensors import inner_tensors, is_wrapper_tensor
from brimful.trace import Category
from helpers.captured_jobs import A100, CPU, capture
from lora_models import TORCHAO, WEIGHTS, adapted_job, adapted_model

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6",  # peft's calls of transformers
    "ignore:.*was instantiated without `get_apply_tensor_subclass`",  # peft's, of merging
)

KINDS = ["int8", "int8, groups", "nf4"]
SAMPLES = 2


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def quantised(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if is_wrapper_tensor(p)}


@pytest.mark.parametrize("is_built", [False, True], ids=["function", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_the_bytes_of_their_inner_tensors(kind: str, is_built: bool) -> None:
    model = adapted_model("llama", TORCHAO[kind])
    assert len(quantised(model)) == 14
    real = [part for tensor in (*model.parameters(), *model.buffers()) for part in inner_tensors(tensor)]
    trace = capture(adapted_job("llama", TORCHAO[kind], is_built=is_built), samples=SAMPLES)
    held = sum(s.size_bytes for s in trace.storages if s.category is Category.PARAMETERS)
    assert held == storage_bytes(real)


@pytest.mark.parametrize(("kind", "is_built"), [("int8", False), ("int8, groups", True), ("nf4", True)])
def test_the_peak_is_as_measured(kind: str, is_built: bool) -> None:
    job = adapted_job("llama", TORCHAO[kind], is_built=is_built)
    estimate = bf.estimate(job, "cpu", micro_batch_size=SAMPLES)
    measured = bf.measure(job, bf.Settings(micro_batch_size=SAMPLES), device="cpu")
    assert estimate.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=1e-3
    )
    plain = adapted_model("llama", WEIGHTS["fp32"])
    trained = [parameter.numel() for parameter in plain.parameters() if parameter.requires_grad]
    assert estimate.parameter_count == sum(parameter.numel() for parameter in plain.parameters())
    assert estimate.trainable_parameter_count == sum(trained)


def test_inner_tensors_are_named_after_their_weights() -> None:
    trace = capture(adapted_job("llama", TORCHAO["int8"]), samples=SAMPLES)
    names = {storage.label for storage in trace.storages if storage.category is Category.PARAMETERS}
    layer = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert {f"{layer}.{part}" for part in ("qdata", "scale", "zero_point")} <= names
    assert layer not in names


def test_weights_in_the_type_of_the_inputs_are_kept_for_backward() -> None:
    """torchao multiplies by a copy of the integers in the inputs' type, which autograd saves."""
    for device in (CPU, A100):
        trace = capture(adapted_job("llama", TORCHAO["int8"]), device, samples=SAMPLES)
        copies = [
            storage.size_bytes
            for storage in trace.storages
            if storage.category is Category.SAVED_TENSORS and storage.label.startswith("aten._to_copy.default")
        ]
        assert copies.count(4 * 128 * 256) == trace.captured_steps * 2 * 3  # of gate, up and down in each layer


def test_recomputed_layers_have_the_same_gradients() -> None:
    layers = tuple(
        UnitAction(fqn=f"base_model.model.model.layers.{index}", action=Action.RECOMPUTE) for index in range(2)
    )
    settings = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=2, units=layers)
    job = adapted_job("llama", TORCHAO["int8"])
    assert bf.verify(job, settings, "cpu").holds


def gradients(model: nn.Module, job: bf.Job, batch: Tensor) -> dict[str, Tensor]:
    job.loss(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_adapters_have_the_gradients_that_they_have_without_brimful() -> None:
    job = adapted_job("llama", TORCHAO["int8"])
    batch = job.batch(SAMPLES)
    expected = gradients(adapted_model("llama", TORCHAO["int8"]), job, batch)
    model = build_model(job)
    capture(job, samples=SAMPLES)
    found = gradients(model, job, batch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ddp_trains_around_them_and_fsdp2_refuses(tmp_path: Path) -> None:
    job = adapted_job("llama", TORCHAO["int8"])
    batch, model = job.batch(SAMPLES), adapted_model("llama", TORCHAO["int8"])
    expected = gradients(adapted_model("llama", TORCHAO["int8"]), job, batch)
    settings = bf.Settings(micro_batch_size=SAMPLES, world_size=2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks, device = Ranks(rank=0, count=2), torch.device("cpu")
        with pytest.raises(bf.errors.UsageError, match="FSDP2 cannot shard them"):
            data_parallel(job, model, replace(settings, parallelism=Parallelism.FSDP2), device, ranks)
        parallel = data_parallel(job, model, settings, device, ranks)
        parallel.loss(model, batch).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        parallel.close()
    finally:
        dist.destroy_process_group()


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    job = adapted_job("llama", TORCHAO["int8, groups"])
    data = bf.Data(train=job.batch(16))
    settings = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=2)

    def train(run: Path, steps: int, **more: bool) -> list[float]:
        given = {"data": data, "device": "cpu", "show_progress": False, "ema_decay": 0.9, **more}
        return list(bf.fit(job, settings, run_dir=run, steps=steps, **given)[0].losses)

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    assert train(tmp_path / "parts", 4, resume=True) == whole
    loaded = adapted_model("llama", TORCHAO["int8, groups"])
    with torch.no_grad():
        for parameter in loaded.parameters():
            for part in inner_tensors(parameter):
                part.zero_()
    saved = load_file(bf.trainer.load_weights(loaded, tmp_path / "whole"))
    assert all(torch.equal(value, saved[name]) for name, value in plain_state(loaded).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_weights(kind: str) -> None:
    job = adapted_job("llama", TORCHAO[kind], is_built=True)
    assert isinstance(job.model, nn.Module)
    copied = plain_state(build_model(job, is_copied=True))
    for name, value in plain_state(job.model).items():
        assert torch.equal(copied[name], value), name
        assert copied[name].data_ptr() != value.data_ptr()


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = adapted_model("llama", TORCHAO["int8"])
    tensors = {name: value.clone() for name, value in plain_state(model).items()}
    name = next(name for name in tensors if name.endswith(".qdata"))
    before = tensors[name].clone()
    save_file(tensors | {name: tensors[name][:1].clone()}, tmp_path / "other.safetensors")
    with pytest.raises(bf.errors.UsageError, match=r"size mismatch for .*\.qdata: \(1, 128\) was saved"):
        bf.trainer.load_weights(model, tmp_path / "other.safetensors")
    assert torch.equal(plain_state(model)[name], before)
    del tensors[name]
    save_file(tensors, tmp_path / "fewer.safetensors")
    with pytest.raises(bf.errors.UsageError, match="qdata"):
        bf.trainer.load_weights(model, tmp_path / "fewer.safetensors")
