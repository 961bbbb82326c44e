"""Whatever a file or an argument holds: a record of the same meaning, or one `BrimfulError`.

The changes are those of `benchmarks/attacks`, which tries many more in whole processes; Hypothesis draws and
shrinks them here. Each read has little time and memory, and hostile content would leave a file behind.
"""

from __future__ import annotations

import faulthandler
import gzip
import json
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from brimful.devices import find_device
from brimful.errors import BrimfulError, FileFormatError, UsageError
from brimful.planner import prices_of
from brimful.profiling import calibrate, with_kept_calibration
from brimful.profiling.cache import keep
from brimful.profiling.job_calibrations import JobKind, keep_job_calibration, kept_job_calibration
from brimful.recipes import image_classification, language_model, text_classification, token_classification
from brimful.recipes.pretrained import RecipeRun, read_recipe_run
from brimful.recipes.weights import load_matching, names_of_tensors
from brimful.results import JobCalibration, Recovery
from brimful.results.self_correction import LARGEST_PEAK_FACTOR, LARGEST_TIME_FACTOR
from brimful.settings import Precision
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
    return bf.Trainer(
        job(),
        bf.Settings(micro_batch_size=4),
        device="cpu",
        run_dir=run,
        resume=run.exists(),
        save_every=1,
        steps=steps,
        show_progress=False,
    ).fit()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, a trace, a calibration, and a run of two steps of three."""
    folder = tmp_path_factory.mktemp("written")
    bf.plan(job(), device="T4", global_batch_size=4).save(folder / "plan.json")
    bf.capture_trace(job(), bf.Settings(micro_batch_size=4), "T4").save(folder / "trace.json")
    train(folder / "run", 2)
    return folder


@pytest.fixture(scope="module")
def expected(written: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("expected") / "run"
    shutil.copytree(written / "run", run)
    return train(run, 3).losses


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def check_round_trip(found: Any, again: Path, load: Callable[[Path], Any]) -> None:
    """A record that was accepted can be written, and is read as it was."""
    if found is not None:
        found.save(again)
        assert load(again) == found


def check_changed(mutation: Mutation, path: Path, load: Callable[[Path], Any]) -> None:
    path.write_text(mutation.text)
    found = read_document(partial(load, path))
    assert found is None or not mutation.is_invalid, f"accepted: {mutation.what}"
    check_round_trip(found, path.with_stem("again"), load)


@fuzzed(150)
@given(random=randoms)
def test_a_changed_plan_is_read_or_refused(written: Path, place: Path, random: Random) -> None:
    document = json.loads((written / "plan.json").read_text())
    check_changed(mutate_json(document, random), place / "plan.json", bf.Plan.load)


@fuzzed(100)
@given(random=randoms)
def test_a_changed_trace_is_read_or_refused(written: Path, place: Path, random: Random) -> None:
    document = json.loads((written / "trace.json").read_text())
    check_changed(mutate_json(document, random), place / "trace.json", bf.Trace.load)


@fuzzed(100)
@given(random=randoms, name=st.sampled_from(["plan.json", "trace.json", "trace.json.gz"]))
def test_damaged_bytes_are_read_or_refused(written: Path, place: Path, random: Random, name: str) -> None:
    content = (written / name.removesuffix(".gz")).read_bytes()
    content, _ = mutate_bytes(gzip.compress(content) if name.endswith(".gz") else content, random)
    (place / name).write_bytes(content)
    load = bf.Plan.load if name == "plan.json" else bf.Trace.load
    check_round_trip(read_document(partial(load, place / name)), place / f"again-{name}", load)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plan.json", "trace.json", "trace.json.gz"])
def test_what_is_no_file_of_its_kind_is_refused(place: Path, name: str, kind: str) -> None:
    put(kind, place / name)
    assert read_document(partial(bf.Plan.load if name == "plan.json" else bf.Trace.load, place / name)) is None


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


@fuzzed(60)
@given(random=randoms)
def test_changed_weights_are_read_or_refused(written: Path, place: Path, random: Random) -> None:
    content = (written / "run" / "weights.safetensors").read_bytes()
    (place / "weights.safetensors").write_bytes(mutate_bytes(content, random)[0])
    model = job().model()  # type: ignore[operator]
    read(lambda: bf.load_weights(model, place / "weights.safetensors"))


@pytest.mark.parametrize("write", EXECUTING.values(), ids=list(EXECUTING))
def test_weights_that_hold_code_are_refused(place: Path, write: Callable[..., None]) -> None:
    torch.save({}, place / "weights.pt")
    write(place / "weights.pt", place / "canary")
    model = job().model()  # type: ignore[operator]
    with pytest.raises(UsageError), bounded():
        load_matching(model, path=place / "weights.pt")
    assert not (place / "canary").exists()


@fuzzed(40)
@given(random=randoms, name=st.sampled_from(["model.safetensors", "model.safetensors.index.json"]))
def test_changed_names_of_tensors_are_read_or_refused(place: Path, random: Random, name: str) -> None:
    path = place / name
    if name.endswith("json"):
        path.write_text(mutate_json({"metadata": {}, "weight_map": {"a": "b.safetensors"}}, random).text)
    else:
        save_file({"a.pooler": torch.zeros(2)}, path)
        path.write_bytes(mutate_bytes(path.read_bytes(), random)[0])
    read(lambda: names_of_tensors(place))
    path.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_that_are_no_file_are_refused(place: Path, name: str, kind: str) -> None:
    put(kind, place / name)
    model = job().model()  # type: ignore[operator]
    with pytest.raises(UsageError), bounded():
        load_matching(model, path=place / name)


@fuzzed(60)
@given(random=randoms)
def test_changed_settings_of_a_launch_before_are_read_or_refused(place: Path, random: Random) -> None:
    before, after = bf.Settings(micro_batch_size=4), bf.Settings(micro_batch_size=2)
    write_fallback(place, Fallback(before=before, after=after, recovery=RECOVERY))
    path = place / FALLBACK
    path.write_text(mutate_json(json.loads(path.read_text()), random).text)
    read(lambda: read_fallback(place, before))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"missing", "a dangling link"}))
def test_settings_of_a_launch_before_that_are_no_file_are_refused(place: Path, kind: str) -> None:
    put(kind, place / FALLBACK)
    with pytest.raises(BrimfulError), bounded():
        read_fallback(place, bf.Settings(micro_batch_size=4))


# Calibrations


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    gpu = find_device("T4")
    keep(calibrate.GPU_CACHE_FILE, "gpus", calibrate._cache_key(gpu), CALIBRATION, what="a test's calibration")
    return place / "brimful" / calibrate.GPU_CACHE_FILE


@fuzzed(60)
@given(random=randoms, in_bytes=st.booleans())
def test_a_changed_calibration_is_used_or_measured_again(kept: Path, random: Random, in_bytes: bool) -> None:
    whole = kept.read_bytes()
    if in_bytes:
        kept.write_bytes(mutate_bytes(whole, random)[0])
    else:
        kept.write_text(mutate_json(json.loads(whole), random).text)
    found = read(lambda: with_kept_calibration(find_device("T4")))
    assert found is not None
    kept.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_that_is_no_file_is_left_alone(kept: Path, kind: str) -> None:
    put(kind, kept)
    assert read(lambda: with_kept_calibration(find_device("T4"))) == find_device("T4")


JOB = JobKind(
    device=find_device("T4"),
    job="gpt",
    parameter_count=1000,
    precision=Precision.FP32,
    optimizer="adamw",
    world_size=1,
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


@pytest.fixture
def factors(place: Path) -> Iterator[Path]:
    path = place / "job_calibrations.json"
    with patch("brimful.profiling.job_calibrations.FILE", str(path)):
        keep_job_calibration(JOB, FACTORS)
        yield path


@fuzzed(60)
@given(random=randoms, in_bytes=st.booleans())
def test_changed_factors_of_a_job_are_plausible_or_not_used(
    factors: Path, random: Random, in_bytes: bool
) -> None:
    whole = factors.read_bytes()
    if in_bytes:
        factors.write_bytes(mutate_bytes(whole, random)[0])
    else:
        factors.write_text(mutate_json(json.loads(whole), random).text)
    found = read(lambda: kept_job_calibration(JOB))
    if isinstance(found, JobCalibration):
        assert 1 / LARGEST_TIME_FACTOR <= found.time_factor <= LARGEST_TIME_FACTOR
        assert found.peak_factor is None or 1 / LARGEST_PEAK_FACTOR <= found.peak_factor <= LARGEST_PEAK_FACTOR
    factors.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_that_are_no_file_are_left_alone(factors: Path, kind: str) -> None:
    put(kind, factors)
    assert read(lambda: kept_job_calibration(JOB)) is None


# Data


@fuzzed(40)
@given(random=randoms, name=st.sampled_from(sorted(TABLES)), bad_samples=st.sampled_from(["refuse", "skip"]))
def test_damaged_tables_and_texts_are_read_or_refused(
    place: Path, random: Random, name: str, bad_samples: str
) -> None:
    (place / name).write_bytes(mutate_bytes(TABLES[name].encode(), random)[0])
    read(partial(make_text_job, place / name, bad_samples))


@fuzzed(40)
@given(random=randoms)
def test_changed_json_lines_are_read_or_refused(place: Path, random: Random) -> None:
    lines = TABLES["texts.jsonl"].splitlines()
    index = random.randrange(len(lines))
    lines[index] = mutate_json(json.loads(lines[index]), random).text
    (place / "texts.jsonl").write_text("\n".join(lines))
    read(partial(make_text_job, place / "texts.jsonl", "skip"))


_WORDS = json.dumps({"tokens": ["a", "film"], "tags": ["O", "B-X"]}) + "\n"
_LABELS = json.dumps({"text": "a film", "label": ["good", "bad"]}) + "\n"
LISTS = {"words.conll": "-DOCSTART- O\n\n" + "a NN O\nfilm NN B-X\n\n" * 8, "words.jsonl": _WORDS * 8}
LISTS |= {"words.csv": "tokens,tags\n" + "a film,O B-X\n" * 8, "labels.jsonl": _LABELS * 8}


@fuzzed(60)
@given(random=randoms, name=st.sampled_from(sorted(LISTS)), in_bytes=st.booleans())
def test_damaged_lists_of_words_and_labels_are_read_or_refused(
    place: Path, random: Random, name: str, in_bytes: bool
) -> None:
    lines = LISTS[name].splitlines(keepends=True)
    if in_bytes or not name.endswith("jsonl"):
        (place / name).write_bytes(mutate_bytes(LISTS[name].encode(), random)[0])
    else:
        (place / name).write_text("".join([mutate_json(json.loads(lines[0]), random).text + "\n", *lines[1:]]))
    options: dict[str, Any] = {"model": "bert-base", "sequence_length": 16, "bad_samples": "skip"}
    if name.startswith("words"):
        read(lambda: token_classification(place / name, **options))
    else:
        read(lambda: text_classification(place / name, multi_label=True, **options))


PRICES = {"prices.csv": "gpu,price_per_hour\nL4,0.8\nA100 80GB SXM,1.89\n", "prices.json": '{"L4": 0.8}'}


@fuzzed(60)
@given(random=randoms, name=st.sampled_from(sorted(PRICES)))
def test_changed_prices_are_read_or_refused(place: Path, random: Random, name: str) -> None:
    (place / name).write_bytes(mutate_bytes(PRICES[name].encode(), random)[0])
    found = read(partial(prices_of, place / name, ["L4"]))
    assert found is None or all(0 <= price <= 1e6 for price in found.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_data_that_are_no_file_are_refused(place: Path, name: str, kind: str) -> None:
    put(kind, place / name)
    assert read(partial(make_text_job, place / name, "refuse")) is None


@fuzzed(60)
@given(random=randoms, in_bytes=st.booleans())
def test_changed_metadata_of_a_recipe_are_read_or_refused(place: Path, random: Random, in_bytes: bool) -> None:
    whole = {
        "task": "language-model",
        "model": "gpt2",
        "tokenizer": "bytes",
        "sequence_length": 16,
        "files": ["a"],
    }
    if in_bytes:
        (place / "job.json").write_bytes(mutate_bytes(json.dumps(whole).encode(), random)[0])
    else:
        (place / "job.json").write_text(mutate_json(whole, random).text)
    found = read(partial(read_recipe_run, place))
    assert found is None or isinstance(found, RecipeRun)


def make_text_job(path: Path, bad_samples: str) -> bf.Job:
    if path.suffix == ".txt":
        return language_model(path, model="gpt2", sequence_length=16, bad_samples=bad_samples)
    return text_classification(path, model="bert-base", sequence_length=16, bad_samples=bad_samples)


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
