"""The moving average, BatchNorm's momentum under accumulation, and stopping early."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brimful as bf
from brimful.cli.report import run_so_far
from brimful.errors import PartialUpdateError, UsageError
from brimful.job import Data
from brimful.report.layout import Listing
from brimful.report.measurements import predicted_beside_measured
from brimful.results import StopReason
from brimful.trainer import Callback, Trainer, load_weights
from brimful.trainer.step.ema import MovingAverage


def test_the_page_of_a_run_that_has_not_ended_counts_the_average(job_with, tmp_path):
    job = job_with(data=lambda: Data(train={"x": torch.randn(8, 8), "y": torch.zeros(8, dtype=torch.long)}))
    plan = bf.plan(job, "cpu", global_batch_size=4)
    result = Trainer(job, plan, epochs=1, ema_decay=0.9, run_dir=tmp_path / "run", show_progress=False).fit()
    whole = next(iter(predicted_beside_measured(result).rows))
    (tmp_path / "run" / "result.json").unlink()
    (so_far,) = (each for each in run_so_far(tmp_path / "run").sections if each.title == "Run")
    (listing,) = (each for each in so_far.content if isinstance(each, Listing))
    assert whole[1:3] == listing.rows[0][1:3]


def test_the_average_is_validated_saved_and_resumed(job_with, trained, samples, tmp_path):
    job = job_with(model=lambda: nn.Linear(8, 3), data=lambda: Data(train=samples, validation=samples))
    averages = []

    class Follow(Callback):
        """The formula, written out."""

        def on_step(self, trainer, record):
            weight = trainer.model.weight.detach()
            before = averages[-1] if averages else first
            averages.append(0.9 * before + 0.1 * weight)

    torch.manual_seed(0)
    first = nn.Linear(8, 3).weight.detach().clone()
    _, result = trained(job, epochs=2, ema_decay=0.9, callbacks=[Follow()], run_dir=tmp_path / "run")
    averaged = nn.Linear(8, 3)
    load_weights(averaged, tmp_path / "run" / "average.safetensors")
    torch.testing.assert_close(averaged.weight.detach(), averages[-1])
    with torch.no_grad():
        loss = F.cross_entropy(averaged(samples["x"]), samples["y"])
    assert result.validations[-1].loss == pytest.approx(float(loss), rel=1e-6)
    _, without = trained(job, epochs=2)
    assert result.losses == without.losses
    assert result.validations[-1].loss != without.validations[-1].loss

    whole, expected = trained(job, epochs=4, ema_decay=0.9)
    resumed, found = trained(job, epochs=4, ema_decay=0.9, run_dir=tmp_path / "run", resume=True)
    assert [v.loss for v in found.validations] == [v.loss for v in expected.validations]
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_decay_that_is_none_is_refused(job_with, trained):
    with pytest.raises(UsageError, match=r"ema_decay is 1\.0"):
        trained(job_with(), ema_decay=1.0)


def test_statistics_go_as_far_in_four_micro_batches_as_in_one(job_with, trained):
    """With equal micro-batches the statistics are equal too, but for the sample variance's correction."""

    def net():
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))

    x = torch.randn(4, 8).repeat(4, 1)
    data = Data(train=[{"x": x, "y": torch.zeros(16, dtype=torch.long)}])
    job = job_with(model=net, data=lambda: data)

    def mean_after(micro_batch_size, **options):
        trainer, _ = trained(job, micro_batch_size, 16 // micro_batch_size, epochs=3, **options)
        assert trainer.model[0].momentum == 0.1
        return trainer.model[0].running_mean

    whole = mean_after(16)
    torch.testing.assert_close(mean_after(4, correct_batch_norm=True, verify=False), whole)
    assert not torch.allclose(mean_after(4, verify=False), whole)


def test_a_run_ends_when_it_does_not_improve(job_with, trained, samples):
    losses = iter([3.0, 2.0, 2.5, 2.1, 2.2, 1.0])

    def loss(model, batch):
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        return value if model.training else torch.tensor(next(losses))

    job = job_with(loss=loss, data=lambda: Data(train=samples, validation=samples))
    _, result = trained(job, 50, epochs=6, patience=3)
    assert result.stopped_because is StopReason.NOT_IMPROVING
    assert [v.loss for v in result.validations] == pytest.approx([3.0, 2.0, 2.5, 2.1, 2.2])


@pytest.mark.parametrize("message", ["the store is gone", "the store is gone."])
def test_an_average_that_cannot_follow_ends_the_run_without_saving(job_with, trained, monkeypatch, message):
    def update(_self):
        raise RuntimeError(message)

    monkeypatch.setattr(MovingAverage, "update", update)
    with pytest.raises(
        PartialUpdateError, match=r"Error: the store is gone\. The model is not saved\. Resume from"
    ):
        trained(job_with(), steps=1, ema_decay=0.9)
