"""User input → a `Job`: a built-in name, `package.module:NAME` or `path/to/file.py:NAME`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from brimful.arguments import checks_arguments
from brimful.errors import UnknownNameError, UsageError
from brimful.job import DEFAULT_NAME, Job
from brimful.models.hub import hub_job, is_path, known_models
from brimful.models.text import TEXT_ARCHITECTURES
from brimful.models.variants import with_variant
from brimful.models.vision import VISION_ARCHITECTURES
from brimful.options import VARIANT_OPTIONS
from brimful.utils.files import is_file

_ARCHITECTURES = TEXT_ARCHITECTURES | VISION_ARCHITECTURES
_FORMS = (
    "`brimful models` lists names. A model of your own is path/to/file.py:NAME or package.module:NAME, where "
    "NAME is a brimful.Job or a function that returns one."
)


def architecture_names() -> tuple[str, ...]:
    """The names that `find_architecture` accepts."""
    return tuple(_ARCHITECTURES)


_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def _other_ways(file: Path) -> str:
    """What to do with a file that names no model, as a sentence; "" where nothing is known of it."""
    if file.suffix == ".ipynb":
        return (
            " In a notebook write `with brimful.watch():` around the training loop. Or turn it into a script "
            f"(jupyter nbconvert --to script {file})."
        )
    if file.suffix in _WEIGHTS:
        return " It may have the weights of a model; give the code or config.json of that model."
    return ""


@checks_arguments
def find_architecture(name: str, /, **options: Any) -> Job:
    """Find the job of an architecture by name, with random weights and random samples.

    Args:
        name: One of `architecture_names()`; an id on the Hugging Face Hub ("Qwen/Qwen2.5-0.5B"), of which only
            config.json is read, from the package, the local cache or the network; a local directory or
            config.json of transformers or diffusers; or "timm/NAME".
        **options: Options of the architecture, such as `sequence_length=128` or `image_size=64`; the tables in
            `text` and `vision` list all options with their defaults. `dtype="bf16"` is the type of the weights;
            `lora="r=16"` trains adapters over frozen weights, `quantize="nf4"` with those in 4 bits.

    Returns:
        A job that builds its model on demand; finding it costs nothing.

    Raises:
        UnknownNameError: No architecture has the name.
        UsageError: The architecture does not have an option, or does not accept its value; its configuration
            cannot be had; its library is not installed.
    """
    factory = _architecture(name)
    variant = {option: options.pop(option, None) for option in VARIANT_OPTIONS}
    _check_options(name, factory, options)
    return with_variant(factory(**options), **variant)


def _architecture(name: str) -> Callable[..., Job]:
    """What makes the job of an architecture from its options."""
    factory = _ARCHITECTURES.get(name) or hub_job(name)
    if factory is None:
        if is_file(Path(name)):
            why = f"it is neither Python (.py) nor JSON.{_other_ways(Path(name))}"
            raise UsageError(f"{name} is a file, but names no model: {why} {_FORMS}")
        if is_path(name):
            raise UsageError(f"there is no file or directory {name!r} (looked in {Path.cwd()}). {_FORMS}")
        short = [known.rpartition("/")[2] for known in known_models()]
        raise UnknownNameError("model", name, [*_ARCHITECTURES, *short], hint=_FORMS)
    return factory


def resolve_job(text: str, /, **options: Any) -> Job:
    """Find the job that `text` names.

    Args:
        text: `package.module:factory` (the current directory counts as importable),
            `path/to/file.py:factory`, or a name as for `find_architecture`. The factory returns a Job.
        **options: Arguments for the factory; `dtype`, `lora` and `quantize` that it does not take are those of
            `find_architecture`.

    Returns:
        The result of the factory; a job without a name of its own is named after it.

    Raises:
        UnknownNameError: No built-in architecture has the name, or the module has no such factory.
        UsageError: The module or file does not exist, the factory does not take the options, or it returns
            something other than a Job.
    """
    place = _place(text)
    if place is None:
        return find_architecture(text, **options)
    factory = _find_factory(*place)
    own = _named_parameters(factory)
    variant = {name: None if name in own else options.pop(name, None) for name in VARIANT_OPTIONS}
    job = with_variant(_call_factory(text, factory, options), **variant)
    return replace(job, name=place[1]) if job.name == DEFAULT_NAME else job


def option_names(text: str) -> Collection[str]:
    """The options of the model that `text` names, as for `resolve_job`."""
    place = _place(text)
    return _named_parameters(_architecture(text) if place is None else _find_factory(*place))


def _place(text: str) -> tuple[str, str] | None:
    """The module or file that `text` names, and the name in it; None if it names an architecture."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(
            f"{text!r} has bytes that are not UTF-8, so no plan could name it. Rename it, "
            "or change to its directory and name the file alone."
        )
    target, colon, attribute = text.rpartition(":")
    if not colon and text.endswith(".py"):
        _check_file(Path(text))
        raise UsageError(
            f"{text!r} names a file. Add the function in it that returns a brimful.Job: "
            f"{text}:{_factory_in(text)}"
        )
    if not colon:
        return None
    if not target or not attribute:
        raise UsageError(f"{text!r} names no model. {_FORMS}")
    return target, attribute


def _named_parameters(factory: Any) -> Collection[str]:
    """Names of the arguments of a factory; those of every model too if it takes any."""
    try:
        parameters = inspect.signature(factory).parameters if callable(factory) else {}
    except (TypeError, ValueError):
        return ()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return VARIANT_OPTIONS if takes_any else parameters


def _factory_in(file: str) -> str:
    """The name in a file that most likely returns or is a Job; found without running the file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "NAME"
    for statement in tree.body:
        makes_job = any(
            isinstance(node, ast.Call) and "Job" in ast.unparse(node.func) for node in ast.walk(statement)
        )
        if makes_job and isinstance(statement, ast.FunctionDef):
            return statement.name
        if makes_job and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            return statement.targets[0].id
    return "NAME"


def _import_module(name: str) -> ModuleType:
    if not all(name.split(".")):
        raise UsageError(f"{name!r} is not the name of a module. {_FORMS}")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script's path lacks it; it stays for what the module imports later
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"there is no module {error.name!r}, neither installed nor in {here}. {_FORMS}"
            ) from error
        raise UsageError(f"{name} cannot be imported: {error}.{_install(error)}") from error


_PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Packages whose modules have another name."""


def _install(error: ModuleNotFoundError) -> str:
    """How to get the missing module, as a sentence to append to an error."""
    if error.name is None:
        return ""
    top = error.name.partition(".")[0]
    if top in sys.modules:  # a part of a package that is installed
        return ""
    return f" If it is a package: pip install {_PACKAGES.get(top, top)}."


def _check_file(path: Path) -> None:
    if not is_file(path):
        raise UsageError(f"there is no file {path} (looked in {Path.cwd()}).")


def _load_file(path: Path) -> ModuleType:
    """The file as a module; its own directory counts as importable, as when Python runs it."""
    _check_file(path)
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # a name of its own per path: two files called job.py are two modules, one file is loaded once
    name = f"brimful_job_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ModuleNotFoundError):
            raise UsageError(f"{path} cannot be imported: {error}.{_install(error)}") from error
        raise
    return module


def _find_factory(target: str, attribute: str) -> Any:
    module = _load_file(Path(target)) if target.endswith(".py") else _import_module(target)
    try:
        return getattr(module, attribute)
    except AttributeError:
        factories = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and (callable(value) or isinstance(value, Job))
        ]
        hint = f"Looked in {target} for a brimful.Job or a function that returns one."
        raise UnknownNameError("name", attribute, factories, hint=hint) from None


def _call_factory(text: str, factory: Any, options: dict[str, Any]) -> Job:
    if isinstance(factory, Job):
        if options:
            raise UsageError(f"{text} is a Job and takes no options, but {_listed(options)} was given.")
        return factory
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"{text} is {_described(factory)}. {_remedy(factory)}")
    _check_options(text, factory, options)
    job = factory(**options)
    if not isinstance(job, Job):
        raise UsageError(f"{text} returned {_described(job)}. {_remedy(job)}")
    return job


def _check_options(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that `factory` does not take, and a call that lacks what it needs."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # a factory written in C has none; the call itself says what is wrong
        return
    named = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_any else [key for key in options if key not in named]
    if unknown:
        takes = f"It takes {_listed(named)}." if named else "It takes none."
        raise UsageError(f"{name} does not take the option {_listed(unknown)}. {takes}")
    missing = [
        key for key, parameter in named.items() if parameter.default is parameter.empty and key not in options
    ]
    if missing:
        raise UsageError(f"{name} needs {_listed(missing)}; give it a default or pass it as an option.")


def _listed(names: Any) -> str:
    return ", ".join(names)


def _described(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"a model ({type(value).__name__}), not a Job"
    return "None, not a Job" if value is None else f"an object of type {type(value).__name__}, not a Job"


def _remedy(value: Any) -> str:
    if isinstance(value, nn.Module):
        return (
            "Say how it is trained: return brimful.Job(model=model, loss=lambda model, batch: …, "
            "batch=lambda samples: …)."
        )
    return "It must be a brimful.Job, or a function that returns one."
