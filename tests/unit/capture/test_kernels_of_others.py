"""Ops of `torch.library` and Triton kernels in a model: captured, or named with what to register."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.errors import CaptureError
from helpers.captured_jobs import A100, capture

ROWS, WIDTH = 64, 32


class Between(nn.Module):
    """Calls a function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def job_of(function: Callable[[Tensor], Tensor]) -> bf.Job:
    return bf.Job(
        model=lambda: Between(function),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda count: torch.randn(count, WIDTH),
        name="kernels",
    )


def registered(name: str, *, has_fake: bool, has_gradient: bool) -> Any:
    @torch.library.custom_op(f"brimful_tests::{name}", mutates_args=())
    def scale(x: Tensor, factor: float) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * factor)

    if has_fake:
        scale.register_fake(lambda x, factor: torch.empty_like(x))
    if has_gradient:
        scale.register_autograd(lambda _context, gradient: (gradient * 2, None))
    return scale


def test_an_op_with_a_fake_kernel_is_captured_and_named_as_uncertain() -> None:
    scale = registered("complete", has_fake=True, has_gradient=True)
    job = job_of(lambda x: scale(x, 2.0))
    trace = capture(job, samples=ROWS)
    assert "brimful_tests.complete.default" in {op.name for op in trace.ops}
    estimate = bf.estimate(job, "cpu", micro_batch_size=ROWS)
    assert "brimful_tests.complete.default: neither what it takes inside" in str(estimate)


def test_an_op_without_a_fake_kernel_is_named_with_its_line_and_what_to_register() -> None:
    scale = registered("unregistered", has_fake=False, has_gradient=True)
    with pytest.raises(CaptureError) as raised:
        capture(job_of(lambda x: scale(x, 2.0)), samples=ROWS)
    message = str(raised.value)
    assert "The op 'brimful_tests::unregistered' has no fake kernel" in message
    assert "register_fake('brimful_tests::unregistered') of a function of (x, factor)" in message
    assert f"{__name__.rpartition('.')[2]}.py:" in message


def test_an_op_of_a_library_without_a_fake_kernel_is_named_too() -> None:
    library = torch.library.Library("brimful_tests", "FRAGMENT")
    library.define("twice(Tensor input) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            return torch.ops.brimful_tests.twice(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    with pytest.raises(
        CaptureError, match=r"register_fake\('brimful_tests::twice'\) of a function of \(input\)"
    ):
        capture(job_of(Twice.apply), samples=ROWS)


def test_an_op_without_a_gradient_is_named_with_what_to_register() -> None:
    scale = registered("without_gradient", has_fake=True, has_gradient=False)
    with pytest.raises(CaptureError, match=r"register_autograd\('brimful_tests::without_gradient', backward"):
        capture(job_of(lambda x: scale(x, 2.0)), samples=ROWS)


@pytest.fixture
def _warnings_of_torch_come_each_time() -> Iterator[None]:
    """Torch warns once in a process of the memory of fake tensors, which is an error in tests."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("_warnings_of_torch_come_each_time")
def test_a_kernel_on_the_memory_of_tensors_is_to_be_put_into_an_op() -> None:
    def read(x: Tensor) -> Tensor:
        x.data_ptr()
        return x

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"Put the call into an op of torch\.library\.custom_op"):
            capture(job_of(read), samples=ROWS)


class Kernel:
    """Launched as Triton's are; doubles."""

    __name__ = "double_kernel"

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(x: Tensor, y: Tensor, n: int) -> None:
            assert n == x.numel()
            y.copy_(x * 2)

        return launch


class Autotuner(Kernel):
    """Wraps a kernel, and has no name."""

    def __init__(self) -> None:
        self.fn = Kernel()

    def __getattribute__(self, name: str) -> Any:
        if name == "__name__":
            raise AttributeError(name)
        return super().__getattribute__(name)


def doubled(kernel: Any) -> Callable[[Tensor], Tensor]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            kernel[(1,)](x, y, n=x.numel())
            return y

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    def function(x: Tensor) -> Tensor:
        y: Tensor = Double.apply(x)
        assert y.abs().sum().item() != 0  # what a kernel wrote is not known: not zero as before
        return y

    return function


@pytest.mark.parametrize("kernel", [Kernel(), Autotuner()], ids=["kernel", "autotuner"])
def test_a_launch_of_a_triton_kernel_is_an_op_that_allocates_nothing(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a class that has Triton's interface of launches, which is not installed for a CPU."""
    module = ModuleType("triton.runtime.jit")
    module.KernelInterface = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    job = job_of(doubled(kernel))
    trace = capture(job, A100, samples=ROWS)
    launch = next(op for op in trace.ops if op.name == "triton_kernels.double_kernel.default")
    assert launch.read_bytes + launch.written_bytes >= 2 * ROWS * WIDTH * 4
    assert any("double_kernel" in note for note in trace.uncertain_ops)
    predicted = bf.estimate(job, "cpu", micro_batch_size=ROWS).predicted_peak_allocated_bytes
    measured = bf.measure(job, bf.Settings(micro_batch_size=ROWS), device="cpu").measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=1e-3)


@pytest.mark.slow
def test_a_model_with_kernels_of_liger_is_captured() -> None:
    pytest.importorskip("triton")
    liger = pytest.importorskip("liger_kernel.transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        use_cache=False,
    )  # fmt: skip

    def build() -> nn.Module:
        model = transformers.LlamaForCausalLM(config)
        liger.apply_liger_kernel_to_llama(model=model)
        return model  # type: ignore[no-any-return]

    job = bf.Job(
        model=build,
        loss=lambda model, x: model(input_ids=x, labels=x).loss,
        batch=lambda count: torch.randint(512, (count, 32)),
        name="liger",
    )
    names = {op.name for op in capture(job, A100, samples=4).ops}
    assert "triton_kernels._rms_norm_forward_kernel.default" in names


def test_real_tensors_are_given_to_the_kernel_itself() -> None:
    x = torch.ones(2, WIDTH)
    assert torch.equal(doubled(Kernel())(x), x * 2)
