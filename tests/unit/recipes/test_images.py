"""Images in class folders, as a job."""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import brimful as bf
from brimful.errors import DataError, UnknownNameError, UsageError
from brimful.job import Data
from brimful.recipes import image_classification, timm_reader
from brimful.recipes.image_reader import opened, random_box
from brimful.trainer.data.rng import generator_of

COLOURS = {"blue": (20, 30, 220), "green": (20, 220, 30), "red": (220, 30, 20)}


def make_images(folder: Path, per_class: int = 10, size: tuple[int, int] = (48, 40)) -> Path:
    noise = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = np.clip(np.array(colour) + noise.integers(-20, 20, (*size, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.{'png' if number % 2 else 'jpg'}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_images(tmp_path / "colours")


def job_of(folder: Path, **options: object) -> bf.Job:
    return image_classification(folder, model="resnet18", image_size=33, workers=0, **options)  # type: ignore[arg-type]


def data_of(job: bf.Job) -> Data:
    assert job.data is not None
    return job.data()


def all_batches(job: bf.Job, epoch: int = 1, skip: int = 0, size: int = 8) -> list[dict[str, torch.Tensor]]:
    samples = data_of(job).train
    assert isinstance(samples, bf.job.Samples)
    return list(samples.batches(size, seed=0, epoch=epoch, skip=skip))


def test_each_class_gives_its_part_for_validation(folder: Path) -> None:
    data = data_of(job_of(folder, validation_fraction=0.2))
    validation = torch.cat([batch["labels"] for batch in data.validation])  # type: ignore[union-attr]
    assert validation.bincount().tolist() == [2, 2, 2]
    assert len(data.train) == 24


def test_folders_for_training_and_validation_are_taken_as_they_are(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 4)
    make_images(tmp_path / "val", 2)
    data = data_of(job_of(tmp_path))
    assert len(data.train) == 12
    assert sum(len(batch["labels"]) for batch in data.validation) == 6  # type: ignore[union-attr]


def test_an_epoch_has_every_image_once_and_each_epoch_another_order(folder: Path) -> None:
    job = job_of(folder, augment=False)
    epochs = [torch.cat([b["images"] for b in all_batches(job, epoch)]).sum((1, 2, 3)) for epoch in (1, 2)]
    first, second = (sums.tolist() for sums in epochs)
    assert len(set(first)) == 27
    assert sorted(first) == pytest.approx(sorted(second))
    assert first != second


def test_batches_from_the_midst_of_an_epoch_are_those_of_the_whole(folder: Path) -> None:
    whole, rest = all_batches(job_of(folder)), all_batches(job_of(folder), skip=2)
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one["images"], other["images"])


def test_the_number_of_groups_read_ahead_is_that_of_the_loader_and_needs_workers(folder: Path) -> None:
    ahead = image_classification(folder, model="resnet18", image_size=33, workers=1, prefetch_factor=5)
    assert [b["labels"].tolist() for b in all_batches(ahead)] == [
        b["labels"].tolist() for b in all_batches(job_of(folder))
    ]
    samples = data_of(ahead).train
    list(samples)  # type: ignore[arg-type]
    assert samples._loader.prefetch_factor == 5  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="at least one worker"):
        data_of(job_of(folder, prefetch_factor=2))


def test_workers_and_chunks_do_not_change_what_is_read(folder: Path) -> None:
    alone = all_batches(job_of(folder), size=20)  # more than a worker reads in one go
    two = image_classification(folder, model="resnet18", image_size=33, workers=2)
    assert [len(batch["labels"]) for batch in alone] == [20, 7]
    for one, other in zip(alone, all_batches(two, size=20), strict=True):
        assert torch.equal(one["images"], other["images"])
        assert torch.equal(one["labels"], other["labels"])


def test_crops_lie_within_the_image_and_have_the_areas_and_ratios_that_are_said() -> None:
    for index in range(300):
        left, top, right, bottom = random_box(400, 400, generator_of(0, 0, index))
        assert 0 <= left < right <= 400 + 1e-9
        assert 0 <= top < bottom <= 400 + 1e-9
        assert (right - left) * (bottom - top) >= 0.079 * 400 * 400 * (3 / 4)
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9


def test_broken_images_and_empty_classes_are_listed_and_refused(folder: Path) -> None:
    whole = (folder / "red" / "00.jpg").read_bytes()
    (folder / "red" / "00.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "red" / "01.png").write_bytes(b"no image")
    (folder / "blue" / "02.jpg").write_bytes(b"")
    (folder / "void").mkdir()
    with pytest.raises(DataError) as refused:
        job_of(folder)
    for part in ("4 of 31", "00.jpg: OSError", "01.png", "02.jpg: an empty file", "void: a class", "skip"):
        assert part in str(refused.value)
    with pytest.warns(UserWarning, match="4 of 31 samples"):
        job = job_of(folder, bad_samples="skip")
    assert job.about is not None
    assert job.about["classes"] == ["blue", "green", "red"]
    assert len(data_of(job).train) == 24


def test_links_that_lead_nowhere_and_what_is_not_a_file_are_bad_samples(folder: Path) -> None:
    red = folder / "red"
    (red / "unmounted.jpg").symlink_to("/nowhere/1.jpg")
    (red / "loop.jpg").symlink_to("loop.jpg")
    (red / "device.jpg").symlink_to("/dev/null")
    os.mkfifo(red / "pipe.jpg")
    (folder / "yellow").symlink_to("/nowhere/yellow")
    for check_files in (True, False):
        with pytest.raises(DataError) as refused:
            job_of(folder, check_files=check_files)
        for part in (
            "5 of 35",
            "yellow: a link to /nowhere/yellow: No such file",
            "unmounted.jpg: a link to /nowhere/1.jpg: No such file",
            "loop.jpg: a link to loop.jpg: Too many levels",
            "device.jpg: not a regular file",
            "pipe.jpg: not a regular file",
        ):
            assert part in str(refused.value)
    with pytest.warns(UserWarning, match="5 of 35 samples"):
        assert len(data_of(job_of(folder, bad_samples="skip")).train) == 27


def test_validation_images_on_a_disk_that_is_not_mounted_are_not_replaced(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 4)
    (tmp_path / "val").symlink_to("/nowhere/val")
    with pytest.raises(DataError, match="val: a link to /nowhere/val"):
        job_of(tmp_path)


def test_folders_behind_links_are_read_once_and_never_those_above(folder: Path, tmp_path: Path) -> None:
    make_images(tmp_path / "other", 2)
    (folder / "red" / "more").symlink_to(tmp_path / "other" / "red")
    (folder / "red" / "again").symlink_to(tmp_path / "other" / "red")
    (folder / "red" / "self").symlink_to(folder / "red")
    (folder / "red" / "up").symlink_to(folder)
    assert len(data_of(job_of(folder)).train) == 27 + 2
    assert job_of(folder).about["classes"] == ["blue", "green", "red"]  # type: ignore[index]


def test_balanced_classes_weigh_the_same_together(folder: Path) -> None:
    for number in range(8):
        (folder / "red" / f"{number:02}.{'png' if number % 2 else 'jpg'}").unlink()
    job = job_of(folder, balance_classes=True)
    labels = torch.cat([batch["labels"] for batch in all_batches(job)])
    assert labels.bincount().tolist() == [9, 9, 1]
    assert job.count is not None
    counts = [float(job.count({"labels": labels[labels == label]})) for label in range(3)]
    assert counts == pytest.approx([19 / 3] * 3)


def test_weights_of_a_file_are_loaded_but_for_a_head_of_other_classes(folder: Path, tmp_path: Path) -> None:
    before = bf.find_architecture("resnet18", image_size=33, num_classes=5).model()  # type: ignore[operator]
    torch.save({"state_dict": before.state_dict()}, tmp_path / "five.pt")
    job = job_of(folder, weights=tmp_path / "five.pt")
    model = job.model()  # type: ignore[operator]
    assert job.weights is not None
    with pytest.warns(UserWarning, match=r"classifier\.weight, classifier\.bias: they start"):
        job.weights(model)
    assert torch.equal(model.stem[0].weight, before.stem[0].weight)
    assert model.classifier.weight.shape[0] == 3


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pt")
    job = job_of(folder, weights=tmp_path / "other.pt")
    with pytest.raises(UsageError, match="of another model"):
        job.weights(job.model())  # type: ignore[operator, misc]


def test_a_run_is_resumed_with_the_same_images_alone(folder: Path) -> None:
    before = job_of(folder).about
    (folder / "red" / "00.jpg").write_bytes((folder / "blue" / "00.jpg").read_bytes())
    assert job_of(folder).about != before


def test_a_class_of_one_image_is_trained_on_and_that_nothing_validates_it_is_said(folder: Path) -> None:
    for number in range(1, 10):
        (folder / "red" / f"{number:02}.{'png' if number % 2 else 'jpg'}").unlink()
    with pytest.warns(UserWarning, match="1 of 3 classes have no sample for validation.*red"):
        data = data_of(job_of(folder))
    assert len(data.train) == 19


def test_nothing_to_validate_with_is_no_error(tmp_path: Path) -> None:
    make_images(tmp_path, per_class=1)
    with pytest.warns(UserWarning, match="3 of 3 classes have no sample for validation, so nothing"):
        assert data_of(job_of(tmp_path)).validation is None


def test_images_of_16_bits_and_on_their_side_are_read_as_they_are_meant(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    grey = np.asarray(opened(tmp_path / "deep.png"))[..., 0]
    assert grey.min() == 0
    assert grey.max() == 255
    assert len(np.unique(grey)) == 64
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (8, 4)).save(tmp_path / "aside.jpg", exif=exif)
    assert opened(tmp_path / "aside.jpg").size == (4, 8)


def test_hidden_folders_and_other_files_are_left_out_and_the_latter_told(folder: Path) -> None:
    hidden = folder / "red" / ".checkpoints"
    hidden.mkdir()
    (hidden / "00.jpg").write_bytes((folder / "red" / "00.jpg").read_bytes())
    (folder / "red" / "photo.heic").write_bytes(b"?")
    with pytest.warns(UserWarning, match=r"1 files .* not images by their names .* 1 × \.heic"):
        assert len(data_of(job_of(folder)).train) == 27


def test_folders_of_parts_are_not_taken_for_classes(tmp_path: Path) -> None:
    make_images(tmp_path / "Train", 4)
    make_images(tmp_path / "Val", 2)
    assert len(data_of(job_of(tmp_path)).train) == 12
    (tmp_path / "Val").rename(tmp_path / "holdout")
    with pytest.raises(UsageError, match="they are not classes"):
        job_of(tmp_path)
    shutil.rmtree(tmp_path / "holdout")
    assert len(data_of(job_of(tmp_path)).train) == 9


def test_an_image_that_breaks_later_is_named(folder: Path) -> None:
    job = job_of(folder)
    for path in (folder / "red").iterdir():
        path.write_bytes(b"?")
    with pytest.raises(DataError, match=r"red/\d\d\.\w+ cannot be read"):
        all_batches(job)


def test_wrong_sizes_and_missing_weights_are_told_before_images_are_read(folder: Path) -> None:
    (folder / "red" / "03.png").write_bytes(b"?")
    with pytest.raises(UsageError, match=r"no file nowhere\.pt"):
        job_of(folder, weights="nowhere.pt")
    with pytest.raises(UsageError, match="image_size"):
        image_classification(folder, model="vit-base", image_size=33)


def test_what_is_no_classifier_or_no_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="image classifier 'bert-base'"):
        image_classification(folder, model="bert-base")
    with pytest.raises(UsageError, match="no folder"):
        image_classification(tmp_path / "nowhere")
    (tmp_path / "one" / "only").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "one" / "only" / "a.png")
    with pytest.raises(UsageError, match="at least 2"):
        image_classification(tmp_path / "one")


def test_a_model_learns_the_colours(folder: Path) -> None:
    result = bf.trainer.Trainer(
        job_of(folder, augment=False),
        bf.Settings(micro_batch_size=9),
        device="cpu",
        epochs=5,
        show_progress=False,
    ).fit()
    assert result.validations[-1].metrics["accuracy"] == 1.0


def test_training_images_are_evaluated_as_validation_images_are(folder: Path) -> None:
    data = data_of(job_of(folder, validation_fraction=0.2, training_metrics=True))
    (sample,) = list(data.training_sample)  # type: ignore[arg-type]
    assert len(sample["labels"]) == 6
    plain = all_batches(job_of(folder, validation_fraction=0.2, augment=False))
    known = torch.cat([batch["images"] for batch in plain])
    assert all(any(torch.equal(image, other) for other in known) for image in sample["images"])
    assert data_of(job_of(folder)).training_sample is None


@dataclass(frozen=True)
class Transform:
    """As those of timm, it draws from every generator there is."""

    is_training: bool

    def __call__(self, image: Image.Image) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))] if self.is_training else [0.5]
        return torch.tensor(drawn + [0.0] * (3 - len(drawn)))


@pytest.fixture
def timm_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of timm that are called, as torchvision cannot be imported beside every torch."""
    config = SimpleNamespace(mean=(0.5,) * 3, std=(0.5,) * 3, fixed_input_size=False, to_dict=dict)
    timm = ModuleType("timm")
    timm.is_model = lambda _name: True  # type: ignore[attr-defined]
    timm.get_pretrained_cfg = lambda _name: config  # type: ignore[attr-defined]
    data = ModuleType("timm.data")
    data.resolve_data_config = lambda args, pretrained_cfg: {"input_size": (3, 33, 33)}  # type: ignore[attr-defined]
    data.create_transform = lambda input_size, is_training: Transform(is_training)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    timm_reader._transform.cache_clear()


@pytest.mark.usefixtures("timm_stub")
@pytest.mark.parametrize("workers", [0, 2])
def test_what_timm_draws_depends_on_seed_epoch_and_image_alone(folder: Path, workers: int) -> None:
    job = image_classification(folder, model="timm/any", timm_transforms=True, image_size=33, workers=workers)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = all_batches(job)
    assert (float(torch.rand(())), random.random(), np.random.rand()) == expected  # the steps draw as before
    rest = all_batches(job, skip=2)
    assert all(map(torch.equal, [batch["images"] for batch in first[2:]], [batch["images"] for batch in rest]))
    drawn = torch.cat([batch["images"] for batch in first])
    assert len(drawn.unique(dim=0)) == len(drawn) == 27
    assert not torch.equal(drawn, torch.cat([batch["images"] for batch in all_batches(job, epoch=2)]))
    (validation,) = list(data_of(job).validation)  # type: ignore[arg-type]
    assert (validation["images"][:, 0] == 0.5).all()
    assert job.about is not None
    assert job.about["timm_transforms"] == {"input_size": [3, 33, 33]}


def test_the_transforms_are_those_of_timm(folder: Path) -> None:
    try:
        import timm.data
    except Exception as error:  # of torchvision beside another torch
        pytest.skip(f"timm's transforms cannot be imported: {error}")
    job = image_classification(folder, model="timm/resnet18", timm_transforms=True, image_size=64, workers=0)
    assert job.about is not None
    transform = timm.data.create_transform(**job.about["timm_transforms"])
    batch = next(iter(data_of(job).validation))  # type: ignore[arg-type]
    names = sorted(folder.rglob("blue/*"))
    images = [transform(opened(path)) for path in names]
    assert any(torch.equal(batch["images"][0], image) for image in images)
    first, again = all_batches(job), all_batches(job)
    assert all(map(torch.equal, [b["images"] for b in first], [b["images"] for b in again]))
    assert first[0]["images"].shape == (8, 3, 64, 64)


def test_timm_transforms_are_for_models_of_timm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="for its models"):
        job_of(folder, timm_transforms=True)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="timm's transforms cannot be imported"):
        timm_reader.transform_options("resnet18", 64)
