"""What ops on CUDA take inside: copies of operands, sorted indices, parts of sums, unknown ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.settings import Precision, Settings
from brimful.trace import Category, Kernel, Trace
from brimful.utils.quantities import MIB
from helpers.captured_jobs import (
    A100,
    CLASSES,
    CPU,
    H100,
    INPUTS,
    SAMPLES,
    capture,
    cross_entropy,
    job,
    made_by,
    mlp,
    ops,
    rows,
)


def captured(loss: Callable[..., Tensor], model: Any = mlp, device: Any = A100, **others: Any) -> Trace:
    precision = others.pop("precision", Precision.FP32)
    samples = others.pop("samples", SAMPLES)
    return capture(job(model, loss=loss, **others), device, precision=precision, samples=samples)


def labelled(trace: Trace, label: str) -> list[int]:
    """Blocks of one step, in order."""
    found = [s.size_bytes for s in trace.storages if s.label == label]
    return found[: len(found) // trace.captured_steps]


def shifted(n: int) -> dict[str, Tensor]:
    texts = torch.randn(n, INPUTS + 1)
    return {"x": texts[:, :-1], "y": texts[:, 1:]}


@pytest.mark.parametrize("micro_batch_size", [SAMPLES, SAMPLES // 4])
def test_views_of_one_storage_in_a_batch_have_its_memory_once(micro_batch_size: int) -> None:
    def measured_and_predicted(batch: Any) -> tuple[int, int]:
        made = Job(
            model=lambda: nn.Linear(INPUTS, INPUTS),
            loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
            batch=batch,
            optimizer="sgd",
        )
        settings = Settings(
            micro_batch_size=micro_batch_size, gradient_accumulation_steps=SAMPLES // micro_batch_size
        )
        predicted = predict_memory(capture_step(made, settings, CPU)).peak_allocated_bytes
        return measure_step(made, settings, steps=1).measured_peak_allocated_bytes, predicted

    for batch in (
        shifted,
        lambda n: dict.fromkeys("xy", torch.randn(n, INPUTS)),
        lambda n: {"x": torch.randn(n, INPUTS), "y": torch.randn(n, INPUTS)},
    ):
        measured, predicted = measured_and_predicted(batch)
        assert predicted == pytest.approx(measured, rel=1e-3)


class InLists(nn.Module):
    """Its blocks are in a plain list, and their parameters in one of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [[nn.Linear(INPUTS, INPUTS)], [nn.Linear(INPUTS, CLASSES)]]
        self.all = nn.ParameterList(p for (block,) in self.blocks for p in block.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for (block,) in self.blocks:
            x = block(x)
        return x


def test_modules_in_plain_lists_are_captured_where_the_model_lists_their_parameters() -> None:
    registered = lambda: nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES))  # noqa: E731
    peaks = [
        predict_memory(captured(cross_entropy, model=model, device=CPU)).peak_allocated_bytes
        for model in (InLists, registered)
    ]
    assert peaks[0] == peaks[1]


def test_softmax_copies_what_is_transposed_and_its_backward_the_gradient_too() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).t().softmax(-1) * torch.ones(SAMPLES, CLASSES).t()).sum()

    trace = captured(loss)
    copied = SAMPLES * CLASSES * 4
    assert labelled(trace, "copy inside aten._softmax.default") == [copied]
    assert not labelled(captured(cross_entropy), "copy inside aten._log_softmax.default")
    assert not labelled(captured(loss, device=CPU), "copy inside aten.mm.default")


def test_layer_norm_copies_what_is_transposed() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.layer_norm(model(batch["x"]).t(), (SAMPLES,)).square().mean()

    trace = captured(loss)
    copied = SAMPLES * CLASSES * 4
    assert copied in labelled(trace, "copy inside aten.native_layer_norm.default")
    assert copied in labelled(trace, "copy inside aten.native_layer_norm_backward.default")


def test_cublas_copies_matrices_without_contiguous_rows_or_columns() -> None:
    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).sum()

    copied = SAMPLES * CLASSES * 4
    expanded = labelled(captured(summed), "copy inside aten.mm.default")
    assert expanded == [copied, copied]  # the gradient of a sum is one number, expanded
    assert not labelled(captured(cross_entropy), "copy inside aten.mm.default")


@pytest.mark.parametrize(("weight_is_last", "input_is_last"), [(True, False), (False, True), (True, True)])
def test_a_convolution_copies_what_is_not_channels_last_if_anything_is(
    weight_is_last: bool, input_is_last: bool
) -> None:
    def model() -> nn.Module:
        layer = nn.Conv2d(4, 8, 3, bias=False)
        return layer.to(memory_format=torch.channels_last) if weight_is_last else layer

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        x = batch.to(memory_format=torch.channels_last) if input_is_last else batch
        return module(x).square().mean()

    trace = captured(loss, model, batch=lambda samples: torch.randn(samples, 4, 8, 8))
    weight, x = 8 * 4 * 9 * 4, SAMPLES * 4 * 64 * 4
    expected = ([] if input_is_last else [x]) + ([] if weight_is_last else [weight])
    assert labelled(trace, "copy inside aten.convolution.default") == expected


def test_the_backward_of_indexing_sorts_indices_and_writes_in_place() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])[batch["y"]].square().mean()

    trace = captured(loss)
    label = "inside aten.index_put.default"
    assert labelled(trace, label) == [6 * 8 * SAMPLES]
    filled = {
        index
        for index, s in enumerate(trace.storages)
        if s.label == "aten.new_zeros.default" and s.size_bytes == SAMPLES * CLASSES * 4
    }
    freed = {event.storage: event.op for event in trace.events if event.kind == "free"}
    assert filled
    for index in filled:
        assert trace.ops[freed[index] + 1].name == "aten.index_put.default"  # handed over before it runs


def test_a_gradient_that_is_expanded_is_copied_before_it_is_sorted() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])[batch["y"]].sum()

    values = SAMPLES * CLASSES * 4
    assert labelled(captured(loss), "inside aten.index_put.default") == [6 * 8 * SAMPLES, values]


@pytest.mark.parametrize(
    ("shape", "dim", "likely", "cub"),
    [
        ((1, 5000), -1, 5000 * 8, 5000 * 12),  # one row: its places
        ((2, 1_000_000), -1, 1_000_000 * 8, 1_000_000 * 12),  # long rows, one after another
        ((2, 5000), -1, 10000 * (2 * 8 + 4), 10000 * 12),  # as one: pairs twice, and the values
        ((200, 5000), -1, 1_000_000 * 8, 1_000_000 * 12),  # many: the places of all
        ((5000, 2), 0, 10000 * (2 * 8 + 4) + 10000 * (4 + 4 + 8), 10000 * 12),  # copied, and both results too
    ],
)
def test_sorting_long_rows_takes_places_beside_the_results(
    shape: tuple[int, ...], dim: int, likely: int, cub: int
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).sum() + model[0].weight.new_ones(shape).sort(dim=dim, stable=True)[0].sum()

    blocks = {
        (s.size_bytes, s.most_bytes)
        for s in captured(loss).storages
        if s.label.startswith("inside aten.sort") and s.op is None
    }
    assert blocks == {(likely, None), (cub, cub + 2 * MIB)}


@pytest.mark.parametrize(("shape", "dim"), [((3, 4096), -1), ((100_000, 8), -1), ((), -1)])
def test_short_rows_are_sorted_where_they_are(shape: tuple[int, ...], dim: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).sum() + model[0].weight.new_ones(shape).sort(dim)[0].sum()

    assert not [s for s in captured(loss).storages if s.label.startswith("inside aten.sort")]


def test_a_norm_over_some_dimensions_is_staged_as_a_sum_over_them() -> None:
    def staged(reduce: Callable[[Tensor], Tensor], name: str) -> list[int]:
        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return model(batch["x"]).sum() + reduce(model[0].weight.new_ones(65536, 512)).sum()

        return [size_bytes for size_bytes in labelled(captured(loss), f"inside {name}") if size_bytes > 0]

    sums = staged(lambda x: x.sum(0), "aten.sum.dim_IntList")
    assert staged(lambda x: torch.linalg.vector_norm(x, dim=0), "aten.linalg_vector_norm.default") == sums[:2]
    assert max(sums) > 2**20


def test_a_gradient_taken_inside_the_loss_runs_on_autograds_thread() -> None:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        with torch.no_grad():
            return gradient.square().sum().requires_grad_()

    assert len(labelled(captured(penalised), "cuBLAS workspace")) == 1
    assert len([s for s in captured(penalised).storages if s.label == "cuBLAS workspace"]) == 2


def layer_norm_bytes(multiprocessors: int, rows_: int, columns: int) -> int:
    return Kernel(name="layer norm backward", numbers=(multiprocessors, 2048, rows_, columns, 4)).size_bytes()


def test_layer_norm_adds_up_in_parts_where_many_rows_are_narrow() -> None:
    assert layer_norm_bytes(108, 65536, 768) == 0
    assert layer_norm_bytes(108, 100_000, 768) == 32768 // 24 * 768 * 4  # fewer than one for each 32 rows
    assert layer_norm_bytes(108, 65_600, 32) == 2050 * 32 * 4  # one for each 32 rows
    assert layer_norm_bytes(108, 100_000, 1728) == 0  # 54 blocks of columns fill half of the 108
    assert layer_norm_bytes(132, 100_000, 1728) > 0


def test_the_parts_of_layer_norm_are_added_up_as_an_h100_does() -> None:
    """benchmarks/results/gpu_record.json: 131072 rows of 256 take parts of 4 MiB, and 8 MiB to add them up."""
    numbers = (132, 2048, 131_072, 256, 4)
    assert Kernel(name="layer norm backward", numbers=numbers).size_bytes() == 4 * MIB
    assert Kernel(name="layer norm backward sums", numbers=numbers).size_bytes() == 8 * MIB
    assert Kernel(name="layer norm backward sums", numbers=(132, 2048, 4096, 256, 4)).size_bytes() == 0


def test_a_variance_over_rows_is_staged_as_an_h100_does() -> None:
    """The same record: 528 MiB for 16384 rows of 2048, four times what a sum takes."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (
            model(batch["x"]).sum()
            + (model[0].weight.new_ones(16384, 2048) * model[0].weight[0, 0]).var(0).sum()
        )

    (staging,) = labelled(captured(loss, device=H100), "inside aten.var.correction")[:1]
    assert staging == 528 * MIB


def test_softmax_backward_takes_the_product_of_gradient_and_output() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).softmax(-1).square().sum()

    label = "gradient times output inside aten._softmax_backward_data.default"
    assert labelled(captured(loss), label) == [SAMPLES * CLASSES * 4]
    assert not labelled(captured(loss, device=CPU), label)
    assert not labelled(captured(cross_entropy), label)  # log_softmax


def test_group_norm_saves_a_copy_of_channels_last_images() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16)).to(memory_format=torch.channels_last)

    def copies(device: Any) -> list[int]:
        trace = captured(
            lambda module, batch: module(batch).square().mean(),
            model,
            device,
            batch=lambda n: torch.randn(n, 3, 8, 8).to(memory_format=torch.channels_last),
        )
        made = made_by(trace, "aten.clone")
        return [s.size_bytes for s in made if s.category is Category.SAVED_TENSORS]

    assert copies(A100) == [SAMPLES * 16 * 6 * 6 * 4]
    assert not copies(CPU)


def test_group_norm_takes_sums_of_each_sample_and_channel() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16))

    trace = captured(
        lambda module, batch: module(batch).square().mean(), model, batch=lambda n: torch.randn(n, 3, 8, 8)
    )
    assert labelled(trace, "inside aten.native_group_norm.default") == [SAMPLES * 2 * 16 * 4]
    assert labelled(trace, "inside aten.native_group_norm_backward.default") == [SAMPLES * (3 * 16 + 2 * 4) * 4]


def test_batch_norm_of_channels_last_images_may_take_statistics_of_128_parts() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).to(memory_format=torch.channels_last)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch.to(memory_format=torch.channels_last)).square().mean()

    trace = captured(loss, model, batch=lambda n: torch.randn(n, 3, 8, 8))
    most = {s.most_bytes for s in trace.storages if s.label == "inside aten.native_batch_norm.default"}
    assert most == {4 * 16 * 128 * 4}


def test_the_norms_of_all_gradients_are_added_up_from_chunks_of_the_largest() -> None:
    trace = captured(cross_entropy, lambda: nn.Sequential(nn.Linear(INPUTS, 20000), nn.Linear(20000, CLASSES)))
    # 12 · 20000 numbers are 4 chunks of 65536; 4 tensors
    assert labelled(trace, "inside aten._foreach_norm.Scalar") == [4 * 4 * 4]


def test_float16_gives_float32_softmax_without_a_copy_and_bfloat16_is_converted_first() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).softmax(-1).square().mean()

    def dtypes(precision: Precision) -> set[str]:
        return {op.dtype for op in ops(captured(loss, precision=precision), "aten._softmax.default")}

    assert dtypes(Precision.FP16) == {"float16"}  # what it reads
    assert dtypes(Precision.BF16) == {"float32"}
    half, brain = (captured(loss, precision=p) for p in (Precision.FP16, Precision.BF16))
    logits = SAMPLES * CLASSES * 4

    def converted(trace: Trace) -> int:
        return [s.size_bytes for s in made_by(trace, "aten._to_copy")].count(logits)

    assert converted(brain) == converted(half) + 1


def test_cross_entropy_under_autocast_casts_log_probabilities_not_logits() -> None:
    """`log_softmax` is asked for in the logits' own type, which autocast leaves; `nll_loss` runs in float32."""
    trace = captured(cross_entropy, precision=Precision.BF16)
    (op,) = ops(trace, "aten._log_softmax.default")
    assert op.dtype == "bfloat16"
    (loss,) = ops(trace, "aten.nll_loss_forward.default")
    assert loss.dtype == "float32"
    kept = [s.size_bytes for s in made_by(trace, "aten._log_softmax") if s.category is Category.SAVED_TENSORS]
    assert kept == [SAMPLES * CLASSES * 2]


@pytest.fixture
def custom_op() -> Iterator[Any]:
    with torch.library._scoped_library("brimful_test", "FRAGMENT"):

        @torch.library.custom_op("brimful_test::twice", mutates_args=())
        def twice(x: Tensor) -> Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        twice.register_autograd(lambda _ctx, grad: grad * 2)
        yield twice


def test_an_op_that_nobody_knows_widens_the_interval_and_is_named(custom_op: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return custom_op(model(batch["x"])).square().mean()

    trace = captured(loss)
    found = {
        (s.size_bytes, s.most_bytes) for s in trace.storages if s.label == "inside brimful_test.twice.default"
    }
    assert found == {(0, 2 * SAMPLES * CLASSES * 4)}
    assert [name for name in trace.uncertain_ops if name.startswith("brimful_test.twice.default")]
    assert not captured(cross_entropy).uncertain_ops


def test_rows_are_of_the_size_the_tests_count_with() -> None:
    assert rows(3)["x"].shape == (3, INPUTS)
