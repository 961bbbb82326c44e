"""DeepSpeed's ZeRO: shards optimizer state (stage 1), also gradients (2), also parameters (3) over ranks.

DeepSpeed shards the model and steps the optimizer; the loop, the weights of the micro-batches, clipping by the
norm of the whole gradient and schedules stay brimful's. Its engine is configured with one micro-batch per step,
so that it does not scale the loss, and brimful sets where a step ends. It averages over ranks, which the
weights account for.

DeepSpeed steps the optimizer on flat parts of all parameters, not on the parameters. Elementwise optimizers
compute the same that way, and only those are accepted.

Private DeepSpeed API used here: `averaged_gradients`, `all_grad_tensors`, `micro_step_id`, `clip_grad` and the
norms of its optimizers, `_lazy_init_hp_params_optimizer_state`, `ds_tensor` of parameters (checked: DeepSpeed
0.19.8).
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from brimful.distributed.fsdp import Around
from brimful.errors import UsageError
from brimful.execution.attached import parameter_count
from brimful.settings import Parallelism
from brimful.torch_utils.module_names import plain_namer, plain_state
from brimful.trace.zero import STAGES, zero_options

T = TypeVar("T")

ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
)
"""Optimizers that compute each number from its own gradient and state alone. Adagrad is elementwise too, but
DeepSpeed replaces it by another Adagrad, with one group of parameters."""


class ZeroEngine:
    """A model and its optimizer, sharded over ranks by DeepSpeed's ZeRO of stage 1, 2 or 3.

    `model` is equal on each rank, on this rank's `device`, with float32 parameters; `optimizer` has no state
    yet. Raises `UsageError` if DeepSpeed is not installed, or cannot shard these.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, parallelism: Parallelism, device: torch.device
    ) -> None:
        _check_divisible(model, optimizer)
        self.stage = STAGES[parallelism]
        self._deepspeed = _deepspeed(device)
        self._trainable = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._with_gradient: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda p: self._with_gradient.add(id(p)))
            for parameter in model.parameters()
            if id(parameter) in self._trainable
        ]
        self.optimizer = ZeroOptimizer(self, optimizer)
        self.engine, *_others = self._deepspeed.initialize(
            model=Around(model), optimizer=optimizer, config=_config(model, parallelism)
        )
        self._saving = _SavedByName(model) if self.stage == 3 else nullcontext()

    @property
    def zero(self) -> Any:
        """DeepSpeed's own optimizer."""
        return self.engine.optimizer

    def loss(self, compute: Callable[[nn.Module], Tensor]) -> Tensor:
        """The result of `compute` on the model, for a backward pass."""
        with self._saving:
            value: Tensor = self.engine(compute)
        return value

    def computed(self, compute: Callable[[nn.Module], T]) -> T:
        """The result of `compute` on the model, without gradients."""
        found: T = self.engine.module(compute)
        return found

    @contextmanager
    def synchronising(self, is_last: bool) -> Iterator[None]:
        """Context of a micro-batch's forward and backward.

        Raises `UsageError` if a trainable parameter has no gradient.
        """
        self.engine.set_gradient_accumulation_boundary(is_last)
        self._with_gradient.clear()
        yield
        missing = len(self._trainable - self._with_gradient)
        if missing:
            raise UsageError(
                f"{missing} of {len(self._trainable)} trainable parameters had no gradient in a micro-batch of "
                "this rank. Under DeepSpeed's ZeRO each must have one on every rank: it would step them with "
                "none, by their momentum and decay. Freeze them (requires_grad_(False)), or train by DDP."
            )

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole gradient of a step, equal on every rank."""
        if self.stage == 3:
            from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

            norm = combine_grad_norm_groups(self.zero._get_norm_groups())
        else:
            norm = self.zero.scaled_global_norm()
        return norm  # inf where the norm is NaN

    def flat_parts(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """Flat tensors that the optimizer steps on this rank, each with the parameters that it has parts of."""
        if self.stage == 3:
            yield from zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)
        else:
            yield from zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True)

    def whole_state(self, parameter: nn.Parameter, flat_state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's whole optimizer state; a collective call, of which only the first rank has tensors."""
        from deepspeed.utils import safe_get_full_optimizer_state

        is_kept = self.engine.global_rank == 0
        return {
            name: _on_host(safe_get_full_optimizer_state(parameter, name), is_kept=is_kept)
            if _is_flat(name, value)
            else value
            for name, value in flat_state.items()
        }

    def fill_state(self, saved: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Copy this rank's parts of parameters' whole states into the state that exists."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()
        for parameter, state in saved:
            for name, value in state.items():
                if not _is_flat(name, value):
                    continue
                if self.stage < 3:
                    safe_set_full_optimizer_state(parameter, value, name)
                else:
                    safe_set_local_optimizer_state(parameter, self._part(parameter, value), name)

    def _part(self, parameter: Any, value: Tensor) -> Tensor:
        """This rank's part of a tensor that is sharded as `parameter` is; the last part is padded with 0."""
        elements = parameter.ds_tensor.ds_numel
        filled = torch.zeros(elements * self.engine.dp_world_size, dtype=value.dtype)
        filled[: value.numel()] = value.flatten()
        return filled.narrow(0, elements * self.engine.global_rank, elements)

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self.zero.zero_grad()
        for held in (self.zero.averaged_gradients, getattr(self.zero, "all_grad_tensors", {})):
            held.update(dict.fromkeys(held))
        self.zero.micro_step_id = 0 if self.stage == 3 else -1

    def held_tensors(self) -> Sequence[Tensor]:
        """Tensors of this rank that are held between steps, beside parameters and optimizer state."""
        held = [flat for flat, _parameters in self.flat_parts()] if self.stage < 3 else []
        if self.stage == 3:
            held += [self.zero.grad_partitions_flat_buffer]
            held += [bucket.buffer for bucket in self.zero.ipg_buckets.values()]
        return held

    def close(self) -> None:
        """Destroy the engine and its process group."""
        for handle in self._handles:
            handle.remove()
        group = self.engine.data_parallel_group
        self.engine.destroy()
        self._deepspeed.comm.destroy_process_group(group)
        del self.engine
        gc.collect()


class ZeroOptimizer(Optimizer):
    """The job's optimizer over the model's parameters, while DeepSpeed steps it in parts.

    Its groups are the user's and the schedule's to change. Its state is saved and loaded as that of the
    optimizer alone: whole tensors by parameter. `inner` is the job's optimizer before DeepSpeed replaces its
    parameters by flat parts.
    """

    def __init__(self, engine: ZeroEngine, inner: Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self._engine = engine
        self.state = inner.state
        self.inner = inner
        self.max_norm: float | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters, clipped to `max_norm`."""
        for group, flat in zip(self.param_groups, self.inner.param_groups, strict=True):
            flat.update({name: value for name, value in group.items() if name != "params"})
        self._engine.zero.clip_grad = self.max_norm or 0.0
        self._engine.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._engine.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The state as of the optimizer alone; a collective call, of which only the first rank has tensors."""
        numbers = self._numbers()
        return {
            "state": {
                numbers[id(parameter)]: self._engine.whole_state(parameter, self.state[flat])
                for flat, parameters in self._engine.flat_parts()
                if self.state.get(flat)
                for parameter in parameters
            },
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"}
                | {"params": [numbers[id(parameter)] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state, on the host, of an optimizer over the same parameters, sharded or not.

        Raises `ValueError` if the state is of other parameters, or parameters that DeepSpeed steps together
        have different step counts.
        """
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("its groups of parameters have other sizes")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        numbers = self._numbers()
        if state_dict["state"]:
            for flat, parameters in self._engine.flat_parts():
                saved = [state_dict["state"].get(numbers[id(parameter)], {}) for parameter in parameters]
                self.state[flat] = _empty_state(flat, saved)
                self._engine.fill_state(list(zip(parameters, saved, strict=True)))

    def _numbers(self) -> dict[int, int]:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(parameters)}


class _SavedByName(AbstractContextManager[None]):
    """Within, autograd saves a reference to a gathered parameter instead of the gathered memory.

    A linear layer saves a transposed view of its weight, which would keep the gathered memory until backward.
    DeepSpeed gathers the parameter again before the layer's backward; then the view is created again. `model`
    has DeepSpeed's hooks already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_place: dict[int, Any] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._note)  # after DeepSpeed's, which gathers

    def __enter__(self) -> None:
        self._by_place.clear()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *_error: object) -> None:
        self._hooks.__exit__()

    def _note(self, module: nn.Module, _inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._by_place[_place(parameter.data)] = parameter

    def _pack(self, saved: Tensor) -> Any:
        parameter = self._by_place.get(_place(saved))
        if parameter is None or saved.dtype != parameter.dtype or _place(parameter.data) != _place(saved):
            return saved  # another is there by now
        return parameter, saved.shape, saved.stride(), saved.storage_offset() - parameter.data.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, shape, stride, offset = packed
        gathered = parameter.data
        if gathered.numel() != parameter.ds_numel:
            raise RuntimeError("DeepSpeed has not gathered a parameter that a backward needs; train by FSDP2")
        return gathered.as_strided(shape, stride, gathered.storage_offset() + offset)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


class WholeZeroModel(nn.Module):
    """The parameters and buffers of a model whose parameters DeepSpeed shards, whole and on the host.

    Construction is collective; only the first rank, where `is_kept` is true, keeps what it gathers.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool) -> None:
        super().__init__()
        from deepspeed.runtime.zero import GatheredParameters

        parameters = dict(model.named_parameters(remove_duplicate=False))
        gathered: dict[int, Tensor] = {}
        self._whole: dict[str, Any] = plain_state(model)
        plain_name = plain_namer(model)
        for name, parameter in parameters.items():  # in one order on all ranks
            if id(parameter) not in gathered:  # tied ones are gathered once
                with GatheredParameters([parameter]):
                    gathered[id(parameter)] = _on_host(parameter, is_kept=is_kept)
            self._whole[plain_name(name)] = gathered[id(parameter)]

    def state_dict(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own `state_dict`, with whole tensors."""
        return self._whole


_NUMBERS = ("step", "mu_product")
"""Entries of optimizers' states that do not have the shape of their parameter."""


def _is_flat(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in _NUMBERS


def _on_host(value: Tensor, *, is_kept: bool) -> Tensor:
    return value.detach().to("cpu", copy=True) if is_kept else torch.empty(0)


def _empty_state(flat: Tensor, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a flat part: its numbers are those of its parameters, its tensors zero."""
    numbers = [{name: float(each[name]) for name in _NUMBERS if name in each} for each in saved]
    if any(each.keys() != saved[0].keys() for each in saved) or any(each != numbers[0] for each in numbers):
        raise ValueError("its parameters have taken other numbers of steps each, which DeepSpeed cannot resume")
    return {
        name: torch.zeros_like(flat, requires_grad=False) if _is_flat(name, value) else value
        for name, value in saved[0].items()
    }


def _check_divisible(model: nn.Module, optimizer: Optimizer) -> None:
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise UsageError(
            f"{type(optimizer).__name__} is not trained under DeepSpeed's ZeRO, which steps flat parts of all "
            "parameters together: only optimizers that treat each number by itself compute the same. "
            f"Choose one of torch.optim's {names}, or train by DDP or FSDP2."
        )
    others = sorted({str(p.dtype) for p in model.parameters()} - {str(torch.float32)})
    if others:
        raise UsageError(
            f"the model has parameters in {', '.join(others)}; under DeepSpeed's ZeRO they are to be float32 "
            "(precision='bf16' computes in bfloat16). Train by DDP."
        )


def _deepspeed(device: torch.device) -> ModuleType:
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # else DeepSpeed takes a GPU if there is one
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # launchers set it, and DeepSpeed reads it
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise UsageError(
            f"ZeRO is DeepSpeed's, which cannot be imported: {error}. Install it: pip install "
            "deepspeed. Without it, parallelism='fsdp2' divides parameters, gradients and optimizer "
            "state too."
        ) from error
    found = get_accelerator().device_name()
    if found != device.type:
        raise UsageError(
            f"DeepSpeed computes on {found!r} in this process, and this run on {device.type!r}. Set "
            f"DS_ACCELERATOR={device.type} before it is imported."
        )
    # only DeepSpeed's inference uses it, and each process that makes a process group on a CPU compiles it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )  # DeepSpeed's own calls
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # DeepSpeed reports each of its parts
    return deepspeed


def _config(model: nn.Module, parallelism: Parallelism) -> dict[str, Any]:
    """DeepSpeed's configuration, with only the sharding that the stage requires."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_options(parallelism, parameter_count(model.parameters())),
    }
