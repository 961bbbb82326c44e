"""Saves and run directories that were changed: the run resumes as if not, or refuses and leaves every file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks.case import (
    KEPT,
    Case,
    FailedError,
    Place,
    check_done,
    check_done_or_refused,
    check_equal,
    check_nothing_lost,
    check_refused,
    check_same_metrics,
    check_same_weights,
    check_untouched,
    contents,
    control,
    metrics,
    saved_steps,
)
from attacks.files import Executes
from attacks.material import STOPPED_AFTER, train
from attacks.mutations import HOSTILE, KINDS, mutate_bytes, mutate_json, put
from attacks.process import Ran

NEWEST, OLDER = (f"saves/step-{step:09d}" for step in (STOPPED_AFTER, STOPPED_AFTER - 1))
OF_A_SAVE = ("manifest.json", "model.safetensors", "state.pt")
OF_A_RUN = ("metrics.jsonl", "plan.json", "weights.safetensors", "best.safetensors", "result.json")
_WRITTEN_ONLY = ("best.safetensors", "average.safetensors", "weights.safetensors", "result.json", "report.txt")
"""Files that no later run reads: what is damaged in them, and not written again, stays."""


def tampering_cases(seed: int) -> Iterator[Case]:
    """Run directories in which something was changed."""
    random = Random(f"saves {seed}")
    yield control("resumed", _unchanged)
    yield control("signed again", _signed_again)
    for name in (*(f"{NEWEST}/{each}" for each in OF_A_SAVE), *OF_A_RUN):
        for number in range(10):
            yield Case(f"bytes of {name} {seed}.{number}", partial(_damaged, name, random.random()))
    for name in OF_A_SAVE:
        for number in range(2):
            yield Case(f"bytes of both {name} {seed}.{number}", partial(_both_damaged, name, random.random()))
    for name in (NEWEST, *(f"{NEWEST}/{each}" for each in OF_A_SAVE), *OF_A_RUN, "average.safetensors"):
        for kind in KINDS:
            yield Case(f"{name}, {kind}", partial(_other_kind, name, kind))
    for number in range(12):
        yield Case(f"manifest {seed}.{number}", partial(_changed_manifest, random.random(), False))
        yield Case(f"manifest signed {seed}.{number}", partial(_changed_manifest, random.random(), True))
    for name, change in _ARRANGED.items():
        yield Case(name, partial(_arranged, change))
    for name, write in EXECUTING.items():
        yield Case(f"state.pt, {name}", partial(_executing, write))
    for number in range(36):
        yield Case(f"state forged {seed}.{number}", partial(_forged_state, random.random()))
    for name, forge in _FORGED.items():
        yield Case(f"forged, {name}", partial(_forged, forge))
    for kind in ("a directory", "a dangling link", "missing", "empty", "a FIFO"):
        yield Case(f"saves, {kind}", partial(_saves_gone, kind))
    yield Case("saves, not readable", _saves_not_readable)


def resume(place: Place, **options: Any) -> Ran:
    """The command that would finish the stopped run."""
    return place.run(*train("--resume"), **options)


def check_resumed(place: Place, run: Path, ran: Ran, before: dict[str, str], *, changed: str = "") -> None:
    """It resumed as if nothing were changed, or refused and left every file.

    A run that trained and then could not write a file ends with an error too; nothing else of it may be gone.
    """
    kept = {*KEPT, "saves"} - {changed}
    try:
        check_done_or_refused(ran)
    except FailedError as failure:
        check_untouched_but_logs(run, before)
        raise failure
    if ran.status != 0 and max(saved_steps(run), default=0) > STOPPED_AFTER:
        check_nothing_lost(run, kept)
    elif ran.status != 0:
        check_untouched(run, before)
    elif changed == "metrics.jsonl" and changed in ran.err:  # what is lost of it is said
        expected = metrics(place.material.whole_run())
        steps = [entry for entry in expected if entry["step"] > STOPPED_AFTER]
        check_same_metrics(metrics(run)[-len(steps) :], steps)
        check_same_weights(run, place.material.whole_run(), but="best.safetensors")
    else:
        check_equal(run, place.material.whole_run(), but=changed if changed in _WRITTEN_ONLY else "")


def check_untouched_but_logs(run: Path, before: dict[str, str]) -> None:
    """Of a run that crashed: nothing but its metrics may have changed, and nothing is gone."""
    check_untouched(run, {name: digest for name, digest in before.items() if name != "metrics.jsonl"})


def _try(place: Place, change: Callable[[Path], object], *, changed: str = "") -> None:
    run = place.copy_run()
    change(run)
    before = contents(run)
    check_resumed(place, run, resume(place), before, changed=changed)


def _unchanged(place: Place) -> None:
    run = place.copy_run()
    check_done(resume(place))
    check_equal(run, place.material.whole_run())


def _signed_again(place: Place) -> None:
    """The signature that forgeries rely on is the one that brimful checks."""
    run = place.copy_run()
    sign(run / NEWEST)
    ran = resume(place)
    check_done(ran)
    check_equal(run, place.material.whole_run())
    if "not used" in ran.err:
        raise RuntimeError(f"a save signed again is refused, so that forgeries try nothing: {ran.err}")


def _damaged(name: str, draw: float, place: Place) -> None:
    def change(run: Path) -> None:
        content, _ = mutate_bytes((run / name).read_bytes(), Random(draw))
        (run / name).write_bytes(content)

    _try(place, change, changed=name)


def _both_damaged(name: str, draw: float, place: Place) -> None:
    def change(run: Path) -> None:
        for save in (NEWEST, OLDER):
            path = run / save / name
            path.write_bytes(mutate_bytes(path.read_bytes(), Random(draw))[0])

    _try(place, change)


def _other_kind(name: str, kind: str, place: Place) -> None:
    _try(place, lambda run: put(kind, run / name), changed=name)


def _changed_manifest(draw: float, is_signed: bool, place: Place) -> None:
    def change(run: Path) -> None:
        path = run / NEWEST / "manifest.json"
        path.write_text(mutate_json(json.loads(path.read_text()), Random(draw)).text)
        if is_signed:
            sign_manifest(path)

    _try(place, change)


def sign(save: Path) -> None:
    """Write sizes and digests anew, as one who knows the format can."""
    path = save / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        content = (save / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))
    sign_manifest(path)


def sign_manifest(path: Path) -> None:
    """Write the digest of a manifest anew, if it is one."""
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return  # nothing to sign
    if not isinstance(manifest, dict):
        return
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    path.write_text(json.dumps(manifest | {"sha256": digest}, indent=2) + "\n")


# Whole saves


def _arranged(change: Callable[[Path], object], place: Place) -> None:
    _try(place, change)


def _swapped(run: Path) -> None:
    newest, older = run / NEWEST, run / OLDER
    newest.rename(run / "saves" / "other")
    older.rename(newest)
    (run / "saves" / "other").rename(older)


def _copied_as(name: str) -> Callable[[Path], object]:
    return lambda run: shutil.copytree(run / NEWEST, run / "saves" / name)


def _of_other_files(run: Path) -> None:
    for name in ("model.safetensors", "state.pt"):
        shutil.copy(run / OLDER / name, run / NEWEST / name)


_ARRANGED: dict[str, Callable[[Path], object]] = {
    "saves swapped": _swapped,
    "newest renamed to a later step": lambda run: (run / NEWEST).rename(run / "saves" / "step-000000010"),
    "newest copied as a later step": _copied_as("step-000000010"),
    "newest copied as step 10**30": _copied_as(f"step-{10**30}"),
    "newest copied as no step": _copied_as("step-x"),
    "newest copied under digits of another script": _copied_as("step-\u0661\u0662"),
    "a partial save": _copied_as(".step-000000009.partial"),
    "newest with the older one's files": _of_other_files,
    "a foreign file in the newest": lambda run: (run / NEWEST / "extra.bin").write_bytes(b"x"),
    "a foreign file among saves": lambda run: (run / "saves" / "step-000000009").write_bytes(b"x"),
    "only the newest": lambda run: shutil.rmtree(run / OLDER),
    "only the older": lambda run: shutil.rmtree(run / NEWEST),
    "a foreign file in the run directory": lambda run: (run / "dear.txt").write_text("dear"),
}


# Forged saves: digests are right, the content is another


class _Calls:
    """Unpickled by a reader that runs code, it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _torch_saved(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def write(path: Path, canary: Path) -> None:
        import torch

        torch.save(make(canary), path)

    return write


def _plain_pickle(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Executes(f"touch {canary}")))


def _legacy(path: Path, canary: Path) -> None:
    import torch

    torch.save({"a": Executes(f"touch {canary}")}, path, _use_new_zipfile_serialization=False)


def _beside_the_state(path: Path, canary: Path) -> None:
    import torch

    state = torch.load(path, weights_only=True)
    torch.save(state | {"more": Executes(f"touch {canary}")}, path)


EXECUTING: dict[str, Callable[[Path, Path], None]] = {
    "a pickle that executes": _plain_pickle,
    "torch.save of os.system": _torch_saved(lambda canary: {"a": Executes(f"touch {canary}")}),
    "torch.save of eval": _torch_saved(lambda canary: {"a": _Calls(eval, f"open({str(canary)!r}, 'w')")}),
    "torch.save of Path.touch": _torch_saved(lambda canary: _Calls(Path.touch, canary)),
    "the legacy format": _legacy,
    "the whole state and an object that executes": _beside_the_state,
}


def _executing(write: Callable[[Path, Path], None], place: Place) -> None:
    def change(run: Path) -> None:
        write(run / NEWEST / "state.pt", place.canary)
        sign(run / NEWEST)

    _try(place, change)


def _forged_state(draw: float, place: Place) -> None:
    """One entry of the state removed, or of another type."""
    import torch

    random = Random(draw)

    def change(run: Path) -> None:
        path = run / NEWEST / "state.pt"
        state = torch.load(path, weights_only=True)
        key = random.choice(list(state))
        if random.random() < 0.3:
            del state[key]
        else:
            value = random.choice([*HOSTILE, torch.ones(3), {"step": torch.ones(1)}])
            state[key] = value
        torch.save(state, path)
        sign(run / NEWEST)

    _try(place, change)


def _forged(forge: Callable[[Path], None], place: Place) -> None:
    def change(run: Path) -> None:
        forge(run / NEWEST)
        sign(run / NEWEST)

    _try(place, change)


def _state_with(**changes: Any) -> Callable[[Path], None]:
    def forge(save: Path) -> None:
        import torch

        state = torch.load(save / "state.pt", weights_only=True)
        torch.save({**state, **changes}, save / "state.pt")

    return forge


def _state_is(value: Any) -> Callable[[Path], None]:
    def forge(save: Path) -> None:
        import torch

        torch.save(value, save / "state.pt")

    return forge


def _weights(change: Callable[[Any], Any], *, metadata: dict[str, str] | None = None) -> Callable[[Path], None]:
    def forge(save: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = save / "model.safetensors"
        with safe_open(path, framework="pt") as file:
            kept = file.metadata()
        tensors = {name: change(tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={**kept, **(metadata or {})})

    return forge


_FORGED: dict[str, Callable[[Path], None]] = {
    "step -5": _state_with(step=-5),
    "step 10**30": _state_with(step=10**30),
    "step 7": _state_with(step=7),
    "taken -5": _state_with(taken=-5),
    "taken 10**30": _state_with(taken=10**30),
    "metrics_bytes -1": _state_with(metrics_bytes=-1),
    "metrics_bytes 10**30": _state_with(metrics_bytes=10**30),
    "an empty state.pt": lambda save: (save / "state.pt").write_bytes(b""),
    "a state that is a list": _state_is([]),
    "a state that is empty": _state_is({}),
    "weights of float64": _weights(lambda tensor: tensor.double()),
    "weights of other shapes": _weights(lambda tensor: tensor.flatten()[:1].clone()),
    "weights that are NaN": _weights(lambda tensor: tensor * float("nan")),
    "tied names that are a list": _weights(lambda tensor: tensor, metadata={"tied": "[]"}),
    "tied names that are null": _weights(lambda tensor: tensor, metadata={"tied": "null"}),
    "tied names of nothing": _weights(lambda tensor: tensor, metadata={"tied": '{"a": "b"}'}),
}


# Saves that cannot be seen


def _saves_gone(kind: str, place: Place) -> None:
    """Weights and results of a run whose saves are gone are not begun over."""
    run = place.copy_run()
    put(kind, run / "saves")
    before = contents(run)
    ran = resume(place)
    check_untouched(run, before)
    check_refused(ran)


def _saves_not_readable(place: Place) -> None:
    if os.geteuid() != 0:
        raise RuntimeError("needs root, to become another user")
    run = place.copy_run()
    before = contents(run)
    for path in (place.root, *place.root.rglob("*")):
        path.chmod(0o777)
    (run / "saves").chmod(0)
    ran = resume(place, is_nobody=True)
    (run / "saves").chmod(0o777)
    check_untouched(run, before)
    check_refused(ran)
