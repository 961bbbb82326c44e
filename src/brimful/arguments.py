"""What a user gives, checked against type hints: arguments of public functions, and fields of public records.

A check also converts a value to its hint: NumPy's int64 to an `int`, a name to a member of an enumeration, a
list to a tuple. Text is never a truth value, and NaN is not a number. Names that a module imports for type
checkers alone are taken from torch if it is loaded; what is unknown even so is not checked.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin

from msgspec import Meta

from brimful.errors import CallError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")
Check = Callable[[Any], Any]
"""A function that returns the value as its hint says, or raises `_MisfitError`."""

_MOST_SHOWN = 60
"""Characters of a value in an error. A choice."""


class _MisfitError(Exception):
    """A value is of another type than its hint, or, with `is_value`, out of the hint's range."""

    def __init__(self, expected: str, *, is_value: bool = False) -> None:
        super().__init__(expected)
        self.expected = expected
        self.is_value = is_value


def checks_arguments(function: Function, names: Mapping[str, Any] = MappingProxyType({})) -> Function:
    """Check the arguments of a public function, or of a public class when it is made; a decorator.

    The signature's hints decide, `__signature__` before that of the code; `names` are those that hints of its
    module do not know. A call with other arguments than the signature has, and values of other types, raise a
    UsageError that says what is taken.
    """
    if isinstance(function, type):
        function.__init__ = _checked(function.__init__, function, names, is_method=True)  # type: ignore[misc]
        return function
    checked: Function = _checked(function, function, names)
    return checked


def checks_call(record: type[Record]) -> type[Record]:
    """Raise CallError, with the nearest name, if a record is made of other fields than it has; a decorator."""
    make, signature = record.__init__, inspect.signature(record)

    @functools.wraps(make)
    def made(self: Record, *args: Any, **given: Any) -> None:
        try:
            make(self, *args, **given)
        except TypeError:
            try:
                signature.bind(*args, **given)
            except TypeError as misfit:
                raise _call_error(record, signature, given, misfit) from None
            raise

    record.__init__ = made  # type: ignore[assignment]
    return record


def check_fields(record: Any, *, shown: str = "{}") -> None:
    """Check the fields of a dataclass against their hints, in its `__post_init__`.

    Each field, of a frozen dataclass too, gets the value as its hint says; a value of another type, or out of
    range, raises UsageError. `shown` is a field in errors, such as "Job({}=…)".
    """
    kind: Any = type(record)
    for name, check in _field_checks(kind):
        value = getattr(record, name)
        made = _checked_value(shown.format(name), value, check)
        if made is not value:
            object.__setattr__(record, name, made)


def _checked(
    function: Callable[..., Any],
    shown: Callable[..., Any],
    names: Mapping[str, Any],
    *,
    is_method: bool = False,
) -> Any:
    signature = inspect.signature(shown)
    hints: dict[str, Check] = {}  # made on the first call, when all modules are loaded

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        own, args = args[:is_method], args[is_method:]
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            raise _call_error(shown, signature, given, error) from None
        if not hints:
            hints.update(_parameter_checks(signature, {**names, **vars(sys.modules[function.__module__])}))
        for each in filter(hints.__contains__, tuple(bound.arguments)):
            bound.arguments[each] = _checked_value(each, bound.arguments[each], hints[each], shown)
        return function(*own, *bound.args, **bound.kwargs)

    return checked


def _public_name(function: Callable[..., Any]) -> str:
    """Where users find a function: in the first of its packages, from `brimful` on, that has it."""
    owner = function.__qualname__.partition(".")[0]
    parts = function.__module__.split(".")
    packages = (".".join(parts[: count + 1]) for count in range(len(parts)))
    places = [each for each in packages if owner in getattr(sys.modules.get(each), "__all__", ())]
    return f"{[*places, function.__module__][0]}.{function.__qualname__}"


def _call_error(
    function: Callable[..., Any], signature: inspect.Signature, given: Iterable[str], error: TypeError
) -> CallError:
    name = _public_name(function)
    for each in given:
        if each not in signature.parameters:
            near = difflib.get_close_matches(each, signature.parameters, n=1)
            known = f"did you mean {near[0]}?" if near else f"help({name}) lists them."
            return CallError(f"{name}() has no option {each!r}; {known} It takes {_taken(signature)}.")
    return CallError(f"{name}(): {error}. It takes {_taken(signature)}.")


def _taken(signature: inspect.Signature) -> str:
    """The parameters in their order, keywords as "micro_batch_size=…"."""
    by_keyword = [each for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
    positional = [
        each for each in signature.parameters if signature.parameters[each] not in by_keyword and each != "self"
    ]
    shown = [f"{each.name}=…" for each in by_keyword[:_MOST_KEYWORDS]]
    return f"({', '.join([*positional, *shown, *(['…'] if len(by_keyword) > _MOST_KEYWORDS else [])])})"


_MOST_KEYWORDS = 4
"""Options of a function in an error; `help` shows all. A choice."""


def _checked_value(name: str, value: Any, check: Check, function: Callable[..., Any] | None = None) -> Any:
    try:
        return check(value)
    except _MisfitError as misfit:
        text = _shown(value)
        kind = "" if misfit.is_value else f", of type {type(value).__name__}"
        where = (
            ""
            if function is None
            else f" {_public_name(function)}() takes {_taken(inspect.signature(function))}."
        )
        raise UsageError(f"{name} is {text}{kind}; it must be {misfit.expected}.{where}") from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # an object whose text is code of the user's
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _parameter_checks(signature: inspect.Signature, names: Mapping[str, Any]) -> dict[str, Check]:
    return {
        each.name: _check_of(_Names(names).resolve(each.annotation))
        for each in signature.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.annotation is not each.empty
    }


@cache
def _field_checks(record: type) -> tuple[tuple[str, Check], ...]:
    hints: dict[str, Any] = {}
    for each in reversed(record.__mro__):
        names = _Names(vars(sys.modules[each.__module__]))
        hints |= {name: names.resolve(hint) for name, hint in vars(each).get("__annotations__", {}).items()}
    return tuple((each.name, _check_of(hints[each.name])) for each in fields(record) if each.init)


class _Names(dict[str, Any]):
    """What names in the hints of a module mean."""

    def resolve(self, hint: Any) -> Any:
        """The hint itself, if it is written as text."""
        if isinstance(hint, ForwardRef):
            hint = hint.__forward_arg__
        return eval(hint, {}, self) if isinstance(hint, str) else hint

    def __getitem__(self, name: str) -> Any:
        if name in self:
            found = super().__getitem__(name)
            return self.resolve(found) if isinstance(found, str) else found  # an alias, written as text
        if hasattr(builtins, name):
            raise KeyError(name)
        torch = sys.modules.get("torch")
        places = (torch, getattr(torch, "optim", None), getattr(torch, "nn", None))
        return (
            torch
            if name == "torch" and torch
            else next((getattr(place, name) for place in places if hasattr(place, name)), Any)
        )


def _check_of(hint: Any) -> Check:
    """The check of a hint; one that is not understood permits any value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _within(_check_of(arguments[0]), hint.__metadata__)
    if origin in (Union, UnionType):
        return _any_of(arguments)
    if origin is Literal:
        return _one_of(arguments)
    kind = origin or hint
    if not isinstance(kind, type):
        return _same
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if issubclass(kind, Enum):
        return functools.partial(_member, kind)
    if kind is not tuple and issubclass(kind, Mapping):
        return functools.partial(_instance, Mapping, "a dict")
    if kind is Iterable:  # of any length, such as a generator; code that takes it reads it once
        return _iterable
    if issubclass(kind, Iterable) and origin is not None:
        return functools.partial(_several, _element_check(arguments), kind is tuple)
    if issubclass(kind, os.PathLike):
        return _simple((str, os.PathLike), "a path")
    return functools.partial(_instance, kind, _with_article(kind))


def _element_check(arguments: tuple[Any, ...]) -> Check:
    """The check of each element; objects of classes other than records are left to the code that takes them."""
    of = _check_of(arguments[0]) if arguments else _same
    is_instance = isinstance(of, functools.partial) and of.func is _instance
    return _same if is_instance and not is_dataclass(arguments[0]) else of


def _iterable(value: Any) -> Any:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise _MisfitError("a list")
    return value


def _within(check: Check, metadata: Iterable[Any]) -> Check:
    limits = [(name, limit) for each in metadata if isinstance(each, Meta) for name, limit in _limits(each)]

    def checked(value: Any) -> Any:
        made = check(value)
        for (holds, says), limit in limits:
            if not holds(made, limit):
                raise _MisfitError(f"{says} {limit}", is_value=True)
        return made

    return checked


def _limits(meta: Meta) -> list[tuple[tuple[Callable[[Any, Any], bool], str], Any]]:
    every = {
        (operator.ge, "at least"): meta.ge,
        (operator.gt, "more than"): meta.gt,
        (operator.le, "at most"): meta.le,
        (operator.lt, "less than"): meta.lt,
    }
    return [(how, limit) for how, limit in every.items() if limit is not None]


def _any_of(hints: tuple[Any, ...]) -> Check:
    checks = [(_check_of(hint), get_origin(hint) is Literal) for hint in hints]

    def checked(value: Any) -> Any:
        expected, of_value, is_value = [], None, False  # texts: errors would hold this frame in a cycle
        for check, is_literal in checks:
            try:
                return check(value)
            except _MisfitError as misfit:
                expected.append(misfit.expected)
                is_value = is_value or misfit.is_value
                if misfit.is_value and of_value is None and not is_literal:  # of the right type
                    of_value = misfit.expected
        if of_value is not None:
            raise _MisfitError(of_value, is_value=True)
        listed = " or ".join(filter(None, [", ".join(expected[:-1]), expected[-1]]))
        raise _MisfitError(listed, is_value=is_value)

    return checked


def _one_of(values: tuple[Any, ...]) -> Check:
    def checked(value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in values):
            return value
        is_value = any(type(value) is type(each) for each in values)
        raise _MisfitError(" or ".join(f'"{each}"' for each in values), is_value=is_value)

    return checked


def _same(value: Any) -> Any:
    return value


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):  # as options of a script often are
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise _MisfitError("True or False")


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _MisfitError("a whole number")
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _MisfitError("a number")
    if math.isnan(value):
        raise _MisfitError("a number", is_value=True)
    return value if isinstance(value, (int, float)) else float(value)


def _simple(kind: Any, expected: str) -> Check:
    def checked(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        raise _MisfitError(expected)

    return checked


def _member(kind: type[Enum], value: Any) -> Enum:
    if type(value) is kind:
        return value
    names = f"one of {', '.join(str(each.value) for each in kind)}"
    try:
        return kind(value)
    except (ValueError, TypeError):
        raise _MisfitError(names, is_value=isinstance(value, str)) from None


def _instance(kind: type, expected: str, value: Any) -> Any:
    try:
        fits = isinstance(value, kind)
    except TypeError:  # a protocol that is for type checkers alone
        fits = not isinstance(value, (str, int, float, NoneType))
    except Exception:  # an attribute that a protocol asks for raises
        fits = False
    if fits:
        return value
    is_file = isinstance(value, (str, os.PathLike)) and hasattr(kind, "load")
    raise _MisfitError(f'{expected} ({kind.__name__}.load("{value}") reads one)' if is_file else expected)


def _several(check: Check, makes_tuple: bool, value: Any) -> Any:
    is_list = isinstance(value, Iterable) and isinstance(value, Sized)
    if not is_list or isinstance(value, (str, bytes, Mapping)):
        raise _MisfitError("a list")
    try:
        made = value if check is _same else [check(each) for each in value]
    except _MisfitError as misfit:
        raise _MisfitError(f"a list, each {misfit.expected}") from None
    except TypeError:  # a tensor without dimensions has a length by its type alone
        raise _MisfitError("a list") from None
    return tuple(made) if makes_tuple else value


def _with_article(kind: type) -> str:
    public = {"Module": "nn.Module"}
    name = public.get(kind.__name__, kind.__name__)
    return name if name.endswith("s") else f"a{'n' if name[0] in 'AEIOUaeion' else ''} {name}"


_SIMPLE: dict[Any, Check] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _simple(str, "text"),
    NoneType: _simple(NoneType, "None"),
    Callable: _simple(Callable, "a function"),
    object: _same,
    Any: _same,
}
