"""What goes wrong is told clearly, and a capture leaves the process as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from brimful.errors import CaptureError, LossError, UsageError
from brimful.settings import Precision
from helpers.captured_jobs import A100, CLASSES, CPU, INPUTS, capture, cross_entropy, job, mlp


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the third gate is stuck")


@contextmanager
def same_state_after() -> Iterator[None]:
    def state() -> tuple[object, ...]:
        return (
            gc.isenabled(),
            dict(module_hooks._global_forward_hooks),
            dict(module_hooks._global_forward_pre_hooks),
            nn.Module.register_parameter,
            list(_foreach_utils._foreach_supported_types),
            list(optimizer_module._foreach_supported_types),
            _foreach_utils._get_foreach_kernels_supported_devices(),
            torch.get_rng_state.__name__,
            len(_get_current_dispatch_mode_stack()),
            len(_get_current_function_mode_stack()),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
        )

    before = state()
    yield
    assert state() == before


def softmax_dtype_under_autocast() -> torch.dtype:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.randn(2, 3).bfloat16().softmax(-1).dtype


@pytest.mark.parametrize("model", [mlp, Failing])
@pytest.mark.parametrize("device", [CPU, A100])
@pytest.mark.parametrize("collecting", [True, False])
def test_the_process_is_as_before_even_after_an_error(
    model: Callable[[], nn.Module], device: object, collecting: bool
) -> None:
    dtype = softmax_dtype_under_autocast()
    if not collecting:
        gc.disable()
    try:
        with same_state_after():
            try:
                capture(job(model), device, precision=Precision.BF16, recompute=("",))
            except CaptureError:
                assert model is Failing
    finally:
        gc.enable()
    assert softmax_dtype_under_autocast() is dtype  # the kernels registered for autocast are gone


def test_a_module_whose_capture_fails_is_left_as_it_was() -> None:
    model = Failing()
    with pytest.raises(CaptureError):
        capture(job(model), recompute=("inner",))
    assert "forward" not in model.inner.__dict__
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_an_error_in_the_model_says_what_failed_and_for_which_job() -> None:
    with pytest.raises(CaptureError, match=r"'doors'.*RuntimeError: the third gate is stuck") as caught:
        capture(job(Failing, name="doors"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def swapped(batch: dict[str, Tensor], model: nn.Module) -> Tensor:
    return cross_entropy(model, batch)


def of_outputs(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class OfOutputs(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (swapped, r"is a function of \(batch, model\) \(.*test_errors_and_state\.py:\d+\)"),
        (of_outputs, r"is a function of \(output, target\) \("),
        (nn.CrossEntropyLoss(), "is CrossEntropyLoss of torch"),
        (OfOutputs(), r"is a function of \(output, target\) \("),
        (F.mse_loss, "is mse_loss of torch"),
    ],
)
def test_an_error_in_a_loss_of_other_arguments_says_how_a_loss_is_called(
    loss: Callable[..., Tensor], said: str
) -> None:
    called = rf"`loss` is called as loss\(model, batch\), and the loss of 'digits' {said}"
    with pytest.raises(CaptureError, match=called):
        capture(job(name="digits", loss=loss))


def test_an_error_elsewhere_says_nothing_of_how_a_loss_is_called() -> None:
    def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise RuntimeError("the third gate is stuck")

    def unfortunate_names(x: nn.Module, y: dict[str, Tensor]) -> Tensor:
        return cross_entropy(x, y)

    def no_optimizer(parameters: object) -> torch.optim.Optimizer:
        raise RuntimeError("the third gate is stuck")

    class AsModule(nn.Module):
        forward = staticmethod(failing)

    for stuck in (job(loss=failing), job(loss=AsModule()), job(loss=unfortunate_names, optimizer=no_optimizer)):
        with pytest.raises(CaptureError, match="third gate") as caught:
            capture(stuck)
        assert "is called as" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch["x"]), "must be a scalar"),
        (lambda model, batch: cross_entropy(model, batch).detach(), "has no gradient"),
        (lambda model, batch: {"loss": cross_entropy(model, batch)}, "is a dict, not a tensor"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_a_loss_error(loss: Callable[..., object], said: str) -> None:
    with pytest.raises(LossError, match=said):
        capture(job(loss=loss))  # type: ignore[arg-type]


def test_a_model_without_trainable_parameters_is_a_usage_error() -> None:
    def frozen() -> nn.Module:
        return mlp().requires_grad_(False)

    with pytest.raises(UsageError, match="no parameter requires a gradient"):
        capture(job(frozen))


def test_a_factory_that_builds_no_module_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"is built as a int, not an nn\.Module"):
        capture(job(lambda: 3))  # type: ignore[arg-type, return-value]


def test_a_lazy_layer_is_a_capture_error_that_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match="Run one forward pass first"):
        capture(job(lambda: nn.Sequential(nn.LazyLinear(CLASSES))))


def test_a_constructor_that_reads_its_weights_is_told_to_be_given_as_a_module() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(INPUTS, CLASSES)
            self.scale = self.linear.weight.abs().max().item()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    with pytest.raises(CaptureError, match="give the module instead"):
        capture(job(Reader))
    assert capture(job(Reader())).ops


def test_constructors_may_compute_and_draw_random_numbers() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
            self.layers = nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(INPUTS, CLASSES))
            nn.init.trunc_normal_(self.layers[-1].weight, std=0.02)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    assert capture(job(Computed)).ops


def test_code_that_warns_of_deprecation_warns_in_real_steps_alone() -> None:
    class Deprecated(Failing):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("the third gate has another name now", FutureWarning, stacklevel=1)
            return self.inner(x)

    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(job(Deprecated))
        assert not caught
        Deprecated()(torch.randn(2, INPUTS))
    assert [each.category for each in caught] == [FutureWarning]
    assert warnings.filters == filters


def test_the_random_state_of_the_process_is_the_callers_to_draw_from() -> None:
    """A capture draws what building the model and the batch draws, on fake tensors nothing more."""
    torch.manual_seed(0)
    capture(job(mlp()))
    after_capture = torch.rand(1)
    torch.manual_seed(0)
    job(mlp()).batch(8)  # type: ignore[operator]
    assert torch.equal(torch.rand(1), after_capture)


def test_functional_dropout_out_of_training_is_nothing() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(F.dropout(model(batch["x"]), 0.5, training=False), batch["y"])

    assert not [op for op in capture(job(loss=loss), A100).ops if op.random]


def test_transformers_is_told_the_truth_again_after_a_capture() -> None:
    pytest.importorskip("transformers")
    import transformers.utils.import_utils as import_utils

    before = import_utils.is_fake_tensor
    capture(job())
    assert sys.modules["transformers.utils.import_utils"].is_fake_tensor is before


def test_a_batch_from_an_iterator_that_ends_is_refused_in_words() -> None:
    batches = iter([])
    with pytest.raises(CaptureError, match=r"Job\.batch is called several times"):
        capture(job(batch=lambda _n: next(batches)))


DEEP = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (2**20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
import torch, brimful as bf

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.weight
        for _ in range(8000):
            x = -x
        return x

job = bf.Job(model=Chain, loss=lambda model, batch: model(batch).mean(), batch=lambda n: torch.ones(n, 4))
bf.estimate(job, "cpu", micro_batch_size=2)
assert resource.getrlimit(resource.RLIMIT_STACK)[0] == 2**20
print("estimated")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the stack of a running process does not grow")
def test_a_long_chain_of_autograd_nodes_does_not_overflow_the_stack():
    """Torch frees nodes that Python has seen by recursion; 5,000 of them overflow 1 MiB of stack."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "estimated\n"), done.stderr
