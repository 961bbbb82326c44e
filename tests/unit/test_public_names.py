"""The public surface: each name loads, and is in the reference."""

from __future__ import annotations

import importlib
import pkgutil
import pydoc
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import brimful as bf
from brimful.utils.field_docs import field_docstrings

API = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_the_reference_documents_exactly_the_public_names() -> None:
    text = API.read_text(encoding="utf-8")
    documented = set(
        re.findall(r"^\.\. auto(?:class|function|exception):: brimful\.(\w+)$", text, re.MULTILINE)
    )
    assert {*bf.__all__} == documented
    assert bf.__all__ == sorted(bf.__all__)
    assert set(dir(bf)) >= {*bf.__all__}


def test_every_public_name_loads_whatever_was_imported_before() -> None:
    for module in pkgutil.walk_packages(bf.__path__, "brimful."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in bf.__all__:
        value = getattr(bf, name)
        assert not hasattr(value, "__path__"), f"brimful.{name} is shadowed by a module"
    assert callable(bf.plan)
    assert callable(bf.apply)


def test_what_is_not_a_public_name_is_found_in_its_package() -> None:
    assert len(bf.__all__) <= 20
    assert bf.trainer.Callback is importlib.import_module("brimful.trainer").Callback
    with pytest.raises(AttributeError, match=r"no attribute 'Callback'; it is brimful\.trainer\.Callback"):
        getattr(bf, "Callback")  # noqa: B009  # mypy knows that it is not there
    for name, place in {
        "check_plan": "api",
        "Estimate": "api",
        "Measurement": "results",
        "Samples": "job",
        "DEFAULT_OPTIMIZER": "job",
    }.items():
        with pytest.raises(AttributeError, match=rf"; it is brimful\.{place}\.{name}$"):
            getattr(bf, name)
    for name in ("nonesuch", "dataclass", "Callable"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'$"):
            getattr(bf, name)


def test_importing_brimful_loads_no_torch() -> None:
    code = (
        "import sys, brimful\n"
        "for name in ('Callback', 'nonesuch', 'check_plan'): assert not hasattr(brimful, name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_saved_trace_and_plan_are_read_without_torch() -> None:
    code = (
        "import sys; import brimful.trace, brimful.planner, brimful.memory, brimful.cost, brimful.report;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_every_documented_field_of_a_record_with_its_docstring() -> None:
    records = [value for name in bf.__all__ if is_dataclass(value := getattr(bf, name))]
    assert {bf.Job, bf.Data, bf.Plan, bf.Settings} <= {*records}
    for record in records:
        text = words(pydoc.render_doc(record, renderer=pydoc.plaintext))
        for name, docstring in field_docstrings(record).items():
            assert words(f"{name}: {docstring}") in text
    assert (bf.Job.__doc__ or "").startswith("One training job: a model, its loss, a batch and an optimizer.\n")


def words(text: str) -> str:
    """Without the lines that help draws, and the places where it breaks."""
    return " ".join(text.replace("|", " ").split())
