"""Saves of which every rank writes its part: whole or not there, read by any number of ranks, without code."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from brimful.distributed.fsdp import Sharded
from brimful.distributed.gather import WholeModel
from brimful.errors import ResumeError, SaveError
from brimful.settings import Parallelism, Settings
from brimful.trainer.storage import saves
from brimful.trainer.storage.restore import SAVES, manifest_text, newest_save
from brimful.trainer.storage.shards import SHARDS
from helpers.ranks import on_ranks, one_after_another
from helpers.trained_on_ranks import GLOBAL_BATCH, curve, settings, trained

pytestmark = pytest.mark.slow  # processes that import torch

TOLERANCE = 1e-5
"""Gradients are summed in another order."""

OPTIONS: dict[str, Any] = {"epochs": None, "branches": False}


def on(ranks: int, parallelism: Parallelism = Parallelism.FSDP2) -> Settings:
    """The same global batch on any number of ranks."""
    return settings(ranks, accumulation=min(2, GLOBAL_BATCH // ranks), parallelism=parallelism)


def losses(how: Settings, **options: Any) -> list[float]:
    """Of this process or, of several ranks, of each, which are the same."""
    if how.world_size == 1:
        return curve(how, OPTIONS | options)[0]
    found = on_ranks(curve, how, OPTIONS | options, count=how.world_size)
    assert all(each[0] == found[0][0] for each in found)
    return found[0][0]


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps by two ranks under FSDP2, saved after two and four."""
    run = tmp_path_factory.mktemp("saved") / "run"
    losses(on(2), run_dir=run, steps=4, save_every=2)
    return run


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(on(1), steps=8)


def copy_of(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture(scope="module")
def saved_by_four(saved_by_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same gone on with by four ranks for two steps; 17 rows are divided unevenly among them."""
    run = shutil.copytree(saved_by_two, tmp_path_factory.mktemp("saved") / "run")
    losses(on(4), run_dir=run, steps=6, resume=True)
    return run


@pytest.fixture(scope="module")
def of_two(
    saved_by_two: Path, saved_by_four: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What two ranks come to in several runs, one after another: by rank."""
    folder = tmp_path_factory.mktemp("two")
    runs = {"fsdp2": saved_by_four, "ddp": saved_by_four, "damaged": saved_by_two, "full": saved_by_two}
    for name, run in runs.items():
        shutil.copytree(run, folder / name)
    losses(on(1), run_dir=folder / "whole", steps=4)
    save = folder / "damaged" / SAVES / "step-000000004"
    for shard in (save / SHARDS).iterdir():  # one of them is for the other rank to check
        shard.write_bytes(shard.read_bytes()[:-1])
        break

    def goes_on(name: str, parallelism: Parallelism) -> tuple[Any, ...]:
        return resumed, (on(2, parallelism), str(folder / name))

    works = {
        "divided": goes_on("fsdp2", Parallelism.FSDP2),
        "ddp": goes_on("ddp", Parallelism.DDP),
        "whole": goes_on("whole", Parallelism.FSDP2),
        "damaged": goes_on("damaged", Parallelism.FSDP2),
        "gathered": (gathered_weights, (str(folder / "gathered"),)),
        "full": (failed_on_one, (str(folder / "full"),)),
    }
    found = on_ranks(one_after_another, list(works.values()))
    return {name: [of_rank[place] for of_rank in found] for place, name in enumerate(works)}


def resumed(how: Settings, run: str) -> tuple[list[float], list[str]]:
    """Losses of a run that is gone on with, and warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = curve(how, OPTIONS | {"run_dir": Path(run), "steps": 8, "resume": True})[0]
    return found, [str(warning.message) for warning in told]


@pytest.mark.parametrize("what", ["divided", "ddp", "whole", "damaged"])
def test_what_some_saved_goes_on_with_others(
    of_two: dict[str, list[Any]], alone: list[float], what: str
) -> None:
    """By two, then four, then two ranks under FSDP2 or DDP; whole tensors of one process, divided; and where
    the newest save is torn, from the one before it."""
    first, second = of_two[what]
    assert first[0] == second[0] == pytest.approx(alone, rel=TOLERANCE)
    is_refused = any("step-000000004 is not used: its shards/" in told for told in first[1])
    assert is_refused is (what == "damaged")


@pytest.mark.filterwarnings("ignore:the run was saved by 4 ranks")
def test_what_four_ranks_saved_goes_on_alone(saved_by_four: Path, alone: list[float], tmp_path: Path) -> None:
    run = copy_of(saved_by_four, tmp_path)
    assert losses(on(1), run_dir=run, steps=8, resume=True) == pytest.approx(alone, rel=TOLERANCE)


def test_each_rank_writes_its_part_alone(saved_by_two: Path) -> None:
    """And no file has a whole weight, the first rank's neither."""
    save = saved_by_two / SAVES / "step-000000004"
    names = sorted(path.name for path in (save / SHARDS).iterdir())
    assert names == ["00001-of-00002.safetensors", "00002-of-00002.safetensors"]
    shapes = []
    for name in names:
        with safe_open(save / SHARDS / name, framework="pt") as file:
            shapes.append({key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
    assert shapes[0]["model.embedding.weight"] == (9, 12)
    assert shapes[1]["model.embedding.weight"] == (8, 12)
    assert {"optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"} <= set(shapes[0])
    with safe_open(save / "model.safetensors", framework="pt") as file:
        assert not list(file.keys())
    state = torch.load(save / "state.pt", weights_only=True)
    held = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    assert all(value.numel() == 1 for value in held if isinstance(value, Tensor))


def test_dcp_reads_the_shards_by_itself(saved_by_two: Path) -> None:
    """The format is torch's, so that nobody needs brimful for it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    from brimful.trainer import load_weights
    from helpers.trained_on_ranks import Tokens

    save = saved_by_two / SAVES / "step-000000004"
    model = Tokens(branches=False)
    load_weights(model, saved_by_two / "weights.safetensors")
    found = {f"model.{name}": torch.empty_like(value) for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        load(found, storage_reader=HuggingFaceStorageReader(str(save / SHARDS)))
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("damage", ["a bit", "torn", "gone", "one more"])
def test_a_damaged_shard_is_refused_and_the_save_before_it_used(
    saved_by_two: Path, tmp_path: Path, damage: str
) -> None:
    run = copy_of(saved_by_two, tmp_path)
    shard = run / SAVES / "step-000000004" / SHARDS / "00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "a bit":
        content[-5] ^= 1
        shard.write_bytes(content)
    elif damage == "torn":
        shard.write_bytes(content[:-5])
    elif damage == "gone":
        shard.unlink()
    else:
        shutil.copy(shard, shard.with_name("00003-of-00003.safetensors"))
    told: list[str] = []
    found = newest_save(run, told.append)
    assert found is not None
    assert found.step == 2
    assert len(told) == 1
    assert SHARDS in told[0]


def test_a_part_that_is_missing_by_the_manifest_too_is_refused(saved_by_two: Path, tmp_path: Path) -> None:
    """Whoever tampers can write a manifest too; memory that was never filled is not trained on even then."""
    run = copy_of(saved_by_two, tmp_path)
    save = run / SAVES / "step-000000004"
    (save / SHARDS / "00001-of-00002.safetensors").unlink()
    files = json.loads((save / "manifest.json").read_text())["files"]
    del files["shards/00001-of-00002.safetensors"]
    (save / "manifest.json").write_text(manifest_text(4, files))
    with pytest.raises(ResumeError, match=r"a part of .* is missing"):
        trained(on(1), **OPTIONS, run_dir=run, steps=8, resume=True)


@pytest.mark.filterwarnings("ignore:.* is not used")
def test_a_pickle_among_the_shards_is_never_loaded(saved_by_two: Path, tmp_path: Path) -> None:
    """DCP's own reader would load `.metadata` as one."""
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "this ran",))

    run = copy_of(saved_by_two, tmp_path)
    save = run / SAVES / "step-000000004"
    content = pickle.dumps(Evil())
    files = json.loads((save / "manifest.json").read_text())["files"]
    for name, said in (
        ("shards/00003-of-00003.safetensors", r"shards.* cannot be read"),
        ("shards/.metadata", "not a file of a save"),
    ):
        (save / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (save / "manifest.json").write_text(manifest_text(4, files))
        shutil.rmtree(save.with_name("step-000000002"), ignore_errors=True)
        with pytest.raises(ResumeError, match=said):
            trained(on(1), **OPTIONS, run_dir=run, steps=8, resume=True)
    assert not (tmp_path / "this ran").exists()


def failed_on_one(run: str) -> tuple[str, list[str]]:
    """What this rank is told where the second cannot write its part."""
    write = saves.write_tensors

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name.startswith("00002"):
            raise OSError(28, "No space left on device")
        write(tensors, path, metadata)

    saves.write_tensors = full
    try:
        trained(on(2), **OPTIONS, run_dir=Path(run), steps=8, resume=True)
    except SaveError as error:
        return str(error), [path.name for path in (Path(run) / SAVES).iterdir()]
    finally:
        saves.write_tensors = write
    raise AssertionError


def test_a_rank_that_cannot_write_is_told_on_all_and_nothing_is_left(of_two: dict[str, list[Any]]) -> None:
    for message, there in of_two["full"]:
        assert "rank 1: OSError: [Errno 28] No space left" in message
        assert sorted(there) == ["step-000000002", "step-000000004"]


def gathered_weights(folder: str) -> tuple[bool, int, list[str]]:
    """Whether gathered weights are those of the model; memory that stays taken; what is left on the disk."""
    layers, width = 16, 1024
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    how = replace(settings(2, parallelism=Parallelism.FSDP2), units=())
    sharded = Sharded(model, init_device_mesh("cpu", (2,)), how)
    before = anonymous_bytes()
    is_first = torch.distributed.get_rank() == 0
    found = WholeModel(model, Path(folder) / "whole" if is_first else None).state_dict()
    taken = anonymous_bytes() - before
    is_same = not is_first or all(torch.equal(found[name], value) for name, value in expected.items())
    del sharded
    return is_same, taken, [str(path) for path in Path(folder).rglob("*") if path.is_file()]


def anonymous_bytes() -> int:
    """This process's memory that is no file's, but for what the allocator keeps of what was freed."""
    if not sys.platform.startswith("linux"):
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_whole_weights_are_gathered_without_memory_for_all_of_them(of_two: dict[str, list[Any]]) -> None:
    for is_same, taken, left in of_two["gathered"]:
        assert is_same
        assert taken < 16 * 1024 * 1024 * 4 / 2  # half of the model
        assert left == []
