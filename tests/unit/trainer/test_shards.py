"""Parts of tensors come back onto any number of ranks; each rank is played in turn, without the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from brimful.distributed.fsdp import Sharded
from brimful.errors import ResumeError
from brimful.settings import Parallelism, Settings
from brimful.trainer.storage.shards import (
    SavedTensors,
    divided_of_model,
    load_model,
    load_optimizer_state,
    own_shards,
)
from brimful.trainer.storage.weights import TIED, write_tensors

WHOLE = {
    "one row": torch.arange(7.0)[None],
    "five rows": torch.arange(15.0).reshape(5, 3),
    "eight": torch.arange(8, dtype=torch.int64),
    "half": torch.arange(12.0, dtype=torch.bfloat16).reshape(6, 2),
}
"""Of few rows the last ranks have nothing."""


@contextmanager
def as_rank(rank: int, count: int) -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def divided(whole: Tensor, mesh: dist.DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def save(directory: Path, count: int, tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True)
    for rank in range(count):
        with as_rank(rank, count) as mesh:
            own, metadata = own_shards({name: divided(tensor, mesh) for name, tensor in tensors.items()})
            write_tensors(own, directory / f"{rank}.safetensors", metadata)


@pytest.mark.parametrize("written_by", [1, 3, 4])
@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_parts_written_by_some_ranks_are_read_by_others(tmp_path: Path, written_by: int, read_by: int) -> None:
    save(tmp_path / "shards", written_by, WHOLE)
    source = SavedTensors(tmp_path / "shards")
    whole = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    source.fill(whole)
    assert all(torch.equal(whole[name], WHOLE[name]) for name in WHOLE)
    for rank in range(read_by):
        with as_rank(rank, read_by) as mesh:
            parts = {name: divided(torch.zeros_like(tensor), mesh) for name, tensor in WHOLE.items()}
            source.fill(parts)
            for name, tensor in WHOLE.items():
                assert torch.equal(parts[name].to_local(), divided(tensor, mesh).to_local())


def test_a_rank_writes_no_more_than_its_part(tmp_path: Path) -> None:
    with as_rank(3, 4) as mesh:
        tensors, _ = own_shards({name: divided(tensor, mesh) for name, tensor in WHOLE.items()})
    assert {name: tuple(part.shape) for name, part in tensors.items()} == {"eight": (2,)}
    assert tensors["eight"].untyped_storage().nbytes() == 16


def test_parts_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 8)
    save(tmp_path / "shards", 4, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = nn.Linear(3, 8)
    load_model(other, tmp_path, ["model.safetensors"])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    with pytest.raises(ResumeError, match=r"'weight' has shape \(8, 4\), and \(8, 3\) was saved"):
        load_model(nn.Linear(4, 8), tmp_path, ["model.safetensors"])
    with pytest.raises(ResumeError, match=r"the model has no \['bias'\]"):
        load_model(nn.Linear(3, 8, bias=False), tmp_path, ["model.safetensors"])
    with pytest.raises(ResumeError, match=r"has no \['0.bias'"):
        load_model(nn.Sequential(nn.Linear(3, 8)), tmp_path, ["model.safetensors"])
    (tmp_path / "shards" / "1.safetensors").unlink()
    with pytest.raises(ResumeError, match=r"a part of 'model\.bias' is missing"):
        load_model(other, tmp_path, ["model.safetensors"])


def test_the_state_of_an_optimizer_over_fewer_parameters_is_not_given_to_it(tmp_path: Path) -> None:
    save(tmp_path / "shards", 2, {"optimizer.2.exp_avg": torch.ones(4)})
    optimizer = torch.optim.Adam(nn.Linear(3, 8).parameters())
    with pytest.raises(ResumeError, match="has a parameter 2, and this one 2 parameters"):
        load_optimizer_state(optimizer, optimizer.state_dict(), tmp_path)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.register_buffer("scale", torch.full((2,), 7.0))
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_written_once_and_come_back_tied_or_not(tmp_path: Path, tied: bool) -> None:
    model = Tied(tied=True)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    how = Settings(micro_batch_size=1, world_size=2, parallelism=Parallelism.FSDP2)
    (tmp_path / "shards").mkdir()
    with as_rank(0, 1) as mesh:
        Sharded(model, mesh, how)
        whole, parts, tied_names = divided_of_model(model)
        assert set(whole) == {"scale"}
        assert set(parts) == {"model.embedding.weight", "model.head.bias"}
        assert tied_names == {"head.weight": "embedding.weight"}
        own, metadata = own_shards(parts)
        write_tensors(own, tmp_path / "shards" / "0.safetensors", metadata)
    kept = {"format": "pt", TIED: json.dumps(tied_names)}
    save_file(whole, tmp_path / "model.safetensors", metadata=kept)
    other = Tied(tied=tied)
    with torch.no_grad():
        other.scale.zero_()
    load_model(other, tmp_path, ["model.safetensors"])
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert (other.head.weight is other.embedding.weight) is tied
