"""Every place where brimful reads a file or runs code by name is listed here, with what covers it.

A reader that is added later fails the first test until it is listed, with the fuzz test that covers it or with
the reason why it needs none.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "brimful"
FUZZ = ROOT / "tests" / "properties" / "test_files_fuzz.py"

READING = {
    *("open", "os.open", "fdopen", "read_text", "read_bytes", "read_regular_file", "mmap"),
    *("json.load", "json.loads", "parse_json", "decode_json", "decode_directly", "DictReader", "read_csv"),
    *("torch.load", "pickle.load", "pickle.loads", "Unpickler", "safe_open", "load_file", "np.load"),
    *("GzipFile", "gzip.open", "gzip.decompress", "ZipFile", "Image.open", "from_pretrained"),
    *("PreTrainedTokenizerFast", "yaml.load", "tomllib.load", "tomllib.loads", "fromfile"),
    *("FileSystemReader", "HuggingFaceStorageReader"),
}
"""Calls that take in a file or decode its content; with a module where the bare name means other things too."""

RUNNING = {
    *("eval", "exec", "compile", "__import__", "import_module", "exec_module", "spec_from_file_location"),
    *("run_path", "run_module", "os.system", "os.popen", "Popen", "subprocess.run", "check_output"),
}
"""Calls that run code or a command."""

PLAN = "reader: plan"
TRACE = "reader: trace"
MANIFEST = "test_a_run_with_a_changed_manifest_resumes_as_if_not_or_is_refused"
RUN = "test_a_run_with_damaged_files_resumes_as_if_not_or_is_refused"
KINDS = "test_a_run_with_other_kinds_of_files_resumes_as_if_not_or_is_refused"
STATE = "test_a_save_that_holds_code_is_not_executed"
LAUNCH = "reader: launch before"
WEIGHTS = "reader: weights"
OTHERS_WEIGHTS = "test_weights_that_hold_code_are_refused"
NAMES = "reader: names of tensors"
CALIBRATION = "reader: calibration"
TABLES = "reader: table"
PAGE = "reader: watched run"
PRICES = "reader: prices"
CONFIGURATION = "reader: configuration"
METADATA = "reader: recipe"
SCRIPT = "reader: script"
SNAPSHOT = "reader: memory snapshot"
LINES = "test_changed_json_lines_are_read_or_refused"
IMAGES = "test_damaged_images_are_read_or_refused"
ARGUMENTS = "test_any_arguments_are_carried_out_or_refused"
LOCK = "opens a file to lock, append to or flush it; its content is not read"
OWN = "what this process, or one that it started, has just written"
SYSTEM = "files of brimful itself or of the operating system"
DIGESTS = "checked against the digests of the manifest; tests/equivalence/test_sharded_saves.py"
TRANSFORMERS = "by transformers, local and without remote code; benchmarks/attack.py"

READERS = {
    "__init__.py": {"read_text": SYSTEM},
    "api/comparisons.py": {"pickle.loads": OWN},
    "models/hub.py": {
        "read_text": SYSTEM,
        "json.loads": SYSTEM,
        "read_regular_file": CONFIGURATION,
        "parse_json": CONFIGURATION,
    },
    "doctor/script.py": {"read_bytes": "the script that the user names to `brimful run`"},
    "doctor/snapshot.py": {"read_regular_file": SNAPSHOT},
    "doctor/source_checks.py": {"read_regular_file": SCRIPT},
    "models/resolve.py": {"read_text": "the file that the user names as the job"},
    "cli/report.py": {"read_regular_file": PAGE, "parse_json": PAGE},
    "report/page/document.py": {"read_text": SYSTEM},
    "report/page/files.py": {"decode_directly": PAGE},
    "cli/sources.py": {"parse_json": ARGUMENTS},
    "cli/streams.py": {"os.open": SYSTEM},
    "codec.py": {"os.open": PLAN, "fdopen": PLAN, "parse_json": PLAN},
    "utils/files.py": {"os.open": LOCK, "open": OWN},
    "devices/data_rows.py": {"read_text": SYSTEM, "DictReader": SYSTEM},
    "devices/this_machine.py": {"read_text": SYSTEM},
    "profiling/cache.py": {
        "read_regular_file": CALIBRATION,
        "parse_json": CALIBRATION,
        "os.open": LOCK,
        "open": LOCK,
    },
    "profiling/calibrate.py": {"read_text": SYSTEM},
    "profiling/cuda_context.py": {"decode_json": OWN},
    "profiling/rates.py": {"read_text": SYSTEM},
    "profiling/timing.py": {"read_bytes": SYSTEM},
    "planner/plan.py": {"read_regular_file": PLAN, "parse_json": PLAN},
    "planner/prices.py": {
        "read_regular_file": PRICES,
        "parse_json": PRICES,
        "json.loads": PRICES,
        "DictReader": PRICES,
    },
    "recipes/image_folders.py": {"Image.open": IMAGES},
    "recipes/image_reader.py": {"Image.open": IMAGES},
    "recipes/language_model.py": {"read_text": TABLES},
    "recipes/pretrained.py": {"read_regular_file": METADATA, "parse_json": METADATA},
    "recipes/rows.py": {"read_text": TABLES, "read_regular_file": TABLES, "json.loads": LINES},
    "recipes/text_models.py": {"from_pretrained": TRANSFORMERS},
    "recipes/tokens.py": {"from_pretrained": TRANSFORMERS, "PreTrainedTokenizerFast": TRANSFORMERS},
    "recipes/weights.py": {
        **dict.fromkeys(("load_file", "torch.load"), OTHERS_WEIGHTS),
        **dict.fromkeys(("safe_open", "read_regular_file", "parse_json"), NAMES),
    },
    "trace/file_format.py": {
        "read_regular_file": TRACE,
        "parse_json": TRACE,
        "decode_directly": TRACE,
        "GzipFile": TRACE,
    },
    "trainer/storage/checkpoint.py": {"decode_json": RUN},
    "trainer/monitor/history.py": {"parse_json": RUN},
    "trainer/resume.py": {"read_regular_file": LAUNCH, "decode_json": LAUNCH},
    "trainer/storage/restore.py": {
        "read_regular_file": RUN,
        "parse_json": MANIFEST,
        "torch.load": STATE,
        "os.open": KINDS,
        "fdopen": KINDS,
    },
    "trainer/storage/run_directory.py": {"read_bytes": KINDS, "os.open": LOCK, "fdopen": LOCK, "open": LOCK},
    "trainer/storage/saves.py": {"torch.load": OWN, "read_bytes": OWN},
    "trainer/storage/shards.py": {"HuggingFaceStorageReader": DIGESTS},
    "trainer/trainer.py": {"json.loads": OWN},
    "trainer/storage/weights.py": {
        "safe_open": WEIGHTS,
        "decode_json": WEIGHTS,
        "open": OWN,
        "json.loads": OWN,
    },
}
"""What each module calls: the fuzz test or the reader there that covers it, or why none has to."""

RUNNERS = {
    "arguments.py": {"eval": "hints of brimful's own modules, never what a user gives"},
    "__init__.py": {"import_module": "brimful's own modules"},
    "planner/comparison.py": {"import_module": "brimful.report, which writes and plots comparisons"},
    "planner/plan.py": {"import_module": "brimful.api, which checks and exports plans"},
    "utils/display.py": {"import_module": "brimful.report, which writes the text of results"},
    "integrations/transformers/coupling.py": {"import_module": "the package of the loss that the user made"},
    "doctor/machine.py": {"subprocess.run": "nvidia-smi, with fixed arguments"},
    "doctor/script.py": {
        "run_path": "the folder that the user names to `brimful run`",
        "compile": "the script that the user names to `brimful run`",
        "exec": "the same",
        "run_module": "the module that the user names to `brimful run -m`",
    },
    "models/huggingface.py": {"import_module": "transformers, and two modules that it imports"},
    "api/estimates.py": {"compile": "the option of this name, which is not the function"},
    "capture/inductor.py": {
        "compile": "the wrapper that torch's compiler generates for the job's model",
        "exec": "the same",
    },
    "models/resolve.py": {
        "import_module": "the module that the user names as the job",
        "spec_from_file_location": "the file that the user names as the job",
        "exec_module": "the same",
    },
    "profiling/cuda_context.py": {"subprocess.run": "this Python, with this module"},
    "trainer/monitor/trackers.py": {"import_module": "wandb or tensorboard, which the user asked for"},
}


def calls(names: set[str]) -> Iterator[tuple[str, str]]:
    """Modules and what they call of some names."""
    for module, tree in trees().items():
        for call, arguments in _calls(tree):
            for name in (call, *arguments):
                if (found := _matching(name, names)) is not None:
                    yield module, found


@cache
def trees() -> dict[str, ast.Module]:
    """Each module, parsed."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _calls(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Names of what a module calls, each with names that it hands over, as in `partial(torch.load, path)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [ast.unparse(each) for each in node.args if isinstance(each, (ast.Name, ast.Attribute))]
            yield ast.unparse(node.func), [name for name in given if name in READING | RUNNING]


def _matching(name: str, names: set[str]) -> str | None:
    """`json.loads` for itself; `open` for `open` and `path.open`, but `eval` not for `model.eval`."""
    qualified, last = ".".join(name.split(".")[-2:]), name.rpartition(".")[2]
    if qualified in names:
        return qualified
    return last if last in names and (last not in vars(builtins) or last in (name, "open")) else None


@pytest.mark.parametrize(("names", "listed"), [(READING, READERS), (RUNNING, RUNNERS)], ids=["reads", "runs"])
def test_all_that_reads_files_or_runs_code_is_listed(
    names: set[str], listed: dict[str, dict[str, str]]
) -> None:
    found, known = set(calls(names)), {(module, call) for module in listed for call in listed[module]}
    assert sorted(found - known) == [], "not listed: cover it by a test of test_files_fuzz.py"
    assert sorted(known - found) == [], "listed, and not there any more"


def test_the_tests_that_cover_readers_exist() -> None:
    text = FUZZ.read_text(encoding="utf-8")
    written = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    written |= {f"reader: {name}" for name in re.findall(r'^    "([\w ,]+)": Readable\(', text, re.MULTILINE)}
    reasons = {reason for calls_of in READERS.values() for reason in calls_of.values()}
    assert {reason for reason in reasons if reason.startswith(("test_", "reader: "))} <= written


def keywords_of(name: str) -> list[tuple[str, dict[str | None, str]]]:
    """Where something is called, or handed over to be called, and its keyword arguments."""
    found = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = [ast.unparse(each) for each in (node.func, *node.args[:1])]
                if any(each == name or each.endswith(f".{name}") for each in called):
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    found.append((f"{module}:{node.lineno}", given))
    return found


def test_every_load_of_torch_refuses_code() -> None:
    loads = keywords_of("torch.load")
    assert loads
    assert [where for where, given in loads if given.get("weights_only") != "True"] == []


def test_what_transformers_reads_is_local_and_brings_no_code() -> None:
    wanted = {"local_files_only": "True", "trust_remote_code": "False"}
    loads = keywords_of("from_pretrained")
    assert loads
    assert [where for where, given in loads if not wanted.items() <= given.items()] == []
