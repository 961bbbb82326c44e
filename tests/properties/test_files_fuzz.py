"""Whatever a file or an argument holds: a record of the same meaning, or one `BrimfulError`.

The changes are those of `benchmarks/attacks`, which tries many more in whole processes; Hypothesis draws and
shrinks them here. Each read has little time and memory, and hostile content would leave a file behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import brimful as bf
from attacks.inputs import TABLES
from attacks.mutations import KINDS, Mutation, mutate_bytes, mutate_json, put
from attacks.saves import EXECUTING, sign, sign_manifest
from brimful.cli.report import page_of
from brimful.devices import find_device
from brimful.doctor import Evidence, Watch, watched_document
from brimful.doctor.allocations import device_uses
from brimful.doctor.snapshot import read_snapshot
from brimful.doctor.source_checks import check_sources
from brimful.errors import BrimfulError, FileFormatError, UsageError
from brimful.planner import prices_of
from brimful.profiling import calibrate, with_kept_calibration
from brimful.profiling.cache import keep
from brimful.profiling.job_calibrations import JobKind, keep_job_calibration, kept_job_calibration
from brimful.recipes import image_classification, language_model, text_classification
from brimful.recipes.pretrained import RecipeRun, read_recipe_run
from brimful.recipes.weights import load_matching, names_of_tensors
from brimful.report.page import page_html
from brimful.results import JobCalibration, Recovery
from brimful.results.self_correction import LARGEST_PEAK_FACTOR, LARGEST_TIME_FACTOR
from brimful.settings import Action, ChunkedLoss, Precision, UnitAction
from brimful.trainer import load_weights
from brimful.trainer.resume import Fallback, read_fallback, write_fallback
from brimful.trainer.storage.run_directory import FALLBACK
from helpers.calibrated import CALIBRATION
from helpers.tiny_jobs import one_thread

__all__ = ["one_thread"]

SECONDS = 10.0
"""For one read; each takes some milliseconds, a nest of 100,000 lists a hundred."""
MEMORY_BYTES = 1 << 30
WIDTH = 4


def fuzzed(examples: int) -> settings:
    """The same examples each time; `benchmarks/attack.py --seconds` tries others."""
    health = list(HealthCheck)  # fixtures of a function are written anew by each example
    return settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=health)


randoms = st.randoms(use_true_random=False)
RECOVERY = Recovery(step=3, during="step", before="4", after="2", message="out of memory", seconds=1.0)


class Endless(BaseException):
    """A read that did not end in time; no reader catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Little time and memory beyond what the process has."""

    def late(*_: object) -> None:
        raise Endless(f"no end in {SECONDS:.0f} s")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # where only the end of the process helps
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read(reader: Callable[[], Any]) -> Any:
    """What a reader gives; None if it refuses."""
    with bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reader()
        except BrimfulError:
            return None


def read_document(reader: Callable[[], Any]) -> Any:
    """The same of a file that holds one document: the refusal is one line."""
    refusal = ""
    with bounded():
        try:
            return reader()
        except FileFormatError as error:
            refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None


# Files that brimful wrote


def network() -> nn.Module:
    """Its last bias is not trained."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 2))
    model[-1].bias.requires_grad_(False)
    return model


def job() -> bf.Job:
    samples = {"x": torch.arange(64.0).reshape(16, WIDTH) / 64, "y": torch.arange(16) % 2}
    return bf.Job(
        model=network,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch=samples,
        data=lambda: bf.Data(train=samples, validation=samples),
        name="fuzzed",
    )


def train(run: Path, steps: int) -> Any:
    return bf.trainer.Trainer(
        job(),
        bf.Settings(micro_batch_size=4),
        device="cpu",
        run_dir=run,
        resume=run.exists(),
        save_every=1,
        steps=steps,
        show_progress=False,
    ).fit()


HOW = bf.Settings(
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    units=(
        UnitAction(fqn="0", action=Action.SAVE, saved=("mm#0",)),
        UnitAction(fqn="[1..2]", action=Action.OFFLOAD, most_offloaded_bytes=7),
    ),
    chunked_loss=ChunkedLoss(layer="head", chunks=2),
)
BEFORE, AFTER = bf.Settings(micro_batch_size=4), bf.Settings(micro_batch_size=2)
T4 = find_device("T4")
JOB = JobKind(
    device=T4, job="gpt", parameter_count=1000, precision=Precision.FP32, optimizer="adamw", world_size=1
)
FACTORS = JobCalibration(
    device="Tesla T4",
    job="gpt",
    parameter_count=1000,
    precision=Precision.FP32,
    optimizer="adamw",
    time_factor=1.25,
    peak_factor=0.9,
    measured_steps=5,
    measured_on="2026-11-24",
)
CALIBRATIONS, JOB_CALIBRATIONS = f"brimful/{calibrate.GPU_CACHE_FILE}", "job_calibrations.json"
TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
RECIPE = {
    "task": "language-model",
    "model": "gpt2",
    "tokenizer": "bytes",
    "sequence_length": 16,
    "files": ["a"],
}
CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "max_position_embeddings": 32,
}
_FRAMES = [{"filename": "train.py", "line": 3, "name": "main"}]
_BLOCK = {"address": 512, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": _FRAMES}
SNAPSHOT = {
    "segments": [{"device": 0, "total_size": 512, "is_expandable": False, "blocks": [_BLOCK]}],
    "device_traces": [
        [
            {"action": action, "addr": 512, "size": 500, "frames": _FRAMES}
            for action in ("alloc", "free_requested")
        ]
    ],
}
USERS: dict[str, str] = TABLES | {
    "prices.csv": "gpu,price_per_hour\nL4,0.8\nA100 80GB SXM,1.89\n",
    "prices.json": '{"L4": 0.8}',
    "job.json": json.dumps(RECIPE),
    "config.json": json.dumps(CONFIGURATION),
    "train.py": "import torch\nfor x in data:\n    loss = net(x)\n    loss.backward()\n    total += loss\n",
    INDEX: json.dumps({"metadata": {}, "weight_map": {"a": "b.safetensors"}}),
}
"""Content of files that brimful did not write, by name."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, a trace, calibrations, what a launch left, users' files, and a run of two steps of three."""
    folder = tmp_path_factory.mktemp("written")
    plan = replace(bf.plan(job(), device="T4", global_batch_size=4), settings=HOW)
    plan.save(folder / "plan.json")
    for name in ("trace.json", "trace.json.gz"):
        bf.api.capture_trace(job(), BEFORE, "T4").save(folder / name)
    train(folder / "run", 2)
    write_fallback(folder, Fallback(before=BEFORE, after=AFTER, recovery=RECOVERY))
    with caches_in(folder):
        key = calibrate._cache_key(T4)
        keep(calibrate.GPU_CACHE_FILE, "gpus", key, CALIBRATION, what="a test's calibration")
        keep_job_calibration(JOB, FACTORS)
    save_file({"a.pooler": torch.zeros(2)}, folder / TENSORS)
    (folder / "watched.json").write_text(json.dumps(watched_document(watched())))
    (folder / "estimate.json").write_text(json.dumps(bf.estimate(job(), "T4").to_json()))
    for name, content in USERS.items():
        (folder / name).write_text(content)
    (folder / "memory.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    return folder


@contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """What is measured is kept in a folder."""
    jobs = patch("brimful.profiling.job_calibrations.FILE", str(folder / JOB_CALIBRATIONS))
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)), jobs:
        yield


@pytest.fixture(scope="module")
def expected(written: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("expected") / "run"
    shutil.copytree(written / "run", run)
    return train(run, 3).losses


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """A file, and what reads it."""

    name: str
    read: Callable[[Path], Any]
    """Takes the path of a file with this name."""
    is_document: bool = False
    """Whether the file is one record: a refusal is one line, and what is read can be written and read again."""
    is_sound: Callable[[Any], bool] = lambda _found: True
    """What is true of anything that is read."""
    may_refuse: bool = True

    def check(self, path: Path, mutation: Mutation | None = None) -> None:
        """A changed file is read or refused."""
        found = (read_document if self.is_document else read)(partial(self.read, path))
        assert self.may_refuse if found is None else self.is_sound(found)
        if self.is_document and found is not None:
            assert mutation is None or not mutation.is_invalid, f"accepted: {mutation.what}"
            again = path.with_name(f"again-{path.name}")
            found.save(again)
            assert self.read(again) == found
            assert str(found)


def with_calibration(path: Path) -> Any:
    with caches_in(path.parent.parent):
        return with_kept_calibration(T4)


def factors(path: Path) -> Any:
    with caches_in(path.parent):
        return kept_job_calibration(JOB)


def are_plausible(found: JobCalibration) -> bool:
    peak = found.peak_factor
    return 1 / LARGEST_TIME_FACTOR <= found.time_factor <= LARGEST_TIME_FACTOR and (
        peak is None or 1 / LARGEST_PEAK_FACTOR <= peak <= LARGEST_PEAK_FACTOR
    )


def text_job(path: Path, bad_samples: str = "refuse") -> bf.Job:
    if path.suffix == ".txt":
        return language_model(path, model="gpt2", sequence_length=16, bad_samples=bad_samples)
    return text_classification(path, model="bert-base", sequence_length=16, bad_samples=bad_samples)


def prices(path: Path) -> Any:
    return prices_of(path, ["L4"])


def are_prices(found: dict[str, float]) -> bool:
    return all(0 <= price <= 1e6 for price in found.values())


def watched() -> Evidence:
    """What watching a loop of three steps saw."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
    return watch.evidence()


def page(path: Path) -> str:
    return page_html(page_of(path))


skipping = partial(text_job, bad_samples="skip")
READERS = {
    "plan": Readable(name="plan.json", read=bf.Plan.load, is_document=True),
    "trace": Readable(name="trace.json", read=bf.trace.Trace.load, is_document=True),
    "compressed trace": Readable(name="trace.json.gz", read=bf.trace.Trace.load, is_document=True),
    "weights": Readable(name="run/weights.safetensors", read=lambda path: load_weights(network(), path)),
    "names of tensors": Readable(name=TENSORS, read=lambda path: names_of_tensors(path.parent)),
    "index of tensors": Readable(name=INDEX, read=lambda path: names_of_tensors(path.parent)),
    "launch before": Readable(name=FALLBACK, read=lambda path: read_fallback(path.parent, BEFORE)),
    "calibration": Readable(name=CALIBRATIONS, read=with_calibration, may_refuse=False),
    "factors of a job": Readable(name=JOB_CALIBRATIONS, read=factors, is_sound=are_plausible),
    "table": Readable(name="texts.csv", read=text_job),
    "JSON lines": Readable(name="texts.jsonl", read=text_job),
    "book": Readable(name="book.txt", read=text_job),
    "table, skipping": Readable(name="texts.csv", read=skipping),
    "JSON lines, skipping": Readable(name="texts.jsonl", read=skipping),
    "book, skipping": Readable(name="book.txt", read=skipping),
    "configuration": Readable(name="config.json", read=lambda path: bf.find_architecture(str(path))),
    "prices": Readable(name="prices.csv", read=prices, is_sound=are_prices),
    "prices in JSON": Readable(name="prices.json", read=prices, is_sound=are_prices),
    "watched run": Readable(name="watched.json", read=page),
    "estimate": Readable(name="estimate.json", read=page),
    "result of a run": Readable(name="run/result.json", read=lambda path: page(path.parent)),
    "steps of a run": Readable(name="run/metrics.jsonl", read=lambda path: page(path.parent)),
    "recipe": Readable(
        name="job.json",
        read=lambda path: read_recipe_run(path.parent),
        is_sound=lambda found: isinstance(found, RecipeRun),
    ),
    "memory snapshot": Readable(name="memory.pickle", read=lambda path: device_uses(read_snapshot(path))),
    "script": Readable(name="train.py", read=lambda path: check_sources([str(path)])),
}
TEXTS = ("table", "JSON lines", "book")
JSON_DOCUMENTS = (
    *("plan", "trace", "index of tensors", "launch before", "calibration", "factors of a job"),
    *("prices in JSON", "recipe", "configuration"),
    *("watched run", "estimate", "result of a run"),
)


@pytest.mark.parametrize("reader", sorted(set(READERS) - {"index of tensors", "launch before"}))
@fuzzed(60)
@given(random=randoms)
def test_a_file_with_changed_bytes_is_read_or_refused(
    written: Path, place: Path, reader: str, random: Random
) -> None:
    readable = READERS[reader]
    path = place / readable.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mutate_bytes((written / readable.name).read_bytes(), random)[0])
    readable.check(path)


@pytest.mark.parametrize("reader", JSON_DOCUMENTS)
@fuzzed(100)
@given(random=randoms)
def test_a_file_with_changed_json_is_read_or_refused(
    written: Path, place: Path, reader: str, random: Random
) -> None:
    readable = READERS[reader]
    path = place / readable.name
    path.parent.mkdir(exist_ok=True)
    mutation = mutate_json(json.loads((written / readable.name).read_text()), random)
    path.write_text(mutation.text)
    readable.check(path, mutation)


@fuzzed(40)
@given(random=randoms)
def test_changed_json_lines_are_read_or_refused(place: Path, random: Random) -> None:
    lines = TABLES["texts.jsonl"].splitlines()
    index = random.randrange(len(lines))
    lines[index] = mutate_json(json.loads(lines[index]), random).text
    (place / "texts.jsonl").write_text("\n".join(lines))
    READERS["JSON lines, skipping"].check(place / "texts.jsonl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "reader", ["plan", "trace", "compressed trace", "calibration", "factors of a job", *TEXTS]
)
def test_what_is_no_file_is_refused(place: Path, reader: str, kind: str) -> None:
    """A calibration that is none is left alone."""
    readable = READERS[reader]
    path = place / readable.name
    path.parent.mkdir(exist_ok=True)
    put(kind, path)
    found = (read_document if readable.is_document else read)(partial(readable.read, path))
    assert found == (T4 if reader == "calibration" else None)


# Saves


@pytest.fixture
def resumed(written: Path, place: Path, expected: list[float]) -> Callable[[Callable[[Path], object]], None]:
    """A run that was changed is resumed to the undisturbed losses, or refused with every file left."""

    def check(change: Callable[[Path], object]) -> None:
        run = place / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(written / "run", run)
        change(run)
        names = {path.relative_to(run) for path in run.rglob("*")}
        result = read(lambda: train(run, 3))
        assert result is None or result.losses[-1] == expected[-1]
        assert result is not None or {path.relative_to(run) for path in run.rglob("*")} >= names
        assert not (place / "canary").exists()

    return check


FILES = ("manifest.json", "model.safetensors", "frozen.safetensors", "state.pt")
NEWEST = Path("saves") / "step-000000002"


@fuzzed(15)
@given(random=randoms, name=st.sampled_from([*(str(NEWEST / name) for name in FILES), "metrics.jsonl"]))
def test_a_run_with_damaged_files_resumes_as_if_not_or_is_refused(
    resumed: Any, random: Random, name: str
) -> None:
    def change(run: Path) -> None:
        (run / name).write_bytes(mutate_bytes((run / name).read_bytes(), random)[0])

    resumed(change)


@fuzzed(15)
@given(random=randoms, signs=st.booleans())
def test_a_run_with_a_changed_manifest_resumes_as_if_not_or_is_refused(
    resumed: Any, random: Random, signs: bool
) -> None:
    def change(run: Path) -> None:
        path = run / NEWEST / "manifest.json"
        path.write_text(mutate_json(json.loads(path.read_text()), random).text)
        if signs:
            sign_manifest(path)

    resumed(change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*(str(NEWEST / name) for name in FILES), str(NEWEST), "metrics.jsonl", "saves"]
)
def test_a_run_with_other_kinds_of_files_resumes_as_if_not_or_is_refused(
    resumed: Any, name: str, kind: str
) -> None:
    resumed(lambda run: put(kind, run / name))


@pytest.mark.parametrize("write", EXECUTING.values(), ids=list(EXECUTING))
def test_a_save_that_holds_code_is_not_executed(resumed: Any, place: Path, write: Callable[..., None]) -> None:
    def change(run: Path) -> None:
        write(run / NEWEST / "state.pt", place / "canary")
        sign(run / NEWEST)

    resumed(change)


# Weights, and what a launch left for the next


@pytest.mark.parametrize("write", EXECUTING.values(), ids=list(EXECUTING))
def test_weights_that_hold_code_are_refused(place: Path, write: Callable[..., None]) -> None:
    torch.save({}, place / "weights.pt")
    write(place / "weights.pt", place / "canary")
    model = network()
    with pytest.raises(UsageError), bounded():
        load_matching(model, path=place / "weights.pt")
    assert not (place / "canary").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_that_are_no_file_are_refused(place: Path, name: str, kind: str) -> None:
    put(kind, place / name)
    model = network()
    with pytest.raises(UsageError), bounded():
        load_matching(model, path=place / name)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"missing", "a dangling link"}))
def test_settings_of_a_launch_before_that_are_no_file_are_refused(place: Path, kind: str) -> None:
    put(kind, place / FALLBACK)
    with pytest.raises(BrimfulError), bounded():
        read_fallback(place, BEFORE)


# Data


LISTS = {
    "labels.jsonl": (json.dumps({"text": "a film", "label": ["good", "bad"]}) + "\n") * 8,
    "labels.csv": "text,label\n" + 'a film,"good,bad"\n' * 8,
}


@fuzzed(60)
@given(random=randoms, name=st.sampled_from(sorted(LISTS)), in_bytes=st.booleans())
def test_damaged_lists_of_labels_are_read_or_refused(
    place: Path, random: Random, name: str, in_bytes: bool
) -> None:
    lines = LISTS[name].splitlines(keepends=True)
    if in_bytes or not name.endswith("jsonl"):
        (place / name).write_bytes(mutate_bytes(LISTS[name].encode(), random)[0])
    else:
        (place / name).write_text("".join([mutate_json(json.loads(lines[0]), random).text + "\n", *lines[1:]]))
    options: dict[str, Any] = {"model": "bert-base", "sequence_length": 16, "bad_samples": "skip"}
    read(lambda: text_classification(place / name, multi_label=True, **options))


@fuzzed(25)
@given(random=randoms, ending=st.sampled_from(["png", "jpg", "gif", "bmp", "webp", "tiff"]))
def test_damaged_images_are_read_or_refused(place: Path, random: Random, ending: str) -> None:
    folder = place / "photos"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("dark", "light"):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (90 * number, 10, 10)).save(folder / name / f"{number}.{ending}")
    path = folder / "dark" / f"0.{ending}"
    path.write_bytes(mutate_bytes(path.read_bytes(), random)[0])

    def epoch() -> int:
        options: dict[str, Any] = {"image_size": 33, "workers": 0, "bad_samples": "skip"}
        data = image_classification(folder, model="resnet18", validation_fraction=0.5, **options).data
        assert data is not None
        return sum(len(batch["labels"]) for batch in data().train.batches(4, seed=0, epoch=1))

    assert read(epoch) in (1, 2)


# Arguments

values = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["nan%", "1e400%", "9" * 5000 + "GiB", "x" * 5000, "-5%", "--help", "a=b=c", "..:x"]),
)


@fuzzed(60)
@given(
    command=st.sampled_from(
        [["estimate"], ["plan", "--global-batch-size", "4"], ["gpus", "--global-batch-size", "4"]]
    ),
    model=st.one_of(st.just("vgg16"), values),
    option=st.sampled_from(["--device", "--budget", "--precision", "--optimizer", "--set", "--image-size"]),
    value=values,
)
def test_any_arguments_are_carried_out_or_refused(
    command: list[str], model: str, option: str, value: str
) -> None:
    """Refused is by exit status and a message; no other exception leaves the command."""
    from brimful.cli.app import app

    with bounded():
        ran = CliRunner().invoke(app, [*command, "--device", "nothing", model, option, value])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    assert ran.exit_code in (0, 1, 2)
    assert ran.exit_code == 0 or ran.output.strip()
