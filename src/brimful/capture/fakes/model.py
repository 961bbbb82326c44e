"""A job's model on fake tensors: its structure without its weights.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._foreach_utils`,
`torch._C._DisableTorchDispatch` (checked: 2.13).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from brimful.capture.fakes.attached import (
    add_attached,
    attach_in_place,
    attach_to_parameters,
    copied_on_meta,
    on_meta,
    quantise,
)
from brimful.capture.fakes.cache import spanned_bytes
from brimful.capture.fakes.wrapper import Wrapper
from brimful.capture.values.known import KnownValues
from brimful.errors import CaptureError, UsageError
from brimful.execution.attached import is_of_library, stay_trainable
from brimful.job import Job
from brimful.torch_utils.built_modules import noting_built_modules
from brimful.torch_utils.module_names import check_runs_on_one_device
from brimful.torch_utils.replaced import replace_attribute, replaced
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor, remade
from brimful.trace import Guess

HUGE_BYTES = 2**30
"""A tensor of this size is not made for real while a model is built. A choice."""


def fake_model(job: Job) -> nn.Module:
    """The job's model with parameters that have shapes and no values; raises as `build_fake_model` does."""
    return build_fake_model(job, FakeTensorMode(allow_non_fake_inputs=True), KnownValues(Guess.EXPECTED))


def build_fake_model(job: Job, mode: FakeTensorMode, known: KnownValues) -> nn.Module:
    """The job's model with fake CPU parameters and buffers of the same shapes and types, in training mode.

    A model that is given as a module is copied, sharing nothing that training changes. One that is given as a
    function is built for real, each parameter moved to `meta` as it registers, so that constructors may compute
    while no memory is taken for weights. If the function returns modules that it did not build, such as a model
    that is trained now, what it returns is copied too. `known` keeps the values of the buffers.

    Raises `UsageError` if `job.model` is not a module and does not return one, and `CaptureError` if the model
    cannot be built without its weights.
    """
    if isinstance(job.model, nn.Module):
        check_runs_on_one_device(job.model, job=job.name)
        return _copied(job.model, mode, known)
    try:
        with _parameters_on_meta(), noting_built_modules() as is_built:
            model = job.model()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise CaptureError(
            f"the model of {job.name!r} reads its weights while it is built, and there are none to read: "
            f"{error}. Build it yourself and give the module instead of the function."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {job.name!r} is built as a {type(model).__name__}, not an nn.Module.")
    check_runs_on_one_device(model, job=job.name)
    if not is_built(model):
        return _copied(model, mode, known)
    quantise(model, "meta")
    _replace_tensors(model, mode, known)
    stay_trainable(model)
    return model.train()


def _copied(original: nn.Module, mode: FakeTensorMode, known: KnownValues) -> nn.Module:
    """A copy of a model, in training mode, with fakes in the place of its parameters and buffers."""
    wrapper = Wrapper()
    fakes = {id(tensor): to_fake(tensor, mode, wrapper=wrapper) for tensor in _tensors(original)}
    for tensor in original.buffers():
        known.remember(fakes[id(tensor)], tensor)
    add_attached(original, fakes, mode, wrapper)
    model = copy.deepcopy(original, fakes)
    attach_to_parameters(original, fakes)
    with mode:
        quantise(model, "cpu")
    for module, copied in zip(original.modules(), model.modules(), strict=True):
        if module._compiled_call_impl is not None:  # a copy forgets it; here it only is noted
            copied.compile(backend="eager")
    stay_trainable(model)
    return model.train()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter
    kinds: set[type] = set()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and is_of_library(param) and type(param) not in kinds:
            kinds.add(type(param))
            stack.enter_context(copied_on_meta(type(param)))
        if param is not None and not _is_lazy(param) and param.device.type != "meta":
            module._parameters[name] = on_meta(param)

    with (
        ExitStack() as stack,
        replaced(nn.Module, "register_parameter", register_on_meta),
        replaced(torch, "empty", _empty_on_meta_if_huge(torch.empty)),
        replaced(Tensor, "normal_", _drawn_if_real(Tensor.normal_)),
        replaced(Tensor, "uniform_", _drawn_if_real(Tensor.uniform_)),
        replaced(nn.Module, "to", _without_device(nn.Module.to)),
        replaced(nn.Module, "cuda", _quantised),
    ):
        # Not by `replaced`: it stands in for what is read. Only an assignment that would raise becomes another.
        stack.callback(replace_attribute(Tensor, "data", _data_on_meta()))
        yield


def _quantised(module: nn.Module, *_device: Any, **_named: Any) -> nn.Module:
    """Quantise a module as moving it to a device does, without moving it."""
    quantise(module, "meta")
    return module


def _empty_on_meta_if_huge(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty`, by which layers make their weights: those of `HUGE_BYTES` are on `meta` from the start.

    Memory that nothing writes to is free, but address space is not: an allocation larger than the machine's
    memory fails, and so does a fork of a process whose heap has grown to such a size.
    """

    def empty(*size: Any, **options: Any) -> Tensor:
        if options.get("device") is not None or "out" in options:
            return make(*size, **options)
        on_meta = make(*size, **options | {"device": "meta", "pin_memory": False})
        return on_meta if on_meta.nbytes >= HUGE_BYTES else make(*size, **options)

    return empty


def _drawn_if_real(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that draws a tensor's numbers, skipped on `meta`: there it draws nothing and takes 0.5 ms."""

    def drawn(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if tensor.is_meta and not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        return draw(tensor, *args, **options)

    return drawn


def _data_on_meta() -> property:
    """`Tensor.data`, whose setter gives a tensor on `meta` only the shape, strides and type of a real one.

    Initialisers that draw or copy weights set it: `layer.weight.data = torch.randn(8, 8)`.
    """
    own: Any = Tensor.data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        own.__set__(tensor, torch.Tensor.to(value.detach(), "meta") if tensor.is_meta else value)

    return property(own.__get__, set_data, own.__delete__)


def _without_device(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Module.to` without the device, which need not be there."""

    def moved(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device, dtype, _non_blocking, memory_format = torch._C._nn._parse_to(*args, **options)
        to(module, dtype=dtype, memory_format=memory_format)
        return module if device is None or device.type == "meta" else _quantised(module)

    return moved


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _replace_tensors(model: nn.Module, mode: FakeTensorMode, known: KnownValues) -> None:
    """Put fakes in the place of all parameters and buffers; what was shared stays shared."""
    fakes: dict[int, Any] = {}
    wrapper = Wrapper()
    for original in _tensors(model):
        fakes[id(original)] = to_fake(original, mode, wrapper=wrapper)
        known.remember(fakes[id(original)], original)
    add_attached(model, fakes, mode, wrapper)
    attach_in_place(model, fakes)
    for module in {*model.modules(), *_modules_in_lists(model)}:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in fakes:
                # By setattr, not through `_parameters`: an RNN keeps a second list of its weights.
                setattr(module, name, fakes[id(tensor)])


def _modules_in_lists(model: nn.Module) -> Iterator[nn.Module]:
    """Modules in plain lists, tuples and dicts, of whose parameters the model may keep a list of its own."""
    left: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif type(value) in (list, tuple, dict) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


@contextmanager
def _fakes_in_lists() -> Iterator[None]:
    """Let torch's choice of foreach kernels take fake tensors for the plain ones they stand for."""
    lists: list[list[Any]] = [
        _foreach_utils._foreach_supported_types,
        optimizer_module._foreach_supported_types,
    ]
    for supported in lists:
        supported.append(FakeTensor)
    try:
        yield
    finally:
        for supported in lists:
            supported.remove(FakeTensor)


@contextmanager
def fakes_behave() -> Iterator[None]:
    """Let fake tensors pass for the real ones they stand for, where torch treats them otherwise."""
    with _fakes_in_lists(), _fakes_converted_in_place(), _fakes_in_text():
        yield


@contextmanager
def no_gradient_overflows() -> Iterator[None]:
    """Let a loss scaler step its optimizer without the check for overflow, which fake tensors cannot answer.

    Source: torch/amp/grad_scaler.py, GradScaler._maybe_opt_step (checked: 2.13).
    """

    def step(_scaler: GradScaler, optimizer: Optimizer, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    with replaced(GradScaler, "_maybe_opt_step", step):
        yield


@contextmanager
def _fakes_in_text() -> Iterator[None]:
    """Let a fake number be formatted as a number: some models name their parts so."""
    plain = Tensor.__format__

    def as_number(tensor: Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else plain(tensor, spec)

    with replaced(Tensor, "__format__", as_number):
        yield


@contextmanager
def _fakes_converted_in_place() -> Iterator[None]:
    """Let `module.to(dtype)` change fake parameters as it changes real ones, by setting their data.

    Torch swaps fakes instead, which it cannot do once anything refers to them weakly, as the recorder does.

    Source: torch/nn/modules/module.py, Module._apply (checked: 2.13).
    """
    apply = nn.Module._apply

    def apply_to_fakes(
        module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        if not any(isinstance(tensor, FakeTensor) for tensor in _tensors(module)):
            return apply(module, convert, recurse)
        for part in module.modules() if recurse else (module,):
            for parameter in part._parameters.values():
                for tensor in (parameter, None if parameter is None else parameter.grad):
                    if tensor is not None:
                        with torch.no_grad():
                            tensor.data = convert(tensor)
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else convert(buffer)
        return module

    with replaced(nn.Module, "_apply", apply_to_fakes):
        yield


@contextmanager
def fakes_can_be_copied() -> Iterator[None]:
    """Let `copy.deepcopy`, which averages of weights use, clone fake tensors; torch reads their memory."""

    def copied(fake: FakeTensor, memo: dict[int, Any]) -> Tensor:
        if id(fake) not in memo:
            clone = fake.detach().clone().requires_grad_(fake.requires_grad)
            if isinstance(fake, nn.Parameter):
                clone._is_param = True  # what makes a fake one an nn.Parameter
            memo[id(fake)] = clone
        copy: Tensor = memo[id(fake)]
        return copy

    with replaced(FakeTensor, "__deepcopy__", copied):
        yield


def to_fake(tensor: Tensor, mode: FakeTensorMode, *, parts: int = 1, wrapper: Wrapper | None = None) -> Tensor:
    """A fake CPU tensor or parameter of the same shape, layout and type as `tensor`, which may be on `meta`.

    It has no memory, and requires a gradient if `tensor` does. Its storage holds `parts` such tensors, and it
    is the first of them. `wrapper` makes the fakes of many tensors. Raises `CaptureError` if `tensor` has no
    shape yet.
    """
    if _is_lazy(tensor):
        raise CaptureError("a lazy parameter has no shape yet. Run one forward pass first, or give the sizes.")
    if is_wrapper_tensor(tensor):
        maker, storages = wrapper or Wrapper(), dict[int, torch.UntypedStorage]()
        return remade(tensor, lambda inner: maker.fake_view(mode, inner, storages))
    if parts == 1:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            meta.requires_grad_(tensor.requires_grad)
        made: Tensor = (wrapper or Wrapper()).fake(mode, meta, torch.device("cpu"))
        if isinstance(tensor, nn.Parameter):
            made._is_param = True  # what makes a fake one an nn.Parameter
        return made
    with mode:
        numel = parts * spanned_bytes(tensor) // tensor.element_size()
        whole = torch.empty(numel, dtype=tensor.dtype, device="cpu")
        fake = whole.as_strided(tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
