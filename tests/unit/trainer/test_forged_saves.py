"""A save with right digests and wrong content is skipped for the one before it, or refused; nothing crashes."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from brimful.errors import ResumeError
from brimful.trainer.storage.restore import SAVES, manifest_text, newest_save

NEWEST, BEFORE = 4, 2


def sign(save: Path, files: Any = None, step: Any = NEWEST) -> None:
    """Write a manifest that the content of a save agrees with."""
    if files is None:
        contents = {path.name: path.read_bytes() for path in save.iterdir() if path.name != "manifest.json"}
        files = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        }
    (save / "manifest.json").write_text(manifest_text(step, files))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with all that can be saved, saved after two and four."""
    from brimful.job import Data
    from brimful.trainer import Schedule
    from helpers.tiny_jobs import all_samples, make_job, train

    run = tmp_path_factory.mktemp("saved") / "run"
    samples = all_samples()
    job = make_job(data=lambda: Data(train=samples, validation=samples), about={"classes": ["a", "b"]})
    train(job, steps=4, run_dir=run, save_every=2, ema_decay=0.9, schedule=Schedule("cosine"))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def newest(run: Path) -> Path:
    return run / SAVES / f"step-{NEWEST:09d}"


def assert_skipped(run: Path) -> str:
    told: list[str] = []
    found = newest_save(run, told.append)
    assert found is not None
    assert found.step == BEFORE
    (reason,) = told
    assert "step-000000004 is not used: " in reason
    return reason


def test_what_was_signed_anew_without_a_change_is_used(run):
    sign(newest(run))
    found = newest_save(run, pytest.fail)
    assert found is not None
    assert found.step == NEWEST


OTHERS = [None, 3, "text", [1], {"a": 1}, {1: {"a": torch.zeros(2)}}, torch.zeros(3), -5, 10**30, float("nan")]
STATE_KEYS = ["optimizer", "scheduler", "scaler", "average", "random", "data_random", "epoch_random"]


def edit_state(save: Path, change: Callable[[Any], object]) -> None:
    state = torch.load(save / "state.pt", weights_only=True)
    change(state)
    torch.save(state, save / "state.pt")
    sign(save)


@pytest.mark.parametrize("name", STATE_KEYS)
def test_a_state_without_a_key_or_of_another_type_is_skipped(run, name):
    save = newest(run)
    content = (save / "state.pt").read_bytes()
    edit_state(save, lambda state: state.pop(name))
    assert_skipped(run)
    permitted = {"scheduler": (None, {"a": 1}), "scaler": (None, {"a": 1}), "average": (None,)}.get(name, ())
    for other in OTHERS:
        if any(other is each or (isinstance(other, dict) and other == each) for each in permitted):
            continue  # refused where schedule, scaler and average are known
        (save / "state.pt").write_bytes(content)
        edit_state(save, lambda state, other=other: state.update({name: other}))
        assert_skipped(run)


@pytest.mark.parametrize("state", [None, [], 3, {}, "text"])
def test_a_state_that_is_another_thing_is_skipped(run, state):
    torch.save(state, newest(run) / "state.pt")
    sign(newest(run))
    assert_skipped(run)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"text", b"\0" * 100_000])
def test_a_state_that_is_no_checkpoint_of_torch_is_skipped(run, content):
    (newest(run) / "state.pt").write_bytes(content)
    sign(newest(run))
    assert_skipped(run)


def random_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["random"][0]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda random: random["python"].__setitem__(0, 2),
        lambda random: random["python"].__setitem__(1, [0] * 624),
        lambda random: random["python"][1].__setitem__(3, 2**32),
        lambda random: random["python"][1].__setitem__(624, 9999),
        lambda random: random["numpy"].__setitem__(0, "PCG64"),
        lambda random: random["numpy"].__setitem__(2, 10**9),
        lambda random: random["numpy"].__setitem__(2, -1),
        lambda random: random["numpy"][1].__setitem__(0, -1),
        lambda random: random.__setitem__("host", torch.zeros(7, dtype=torch.uint8)),
        lambda random: random.__setitem__("host", random["host"].float()),
        lambda random: random.__setitem__("cuda", torch.zeros(16)),
        lambda random: random.pop("cuda"),
    ],
)
def test_random_numbers_that_no_generator_has_are_skipped(run, change):
    before = np.random.get_state(legacy=True), torch.get_rng_state()
    edit_state(newest(run), lambda state: change(random_of(state)))
    assert_skipped(run)
    torch.testing.assert_close((before[0][1], before[1]), (np.random.get_state()[1], torch.get_rng_state()))


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.pop("state"),
        lambda optimizer: optimizer.pop("param_groups"),
        lambda optimizer: optimizer.__setitem__("state", [1]),
        lambda optimizer: optimizer["state"].__setitem__(0, 3),
        lambda optimizer: optimizer["state"].__setitem__("x", {}),
        lambda optimizer: optimizer["param_groups"].append(3),
        lambda optimizer: optimizer["param_groups"][0].pop("params"),
        lambda optimizer: optimizer["param_groups"][0].__setitem__("params", ["x"]),
    ],
)
def test_an_optimizer_state_of_another_form_is_skipped(run, change):
    edit_state(newest(run), lambda state: change(state["optimizer"]))
    assert_skipped(run)


def edit_run(save: Path, **changes: Any) -> None:
    document = json.loads((save / "run.json").read_text())
    (save / "run.json").write_text(json.dumps(document | changes))
    sign(save)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step", [-5, 10**30, 3, None, "4", 4.5, True]),
        ("updates", [-1, 10**30, None]),
        ("skipped_in_a_row", [-1, "x"]),
        ("epoch", [0, -1, 10**30, [1]]),
        ("batches", [-1, 10**30, None]),
        ("metrics_bytes", [-1, 10**30, "x"]),
        ("seed", [-1, None, "0", 0.5]),
        ("settings", [None, 3, {}, {"precision": "fp99"}]),
        ("asked_settings", [None, [], {}]),
        ("rates", [None, [3], [["x"]]]),
        ("schedule", [3, []]),
        ("optimizer_class", [None, 3]),
        ("validations", [None, [3], [{}], [{"step": 1}]]),
        ("unknown", [1]),
    ],
)
def test_numbers_out_of_range_and_other_types_are_skipped(run, name, values):
    for value in values:
        edit_run(newest(run), **{name: value})
        assert name in assert_skipped(run)
    document = json.loads((newest(run) / "run.json").read_text())
    document.pop(name)
    (newest(run) / "run.json").write_text(json.dumps(document))
    sign(newest(run))
    if name != "unknown":
        assert name in assert_skipped(run)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"[" * 100_000, b"\xff", b'{"step": NaN}'])
@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_json_that_is_something_else_is_skipped(run, name, content):
    (newest(run) / name).write_bytes(content)
    if name == "run.json":
        sign(newest(run))
    assert_skipped(run)


@pytest.mark.parametrize(
    "files",
    [
        [],
        None,
        "model.safetensors",
        {},
        {"model.safetensors": 3},
        {"model.safetensors": {"bytes": -1, "sha256": "0" * 64}},
        {"model.safetensors": {"bytes": 1, "sha256": "x"}},
        {"model.safetensors\0": {"bytes": 1, "sha256": "0" * 64}},
    ],
)
def test_a_manifest_of_another_form_is_skipped(run, files):
    sign(newest(run), files={} if files is None else files)
    if files is None:
        document = json.loads((newest(run) / "manifest.json").read_text())
        (newest(run) / "manifest.json").write_text(json.dumps(document | {"files": None}))
    assert_skipped(run)


@pytest.mark.parametrize("step", [-5, 10**30, 3, None, "4", 4.0])
def test_a_manifest_of_another_step_than_its_directory_is_skipped(run, step):
    files = json.loads((newest(run) / "manifest.json").read_text())["files"]
    sign(newest(run), files=files, step=step)
    assert_skipped(run)


@pytest.mark.parametrize(
    "name", ["../../../secret", "/dev/zero", "shards/../run.json", "shards/x", "a\0b", "x"]
)
def test_a_manifest_that_names_other_files_opens_none_of_them(run, name):
    files = json.loads((newest(run) / "manifest.json").read_text())["files"]
    sign(newest(run), files=files | {name: {"bytes": 1, "sha256": "0" * 64}})
    assert "is not a file of a save" in assert_skipped(run)


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "state.pt", "model.safetensors"])
def test_a_fifo_or_a_device_is_skipped_without_waiting_for_it(run, name):
    path = newest(run) / name
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in assert_skipped(run)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a regular file" in assert_skipped(run)


def test_a_fifo_that_is_not_in_the_manifest_is_refused_as_any_other_file(run):
    os.mkfifo(newest(run) / "00001-of-00001.safetensors")
    assert "was not saved with it" in assert_skipped(run)


@pytest.mark.parametrize(
    "tied", ["x", "null", "[]", "3", '{"a": 1}', '{"head.bias": "head.weight"}', "[" * 100_000]
)
def test_names_of_tied_weights_that_are_none_are_skipped(run, tied):
    path = newest(run) / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "tied": tied})
    sign(newest(run))
    assert_skipped(run)


def resume(run: Path, **options: Any) -> None:
    from brimful.job import Data
    from brimful.trainer import Schedule
    from helpers.tiny_jobs import all_samples, make_job, train

    samples = all_samples()
    job = make_job(data=lambda: Data(train=samples, validation=samples), about={"classes": ["a", "b"]})
    options = {"steps": 4, "ema_decay": 0.9, "schedule": Schedule("cosine")} | options
    train(job, run_dir=run, resume=True, **options)


def test_weights_of_another_type_are_refused(run):
    path = newest(run) / "model.safetensors"
    tensors = load_file(path)
    tensors["head.weight"] = tensors["head.weight"].double()
    save_file(tensors, path, metadata={"format": "pt", "tied": "{}"})
    sign(newest(run))
    with pytest.raises(ResumeError, match=r"'head.weight' has type torch.float32, and torch.float64 was saved"):
        resume(run)


def first_moment(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer"]["state"][0]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: first_moment(state).update(exp_avg=torch.zeros(3)),
            r"'exp_avg' of parameter 0 .*\(3,\)",
        ),
        (lambda state: first_moment(state).update(exp_avg=torch.zeros(8, 8).double()), "float64"),
        (lambda state: state["optimizer"]["state"].update({99: {}}), "a parameter 99"),
        (lambda state: state["optimizer"]["param_groups"][0].update(lr="fast"), "`lr` of group 0 is a str"),
        (lambda state: state["optimizer"]["param_groups"][0]["params"].pop(), "other numbers of parameters"),
        (lambda state: state["scheduler"].pop("last_epoch"), "no `last_epoch`"),
        (lambda state: state["scheduler"].update(last_epoch="x"), "`last_epoch` is a str"),
        (lambda state: state["scheduler"].update(step=3), "`step`, which is a method"),
        (lambda state: state["average"].pop("head.bias"), "no moving average"),
        (lambda state: state["average"].update({"head.bias": torch.zeros(1)}), "no moving average"),
    ],
)
def test_state_that_does_not_fit_this_optimizer_schedule_or_average_is_refused(run, change, said):
    edit_state(newest(run), change)
    with pytest.raises(ResumeError, match=said):
        resume(run)


def test_the_state_of_a_loss_scaler_is_checked(run):
    from brimful.trainer.storage.checkpoint import check_scaler_state

    whole = torch.amp.GradScaler("cpu", init_scale=4.0).state_dict()
    check_scaler_state(whole)
    for name, value in (
        ("scale", -1.0),
        ("scale", float("inf")),
        ("_growth_tracker", -1),
        ("backoff_factor", 2),
    ):
        with pytest.raises(ResumeError, match=name.removeprefix("_")):
            check_scaler_state(whole | {name: value})
    with pytest.raises(ResumeError, match="growth_interval"):
        check_scaler_state({name: value for name, value in whole.items() if name != "growth_interval"})


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_each_of_torchs_optimizers_fits_its_parameters(name, dtype):
    from brimful.trainer.storage.checkpoint import check_optimizer_state

    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 1)).to(dtype)
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check_optimizer_state(optimizer, optimizer.state_dict())
