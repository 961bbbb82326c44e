import sys
from pathlib import Path

import pytest
from torch import nn

from brimful.errors import UnknownNameError, UsageError
from brimful.models import architecture_names, find_architecture, resolve_job

JOBS = """
import brimful.job
import torch

def make(width=3):
    model = torch.nn.Linear(width, 1)
    loss = lambda model, batch: model(batch).sum()
    return brimful.job.Job(model=model, loss=loss, batch=torch.zeros(1, 3), name=f"width {width}")

def make_any(**options):
    return make(**options)

def make_sized(size):
    return make(size)

def make_model():
    return torch.nn.Linear(3, 1)

def make_nothing():
    pass

JOB = make()
MODEL = make_model()
NUMBER = 3
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A current directory that holds jobs.py; its modules are imported anew by the next test."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("target", ["jobs", "jobs.py", "./jobs.py"])
def test_a_factory_is_found_in_a_module_or_a_file_of_the_current_directory(directory, target):
    assert resolve_job(f"{target}:make").name == "width 3"
    assert resolve_job(f"{target}:make", width=5).name == "width 5"
    assert resolve_job(f"{target}:make_any", width=6).name == "width 6"


def test_a_file_is_found_by_its_full_path_and_finds_its_neighbours(directory, monkeypatch, tmp_path_factory):
    (directory / "own.py").write_text("from jobs import make")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert resolve_job(f"{directory / 'own.py'}:make").name == "width 3"


def test_a_job_itself_can_be_named(directory):
    assert resolve_job("jobs:JOB").name == "width 3"
    with pytest.raises(UsageError, match="takes no options, but width was given"):
        resolve_job("jobs:JOB", width=5)


def test_a_job_without_a_name_has_that_of_its_variable_or_function(directory):
    unnamed = JOBS.replace(', name=f"width {width}"', "") + "SMALL, LARGE = make(), make(width=9)\n"
    (directory / "unnamed.py").write_text(unnamed)
    names = [resolve_job(f"unnamed.py:{name}").name for name in ("SMALL", "LARGE", "make")]
    assert names == ["SMALL", "LARGE", "make"]
    assert resolve_job("unnamed:LARGE").name == "LARGE"


def test_a_built_in_name_is_a_job_too():
    assert resolve_job("vgg16", image_size=64).batch(2)["images"].shape == (2, 3, 64, 64)


def test_an_option_the_factory_does_not_take_is_refused(directory):
    with pytest.raises(UsageError, match=r"does not take the option depth\. It takes width\."):
        resolve_job("jobs:make", depth=2)
    with pytest.raises(UsageError, match=r"does not take the option depth\. It takes none\."):
        resolve_job("jobs:make_model", depth=2)


def test_an_option_the_factory_needs_is_asked_for(directory):
    with pytest.raises(UsageError, match="needs size"):
        resolve_job("jobs:make_sized")


@pytest.mark.parametrize("attribute", ["make_model", "MODEL"])
def test_a_model_is_refused_with_the_way_to_wrap_it(directory, attribute):
    with pytest.raises(UsageError, match=r"a model \(Linear\), not a Job.*brimful\.Job\(model=model, loss="):
        resolve_job(f"jobs:{attribute}")


def test_anything_else_is_refused_with_what_it_is(directory):
    with pytest.raises(UsageError, match="jobs:make_nothing returned None, not a Job"):
        resolve_job("jobs:make_nothing")
    with pytest.raises(UsageError, match="jobs:NUMBER is an object of type int, not a Job"):
        resolve_job("jobs:NUMBER")


def test_an_unknown_attribute_says_the_nearest(directory):
    with pytest.raises(UnknownNameError, match=r"unknown name 'mak'\. Nearest: make") as caught:
        resolve_job("jobs:mak")
    assert caught.value.nearest[0] == "make"


@pytest.mark.parametrize("name", ["absent", "absent.inner", "jobs.inner"])
def test_a_missing_module_is_named(directory, name):
    with pytest.raises(UsageError, match=f"there is no module '{name.split('.')[0]}"):
        resolve_job(f"{name}:make")


@pytest.mark.parametrize("target", ["broken", "broken.py"])
def test_a_module_that_imports_a_missing_one_is_told_apart(directory, target):
    (directory / "broken.py").write_text("import absent_package")
    with pytest.raises(
        UsageError,
        match=r"broken.* cannot be imported: No module named 'absent_package'.*pip install absent_package\.",
    ):
        resolve_job(f"{target}:make")


def test_an_error_inside_the_users_module_is_left_to_the_user(directory):
    (directory / "broken.py").write_text("1 / 0")
    for target in ("broken", "broken.py"):
        with pytest.raises(ZeroDivisionError):
            resolve_job(f"{target}:make")


def test_a_missing_file_is_named(directory):
    with pytest.raises(UsageError, match=r"there is no file absent\.py"):
        resolve_job("absent.py:make")


@pytest.mark.parametrize("text", [":make", "jobs:"])
def test_half_a_name_is_refused(text):
    with pytest.raises(UsageError, match="names no model"):
        resolve_job(text)


@pytest.mark.parametrize("find", [find_architecture, resolve_job])
def test_an_unknown_architecture_says_the_nearest_and_how_to_name_ones_own(find):
    with pytest.raises(UnknownNameError, match=r"unknown model 'bert-bse'\. Nearest: bert-base.*module:NAME"):
        find("bert-bse")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "bert-base",
            {"image_size": 32},
            "image_size. It takes sequence_length, num_labels, num_hidden_layers",
        ),
        ("gpt2", {"num_labels": 2}, "num_labels. It takes sequence_length, num_hidden_layers"),
        ("unet", {"sequence_length": 2}, "sequence_length. It takes image_size, num_classes"),
        ("bert-base", {"sequence_length": 513}, "from 1 to 512 as sequence_length, not 513"),
        ("xlm-roberta-base", {"sequence_length": 513}, "from 1 to 512 as sequence_length, not 513"),
        ("gpt2", {"sequence_length": 1025}, "from 2 to 1024 as sequence_length, not 1025"),
        ("gpt2", {"num_hidden_layers": 0}, "at least 1 as num_hidden_layers, not 0"),
        ("llama-3-8b", {"sequence_length": "long"}, "sequence_length, not 'long'"),
        ("vit-base", {"image_size": 230}, "multiple of 16 as image_size, not 230; 224 would do"),
        ("resnet50", {"image_size": 32}, "at least 33 as image_size, not 32"),
        ("vgg16", {"num_classes": True}, "at least 2 as num_classes, not True"),
        ("unet", {"image_size": 40}, "multiple of 16 as image_size, not 40; 32 would do"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_with_what_can(name, options, message):
    with pytest.raises(UsageError, match=message):
        find_architecture(name, **options)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    job = find_architecture("bert-base")
    with pytest.raises(UsageError, match=r"bert-base is built with transformers.*pip install transformers"):
        job.model()


def test_names_are_unique_and_looking_them_up_builds_nothing():
    assert len(set(architecture_names())) == len(architecture_names())
    assert not any(isinstance(find_architecture(name).model, nn.Module) for name in architecture_names())


def test_a_file_without_a_function_is_answered_with_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import brimful\ndef helper():\n    return 1\ndef job():\n    return brimful.Job(...)\nraise SystemExit"
    )
    with pytest.raises(UsageError, match=r"mine.py:job$"):
        resolve_job(str(file))
    with pytest.raises(UsageError, match="there is no file"):
        resolve_job(str(tmp_path / "absent.py"))
