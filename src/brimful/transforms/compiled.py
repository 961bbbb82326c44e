"""Forwards compiled in place by `torch.compile`: classes, hooks and `state_dict` keys stay as they are.

A forward is compiled as one graph with the sizes that it is given. One that breaks the graph, or does not
compile, runs eagerly from then on, with one warning. Modules that are alike share their compiled code, also
where a model has many kinds of them: torch counts recompilations of each kind by itself. Hooks of the module
run outside of the compiled code: FSDP2's gather and free its parameters.

Private torch APIs used here: `nn.Module._compiled_call_impl`, which `nn.Module.compile` sets,
`torch._dynamo.config`, `torch._dynamo.exc` and `torch._inductor.cpp_builder` (checked: torch 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Action, Compile, Settings, Span, has_input_ops
from brimful.torch_utils.module_names import unwrapped

Compiled = Callable[..., Any]
"""A compiled function of a module and the arguments of its call."""


class CompiledModules:
    """Compiles modules; `backend` is that of `torch.compile`."""

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend
        self._functions: dict[Hashable, Compiled] = {}

    def call_of(self, module: nn.Module, fqn: str) -> CompiledCall:
        """What is called in the module's place; nothing is compiled before its first call."""
        return CompiledCall(module, fqn, self.function_for(module))

    def function_for(self, module: nn.Module) -> Compiled:
        """The compiled function of all modules that are like this one, with the module as first argument."""
        if own := vars(module).get("forward"):  # of this instance, not of its class

            def forward(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return own(*args, **kwargs)

            return self._compiled(forward)
        kind = _kind_of(module)
        if kind not in self._functions:
            # torch keeps what it compiled with the code object, so each kind has its own.
            forward = FunctionType(_forward.__code__.replace(), _forward.__globals__)
            self._functions[kind] = self._compiled(forward)
        return self._functions[kind]

    def _compiled(self, forward: Compiled) -> Compiled:
        return torch.compile(forward, backend=self._backend, fullgraph=True, dynamic=False)


class CompiledCall:
    """Stands in for a module's forward: the compiled one, or the eager one where that does not compile."""

    def __init__(self, module: nn.Module, fqn: str, compiled: Compiled) -> None:
        self.forward: Callable[..., Any] = module.forward
        """The original bound method."""
        self._module, self._fqn = module, fqn
        self._compiled: Compiled | None = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward."""
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self._compiled is not None:
            try:
                # Blocks that know their number, as those of transformers with a cache, are compiled one by one.
                with config.patch(recompile_limit=config.accumulated_recompile_limit):
                    return self._run(self._compiled, args, kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._compiled = None
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                what = repr(self._fqn) if self._fqn else "the model"
                self._note(f"{what} runs eagerly, as torch.compile does not compile it as one graph: {reason}")
        return self.forward(*args, **kwargs)

    def _run(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compiled(self._module, *args, **kwargs)

    def _note(self, text: str) -> None:
        warnings.warn(text, stacklevel=4)


def compiled_calls(
    settings: Settings, modules: dict[str, nn.Module], compiled: CompiledModules | None
) -> Iterator[tuple[nn.Module, CompiledCall]]:
    """The modules that settings compile, each with what is called in its place.

    `modules` are those of the model by name. `compiled` compiles them; None compiles for the device that they
    are on. Raises `UsageError` if there is nothing to compile, something is compiled already, or the compiler
    is missing.
    """
    if settings.compile is Compile.NONE:
        return
    chosen = {"": modules[""]} if settings.compile is Compile.MODEL else dict(_kept(settings, modules))
    if not chosen and not settings.changed:
        raise UsageError(
            f"compile='units' compiles units that are modules and are kept, and of {len(settings.units)} units "
            'in the settings none is. `bf.estimate(job, "cpu", compile="units").settings` names them; '
            "compile='model' compiles all."
        )
    inner = (module for each in chosen.values() for module in each.modules())
    if any(module._compiled_call_impl is not None or unwrapped(module) is not module for module in inner):
        raise UsageError(
            f"compile={str(settings.compile)!r} compiles the model, and it is compiled or wrapped already. "
            "Give it as it was before."
        )
    if compiled is None:
        if all(parameter.device.type == "cpu" for parameter in modules[""].parameters()):
            _check_cpp_compiler()
        compiled = CompiledModules()
    for fqn, module in chosen.items():
        yield module, compiled.call_of(module, fqn)


def _kept(settings: Settings, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Units that are kept and are modules; runs of a Sequential have no call of their own."""
    for unit in settings.units:
        if unit.action is Action.KEEP and Span.parse(unit.fqn) is None and not has_input_ops(unit.fqn):
            if unit.fqn not in modules:
                raise UnknownNameError("unit", unit.fqn, filter(None, modules))
            yield unit.fqn, modules[unit.fqn]


def _check_cpp_compiler() -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:  # InvalidCxxCompiler
        asked = ", ".join(str(name) for name in config.cpp.cxx if name)
        raise UsageError(
            f"compile needs a C++ compiler on a CPU, and torch found none ({asked}). Install g++ or clang, or "
            "set CXX to its path; without one, leave compile out. bf.estimate predicts it all the same."
        ) from error


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _kind_of(module: nn.Module) -> Hashable:
    """What is the same in modules that share compiled code: their class and their tensors."""
    named = (*module.named_parameters(), *module.named_buffers())
    return type(module), tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in named
    )
