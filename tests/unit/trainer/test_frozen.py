"""Saves share the file of parameters that are not trained, and are complete all the same."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from torch import nn

from brimful.trainer import Callback
from brimful.trainer.storage.restore import SAVES, digest_of, manifest_text, newest_save
from brimful.trainer.storage.shards import load_model
from brimful.trainer.storage.weights import TIED, read_tensors, write_or_link, write_tensors

FROZEN = "frozen.safetensors"
NOT_TIED = {TIED: "{}"}


class Backbone(nn.Module):
    """Its first two layers are tied and frozen."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(8, 8)
        self.backbone = nn.Sequential(first, nn.Tanh(), first).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def saves_of(run):
    return sorted((run / SAVES).iterdir())


def inodes(run):
    return [(save / FROZEN).stat().st_ino for save in saves_of(run)]


@pytest.fixture
def adapted(job_with):
    return job_with(model=Backbone)


def test_every_second_save_has_the_same_file(adapted, trained, tmp_path):
    trained(adapted, steps=5, run_dir=tmp_path, save_every=1, keep_saves=4)
    first, second, third, fourth = inodes(tmp_path)
    assert first == third != second == fourth
    (newest, *_others) = saves_of(tmp_path)[::-1]
    names = set(read_tensors(newest / FROZEN))
    assert names == {
        name for name, _ in Backbone().backbone.named_parameters("backbone", remove_duplicate=False)
    }
    assert not names & set(read_tensors(newest / "model.safetensors"))


def test_a_single_save_takes_over_the_file_of_the_one_before(adapted, trained, tmp_path):
    trained(adapted, steps=1, run_dir=tmp_path, save_every=1, keep_saves=1)
    (before,) = inodes(tmp_path)
    trained(adapted, steps=3, run_dir=tmp_path, save_every=1, keep_saves=1, resume=True)
    assert inodes(tmp_path) == [before]


def test_a_model_that_is_trained_as_a_whole_has_no_such_file(job_with, trained, tmp_path):
    trained(job_with(), steps=1, run_dir=tmp_path)
    assert not (saves_of(tmp_path)[0] / FROZEN).exists()


@pytest.mark.filterwarnings("ignore:.*is not used. its frozen.safetensors has sha256")
@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(adapted, trained, tmp_path, damaged):
    whole, _ = trained(adapted, steps=6)
    trained(adapted, steps=4, run_dir=tmp_path, save_every=1, keep_saves=3)
    if damaged:
        file = saves_of(tmp_path)[-1] / FROZEN  # the same as two saves before
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    resumed, _ = trained(adapted, steps=6, run_dir=tmp_path, resume=True, save_every=1, keep_saves=3)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    found = newest_save(tmp_path, pytest.fail)  # no damaged file was shared again
    assert found is not None
    assert found.step == 6


def test_frozen_parameters_that_code_changes_are_saved_as_they_are(adapted, trained, tmp_path):
    class Momentum(Callback):
        def on_step(self, trainer, record):
            trainer.model.backbone[0].weight.data.add_(1)  # which no version counter sees

    trained(adapted, steps=4, run_dir=tmp_path, save_every=1, keep_saves=4, callbacks=[Momentum()])
    weights = [read_tensors(save / FROZEN)["backbone.0.weight"] for save in saves_of(tmp_path)]
    for before, after in pairwise(weights):
        torch.testing.assert_close(after, before + 1)


def test_a_save_with_everything_in_one_file_is_resumed(adapted, trained, tmp_path):
    """As they were written before there were two."""
    expected = trained(adapted, steps=2, run_dir=tmp_path / "run")[0].model.state_dict()
    (save,) = saves_of(tmp_path / "run")
    tensors = read_tensors(save / "model.safetensors") | read_tensors(save / FROZEN)
    tied = {f"backbone.2.{name}": f"backbone.0.{name}" for name in ("weight", "bias")}
    for name in tied:
        del tensors[name]
    (save / FROZEN).unlink()
    write_tensors(tensors, save / "model.safetensors", {"tied": json.dumps(tied)})
    files = {path.name: digest_of(path) for path in save.iterdir() if path.name != "manifest.json"}
    (save / "manifest.json").write_text(manifest_text(2, files))
    resumed = trained(adapted, steps=2, run_dir=tmp_path / "run", resume=True)[0].model.state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())


def test_a_model_that_is_to_be_sharded_reads_both_files(adapted, trained, tmp_path):
    expected = trained(adapted, steps=2, run_dir=tmp_path)[0].model.state_dict()
    other = Backbone()
    load_model(other, saves_of(tmp_path)[-1], ["model.safetensors", FROZEN])
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_a_disk_without_links_gets_another_file(tmp_path, monkeypatch):
    def refused(*_names):
        raise OSError("no links here")

    tensors = {"a": torch.tensor([1.0, float("nan")])}
    write_or_link(tensors, tmp_path / "first", NOT_TIED, None)
    write_or_link(tensors, tmp_path / "second", NOT_TIED, tmp_path / "first")
    monkeypatch.setattr("os.link", refused)
    write_or_link(tensors, tmp_path / "third", NOT_TIED, tmp_path / "first")
    names = ("first", "second", "third")
    first, second, third = ((tmp_path / name).stat().st_ino for name in names)
    assert first == second != third
    assert (tmp_path / "third").read_bytes() == (tmp_path / "first").read_bytes()


@pytest.mark.parametrize(
    "tensors",
    [{"a": torch.zeros(2, dtype=torch.int32)}, {"a": torch.zeros(2, 1)}, {"b": torch.zeros(2)}, {}],
    ids=["type", "shape", "name", "none"],
)
def test_a_file_of_other_tensors_is_not_shared(tmp_path, tensors):
    write_or_link({"a": torch.zeros(2)}, tmp_path / "first", NOT_TIED, None)
    write_or_link(tensors, tmp_path / "second", NOT_TIED, tmp_path / "first")
    assert set(read_tensors(tmp_path / "second")) == set(tensors)
    shutil.copy(tmp_path / "first", tmp_path / "third")
    write_or_link({"a": torch.zeros(2)}, tmp_path / "fourth", {TIED: '{"c": "a"}'}, tmp_path / "third")
    assert set(read_tensors(tmp_path / "fourth")) == {"a", "c"}
