"""Plans, traces, calibrations and files of weights: what a file holds never runs, blocks or crashes."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks.case import (
    Case,
    FailedError,
    Kind,
    Place,
    check_done,
    check_done_or_refused,
    check_refused,
    contents,
    control,
)
from attacks.material import ESTIMATE
from attacks.mutations import KINDS, Mutation, mutate_bytes, mutate_json, put
from attacks.process import HANG_SECONDS, Ran, call

EVIL_JOB = """
from pathlib import Path
Path({canary!r}).touch()
def job(**options): raise SystemExit(0)
"""


def plan_cases(seed: int) -> Iterator[Case]:
    """Plans that were changed, given to `plan --check` and `train --plan`."""
    random = Random(f"plan {seed}")
    yield control("checked", partial(_unchanged_plan, _check_plan))
    yield control("trained by", partial(_unchanged_plan, _train_by_plan))
    for number in range(110):
        draw = random.random()
        yield Case(f"checked, changed {seed}.{number}", partial(_changed_plan, _check_plan, draw))
        yield Case(f"trained by, changed {seed}.{number}", partial(_changed_plan, _train_by_plan, draw))
    for number in range(20):
        yield Case(f"bytes {seed}.{number}", partial(_damaged_plan, random.random()))
    for kind in KINDS:
        yield Case(f"checked, {kind}", partial(_other_plan, kind, _check_plan))
        yield Case(f"trained by, {kind}", partial(_other_plan, kind, _train_by_plan))
    for name, text in _NO_PLANS.items():
        yield Case(f"checked, {name}", partial(_no_plan, text, _check_plan))
        yield Case(f"trained by, {name}", partial(_no_plan, text, _train_by_plan))
    for name, options in _SOURCES:
        yield Case(f"source {name}", partial(_hostile_source, name, options))


_NO_PLANS = {
    "empty object": "{}",
    "list": "[]",
    "two documents": "{}{}",
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "UTF-16": "\ufeff{}",
    "a later version": '{"brimful_plan": 99}',
    "a NUL": "\0",
    "a number of 100,000 digits": "9" * 100_000,
}

_SOURCES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("os:system", {"command": "touch {canary}"}),
    ("posix:system", {"command": "touch {canary}"}),
    ("subprocess:run", {"args": "touch {canary}", "shell": True}),
    ("subprocess:getoutput", {"cmd": "touch {canary}"}),
    ("pathlib:Path.touch", {}),
    ("builtins:open", {"file": "{canary}", "mode": "w"}),
    ("builtins:exec", {"source": "open({canary!r}, 'w')"}),
    ("runpy:run_path", {"path_name": "evil.py"}),
    ("evil.py:job", {}),
    ("./evil.py:job", {}),
    ("{folder}/evil.py:job", {}),
    ("../evil.py:job", {}),
    ("evil:job", {}),
    ("shutil:rmtree", {"path": "dear"}),
)


def _check_plan(place: Place) -> Ran:
    return place.run("plan", "job.py:plain", "--check", "plan.json")


def _train_by_plan(place: Place) -> Ran:
    return place.run("train", "job.py:plain", "--plan", "plan.json", "--steps", "1", "--run-dir", "run")


def _unchanged_plan(use: Callable[[Place], Ran], place: Place) -> None:
    shutil.copy(place.material.plain_plan, place.folder / "plan.json")
    check_done(use(place))


def _changed_plan(use: Callable[[Place], Ran], draw: float, place: Place) -> None:
    document = json.loads(place.material.plain_plan.read_text())
    mutation = mutate_json(document, Random(draw))
    _use_changed(place, use, mutation, "plan.json")


def _use_changed(place: Place, use: Callable[[Place], Ran], mutation: Mutation, name: str) -> None:
    (place.folder / name).write_text(mutation.text)
    try:
        (check_refused if mutation.is_invalid else check_done_or_refused)(use(place))
    except FailedError as failure:
        raise FailedError(failure.kind, f"{mutation.what}: {failure.detail}") from None


def _damaged_plan(draw: float, place: Place) -> None:
    content, _ = mutate_bytes(place.material.plain_plan.read_bytes(), Random(draw))
    (place.folder / "plan.json").write_bytes(content)
    check_done_or_refused(_check_plan(place))


def _other_plan(kind: str, use: Callable[[Place], Ran], place: Place) -> None:
    put(kind, place.folder / "plan.json")
    check_refused(use(place))


def _no_plan(text: str, use: Callable[[Place], Ran], place: Place) -> None:
    (place.folder / "plan.json").write_text(text)
    check_refused(use(place))


def _hostile_source(name: str, options: dict[str, Any], place: Place) -> None:
    """A plan's own `source` names what `--check` is to build; no model is named beside it."""
    names = {"canary": str(place.canary), "folder": str(place.folder)}
    for folder in (place.root, place.folder):
        (folder / "evil.py").write_text(EVIL_JOB.format(canary=str(place.canary)))
    (place.folder / "dear").mkdir()
    document = json.loads(place.material.plain_plan.read_text())
    filled = {key: value.format(**names) if isinstance(value, str) else value for key, value in options.items()}
    document["source"] = {"name": name.format(**names), "options": filled}
    (place.folder / "plan.json").write_text(json.dumps(document))
    ran = place.run("plan", "--check", "plan.json")
    if place.canary.exists() or not (place.folder / "dear").exists():
        raise FailedError(Kind.EXECUTED, f"{name} was called")
    check_refused(ran)


# Traces


def trace_cases(seed: int) -> Iterator[Case]:
    """Traces that were changed, loaded, and estimated where they are accepted."""
    random = Random(f"trace {seed}")
    yield control("estimated", _unchanged_trace)
    for number in range(140):
        yield Case(f"changed {seed}.{number}", partial(_changed_trace, random.random()))
    for number in range(15):
        yield Case(f"bytes {seed}.{number}", partial(_damaged_trace, random.random(), False))
        yield Case(f"gzipped bytes {seed}.{number}", partial(_damaged_trace, random.random(), True))
    for name in _TRACE_FIELDS:
        yield Case(f"without {name}", partial(_trace_without, name))
    for kind in KINDS:
        yield Case(kind, partial(_other_trace, kind, "trace.json"))
        yield Case(f"gzipped, {kind}", partial(_other_trace, kind, "trace.json.gz"))
    yield Case("a gzip of 8 GiB", _bomb)


_TRACE_FIELDS = (
    *("brimful_trace", "job", "settings", "ops", "storages", "events", "corrections", "module_classes"),
    *("captured_steps", "captured_micro_batches", "uncertain_ops", "batch_coupled_modules", "device_kind"),
    *("couples_samples", "host_state_bytes"),
)


def _use_trace(name: str, place: Place) -> Ran:
    def action() -> None:
        from brimful.devices import find_device
        from brimful.prediction import estimate_trace
        from brimful.trace import Trace

        print(estimate_trace(Trace.load(name), find_device("cpu")))

    return place.run(action=call(action))


def _unchanged_trace(place: Place) -> None:
    shutil.copy(place.material.trace, place.folder / "trace.json")
    check_done(_use_trace("trace.json", place))


def _changed_trace(draw: float, place: Place) -> None:
    document = json.loads(place.material.trace.read_text())
    _use_changed(place, partial(_use_trace, "trace.json"), mutate_json(document, Random(draw)), "trace.json")


def _damaged_trace(draw: float, is_gzipped: bool, place: Place) -> None:
    name = "trace.json.gz" if is_gzipped else "trace.json"
    content = place.material.trace.read_bytes()
    content, _ = mutate_bytes(gzip.compress(content) if is_gzipped else content, Random(draw))
    (place.folder / name).write_bytes(content)
    check_done_or_refused(_use_trace(name, place))


def _trace_without(name: str, place: Place) -> None:
    document = json.loads(place.material.trace.read_text())
    document.pop(name, None)
    (place.folder / "trace.json").write_text(json.dumps(document))
    check_done_or_refused(_use_trace("trace.json", place))


def _other_trace(kind: str, name: str, place: Place) -> None:
    put(kind, place.folder / name)
    check_refused(_use_trace(name, place))


def _bomb(place: Place) -> None:
    block = gzip.compress(b" " * (1 << 26))
    (place.folder / "trace.json.gz").write_bytes(block * 128)
    check_refused(_use_trace("trace.json.gz", place))


# Calibrations


def calibration_cases(seed: int) -> Iterator[Case]:
    """What was measured of this machine and kept, changed; homes that cannot be written to."""
    random = Random(f"calibration {seed}")
    yield control("estimated", lambda place: check_done(_estimate(place)))
    for kind in KINDS:
        yield Case(f"of GPUs, {kind}", partial(_other_calibration, "gpus.json", kind))
    for kind in ("a FIFO", "a link to /dev/zero"):
        yield Case(f"of the CPU, {kind}", partial(_other_calibration, "cpu.json", kind))
    for number in range(6):
        yield Case(f"changed {seed}.{number}", partial(_changed_calibration, random.random()))
    for number in range(3):
        yield Case(f"bytes {seed}.{number}", partial(_damaged_calibration, random.random()))
    for name, environment in _HOMES.items():
        yield Case(name, partial(_other_home, environment))


_HOMES: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None, "XDG_CACHE_HOME": None},
    "a home that is not there": {"HOME": "/not/there", "XDG_CACHE_HOME": None},
    "a home that is a file": {"HOME": "job.py", "XDG_CACHE_HOME": None},
    "a cache that is a file": {"XDG_CACHE_HOME": "job.py"},
    "a relative cache": {"XDG_CACHE_HOME": "cache"},
}


def _estimate(place: Place, device: str = "RTX 3090", **environment: str | None) -> Ran:
    return place.run(*ESTIMATE, "--device", device, environment=environment)


def _cache(place: Place) -> Path:
    cache = place.folder / "cache"
    shutil.copytree(place.material.cache, cache)
    document = (cache / "brimful" / "cpu.json").read_text()
    (cache / "brimful" / "gpus.json").write_text(document.replace('"cpus"', '"gpus"'))
    return cache


def _other_calibration(name: str, kind: str, place: Place) -> None:
    cache = _cache(place)
    put(kind, cache / "brimful" / name)
    device = "cpu" if name == "cpu.json" else "RTX 3090"
    check_done(_estimate(place, device, XDG_CACHE_HOME=str(cache)))


def _changed_calibration(draw: float, place: Place) -> None:
    cache = _cache(place)
    path = cache / "brimful" / "cpu.json"
    path.write_text(mutate_json(json.loads(path.read_text()), Random(draw)).text)
    check_done(_estimate(place, "cpu", XDG_CACHE_HOME=str(cache)))


def _damaged_calibration(draw: float, place: Place) -> None:
    cache = _cache(place)
    path = cache / "brimful" / "gpus.json"
    path.write_bytes(mutate_bytes(path.read_bytes(), Random(draw))[0])
    check_done(_estimate(place, XDG_CACHE_HOME=str(cache)))


def _other_home(environment: dict[str, str | None], place: Place) -> None:
    check_done(_estimate(place, **environment))


# Processes that calibrate at once


def race_cases(seed: int) -> Iterator[Case]:
    """Two processes calibrate into one cache, and one of them may be killed."""
    random = Random(f"races {seed}")
    for number in range(4):
        kills_at = random.uniform(0.1, 8) if number % 2 else None
        yield Case(f"{'one killed' if number % 2 else 'both'} {seed}.{number}", partial(_race, kills_at))


def _race(kills_at: float | None, place: Place) -> None:
    environment = {"XDG_CACHE_HOME": str(place.folder / "cache")}
    both = [place.start(*ESTIMATE, "--device", "cpu", environment=environment) for _ in range(2)]
    if kills_at is not None:
        time.sleep(kills_at)
        both[0].send(signal.SIGKILL)
    ends = [each.wait(3 * HANG_SECONDS) for each in both]
    for ran in ends[kills_at is not None :]:
        check_done(ran)
    check_done(_estimate(place, "cpu", **environment))
    left = [path.name for path in (place.folder / "cache" / "brimful").iterdir()]
    if kills_at is None and len(left) > 2:
        raise FailedError(Kind.WRONG, f"files are left in the cache: {', '.join(sorted(left))}")


# Exports


def export_cases(_seed: int) -> Iterator[Case]:
    """Exports to paths that cannot be written to, or that are someone's file."""
    for tool in ("accelerate", "deepspeed"):
        for kind in KINDS:
            yield Case(f"{tool}, {kind}", partial(_export, tool, kind, "export"))
        for name in ("not/there/export", "/dev/full", "a\nb", "../out", "export\u2028", "x" * 300):
            yield Case(f"{tool}, to {name[:20]!r}", partial(_export, tool, None, name))


def _export(tool: str, kind: str | None, name: str, place: Place) -> None:
    if kind is not None:
        put(kind, place.folder / name)
    before = contents(place.folder)
    options = ("--global-batch-size", "16", "--device", "RTX 3090", "--export", f"{tool}={name}")
    check_done_or_refused(place.run("plan", "job.py:plain", *options))
    after = contents(place.folder)
    changed = [each for each in before if each != name and after.get(each) != before[each]]
    if changed:
        raise FailedError(Kind.LOST, f"{', '.join(changed)} changed")


# Weights of others


class Executes:
    """Unpickled by a reader that runs code, it makes a file."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self._command,)


def weights_cases(_seed: int) -> Iterator[Case]:
    """Files of weights that hold other things, and models that name code of their own."""
    yield control("--weights", lambda place: check_done(_start_from(_good_weights, place)))
    yield control("a directory of a model", _unchanged_model)
    for name, write in _WEIGHTS.items():
        yield Case(f"--weights, {name}", partial(_hostile_weights, write))
    for name in ("a pickle that executes", "not weights", "a FIFO"):
        yield Case(f"pytorch_model.bin, {name}", partial(_hostile_model, name))
    for name in ("auto_map of a model", "auto_map of a tokenizer"):
        yield Case(name, partial(_auto_map, name))


def _pickled(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps({"a": Executes(f"touch {canary}")}))


def _torch_saved(path: Path, canary: Path) -> None:
    import torch

    torch.save({"a": Executes(f"touch {canary}")}, path)


def _huge_header(path: Path, _canary: Path) -> None:
    path.with_suffix(".safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")


def _text(path: Path, _canary: Path) -> None:
    path.write_text("not weights")


_WEIGHTS: dict[str, Callable[[Path, Path], None]] = {
    "a pickle that executes": _pickled,
    "a file of torch.save that executes": _torch_saved,
    "a safetensors header of 2**63 bytes": _huge_header,
    "text": _text,
}


def _images(folder: Path) -> None:
    from PIL import Image

    for number, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (8, 8), (200 * number, index, 0)).save(folder / name / f"{index}.png")


def _hostile_weights(write: Callable[[Path, Path], None], place: Place) -> None:
    check_refused(_start_from(write, place))


def _good_weights(path: Path, _canary: Path) -> None:
    import torch

    import brimful as bf

    model = bf.find_architecture("resnet18", image_size=33, num_classes=2).model
    assert callable(model)
    torch.save(model().state_dict(), path)


def _start_from(write: Callable[[Path, Path], None], place: Place) -> Ran:
    _images(place.folder / "photos")
    write(place.folder / "weights.pt", place.canary)
    (path,) = place.folder.glob("weights.*")

    def action() -> None:
        from brimful.recipes import image_classification

        job = image_classification("photos", model="resnet18", image_size=33, weights=path, workers=0)
        assert job.weights is not None
        assert callable(job.model)
        job.weights(job.model())

    return place.run(action=call(action))


def _classify(place: Place) -> Ran:
    (place.folder / "texts.csv").write_text("text,label\n" + "good film,a\nbad film,b\n" * 8)

    def action() -> None:
        from brimful.recipes import text_classification

        job = text_classification("texts.csv", model="bert", sequence_length=16)
        assert callable(job.model)
        model = job.model()
        if job.weights is not None:
            job.weights(model)

    return place.run(action=call(action))


def _unchanged_model(place: Place) -> None:
    shutil.copytree(place.material.bert, place.folder / "bert")
    check_done(_classify(place))


def _hostile_model(name: str, place: Place) -> None:
    folder = place.folder / "bert"
    shutil.copytree(place.material.bert, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    if name == "a FIFO":
        put(name, path)
    else:
        (_torch_saved if "executes" in name else _text)(path, place.canary)
    check_refused(_classify(place))


def _auto_map(name: str, place: Place) -> None:
    folder = place.folder / "bert"
    shutil.copytree(place.material.bert, folder)
    (folder / "evil.py").write_text(EVIL_JOB.format(canary=str(place.canary)))
    file, maps = (
        "config.json",
        {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"},
    )
    if "tokenizer" in name:
        file, maps = "tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", None]}
    document = json.loads((folder / file).read_text())
    changed = document | {"auto_map": maps}
    if "tokenizer" not in name:
        changed["model_type"] = "evil"
    (folder / file).write_text(json.dumps(changed))
    check_done_or_refused(_classify(place))
