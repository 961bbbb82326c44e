import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from brimful.errors import UsageError
from brimful.job import Data
from brimful.trainer import Callback, Schedule, TensorBoard, WandB
from brimful.trainer.monitor import trackers
from helpers.tiny_jobs import StopAfter


def scalars(log_dir):
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def job(job_with, samples):
    def metrics(model, batch):
        return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean()}

    return job_with(data=lambda: Data(train=samples, validation=samples), metrics=metrics)


def test_tensorboard_shows_the_records_of_the_run(job, trained, tmp_path):
    _, result = trained(job, epochs=2, callbacks=[TensorBoard(tmp_path / "board")])
    found = scalars(tmp_path / "board")
    assert found["train/loss"] == [(step.step, pytest.approx(step.loss)) for step in result.steps]
    assert [value for _, value in found["train/learning_rate"]] == [pytest.approx(1e-2)] * 8
    assert found["validation/accuracy"] == [
        (record.step, pytest.approx(record.metrics["accuracy"])) for record in result.validations
    ]
    assert "train/mfu" not in found


def test_trackers_have_what_is_known_of_each_epoch(job, trained, tmp_path):
    _, result = trained(job, epochs=2, callbacks=[TensorBoard(tmp_path)])
    found = scalars(tmp_path)
    assert found["epoch/seconds"] == [(each.step, pytest.approx(each.seconds)) for each in result.epochs]
    peak_bytes = result.epochs[0].measured_peak_allocated_bytes
    assert found["epoch/peak_allocated_bytes"] == [(4, pytest.approx(peak_bytes))]
    assert "epoch/peak_device_bytes" not in found


def test_a_resumed_run_takes_the_place_of_what_was_shown_after_the_save(job, trained, tmp_path):
    class Dies(Callback):
        def on_step(self, trainer, record):
            if record.step == 7:
                raise KeyboardInterrupt

    options = {"epochs": 3, "run_dir": tmp_path / "run", "save_every": 5}
    with pytest.raises(KeyboardInterrupt):
        trained(job, callbacks=[TensorBoard(tmp_path / "board"), Dies()], **options)
    assert len(scalars(tmp_path / "board")["train/loss"]) == 7
    _, result = trained(job, callbacks=[TensorBoard(tmp_path / "board")], resume=True, **options)
    found = scalars(tmp_path / "board")["train/loss"]
    assert found == [(step.step, pytest.approx(step.loss)) for step in result.steps]


def test_learning_rates_that_differ_are_told_apart(job_with, trained, tmp_path):
    def optimizer(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.25)

    trained(job_with(optimizer=optimizer), steps=1, callbacks=[TensorBoard(tmp_path)])
    found = scalars(tmp_path)
    assert found["train/learning_rate_0"] == [(1, 0.5)]
    assert found["train/learning_rate_1"] == [(1, 0.25)]


def test_a_learning_rate_is_shown_at_the_step_that_it_was_used_in(job, trained, tmp_path):
    _, result = trained(job, epochs=1, schedule=Schedule("linear"), callbacks=[TensorBoard(tmp_path)])
    assert scalars(tmp_path)["train/learning_rate"] == [
        (step.step, pytest.approx(step.learning_rate)) for step in result.steps
    ]
    assert [step.learning_rate for step in result.steps] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_rates_of_several_groups_are_shown_at_their_steps_as_far_as_they_are_known(job_with, trained, tmp_path):
    def optimizer(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.25)

    job = job_with(optimizer=optimizer)
    trained(job, steps=4, schedule=Schedule("linear"), callbacks=[TensorBoard(tmp_path)])
    found = scalars(tmp_path)
    assert found["train/learning_rate_0"] == [(1, 0.5), (2, 0.375), (3, 0.25), (4, 0.125)]
    assert found["train/learning_rate_1"] == [(2, 0.1875), (3, 0.125), (4, 0.0625)]


class FakeRun:
    def __init__(self, **options) -> None:
        self.options, self.logged, self.exit_code = options, [], None

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in: the package takes 100 MB."""
    runs: list[FakeRun] = []

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return runs


def test_wandb_is_given_the_records_and_told_how_the_run_ended(job, trained, wandb):
    _, result = trained(job, epochs=2, callbacks=[WandB("toys", mode="offline"), StopAfter(3)])
    (run,) = wandb
    assert run.options == {"project": "toys", "mode": "offline"}
    losses = [values["train/loss"] for _, values in run.logged if "train/loss" in values]
    assert losses == list(result.losses)
    assert [step for step, _ in run.logged] == [1, 2, 3]
    assert run.exit_code == 0

    class Failing(Callback):
        def on_step(self, trainer, record):
            raise RuntimeError("a callback of mine")

    with pytest.raises(RuntimeError, match="a callback of mine"):
        trained(job, callbacks=[WandB("toys"), Failing()])
    assert wandb[1].exit_code == 1


def test_a_tracker_that_cannot_begin_is_reported_once_and_training_continues(job, trained, tmp_path):
    (tmp_path / "board").write_text("a file, not a folder")
    with pytest.warns(
        UserWarning, match="TensorBoard failed, so nothing is logged to it from step 1 on"
    ) as told:
        _, result = trained(job, epochs=2, callbacks=[TensorBoard(tmp_path / "board")])
    assert len(result.steps) == 8
    assert len(told) == 1


def test_a_tracker_that_fails_later_is_closed_all_the_same(job, trained, wandb, monkeypatch):
    def log(self, values, step):
        if step == 2:
            raise ConnectionError("no answer\nfor long")
        self.logged.append((step, values))

    monkeypatch.setattr(FakeRun, "log", log)
    with pytest.warns(UserWarning, match=r"from step 2 on; training continues\. ConnectionError: no answer$"):
        _, result = trained(job, epochs=2, callbacks=[WandB("toys")])
    assert len(result.steps) == 8
    assert [step for step, _ in wandb[0].logged] == [1]
    assert wandb[0].exit_code == 0


def test_only_the_first_rank_writes(job, trained, tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(trackers, "current_rank", lambda: 1)
    trained(job, steps=2, callbacks=[TensorBoard(tmp_path / "board"), WandB("toys")])
    assert not (tmp_path / "board").exists()
    assert wandb == []


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        (lambda: TensorBoard("board"), "torch.utils.tensorboard", r"pip install tensorboard"),
        (lambda: WandB("toys"), "wandb", r"pip install wandb"),
    ],
)
def test_a_package_that_is_missing_is_told_before_training(monkeypatch, make, module, said):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=said):
        make()
