import gc
import json
import math
import time
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.errors import BatchError, EquivalenceError, NonFiniteError, RunDirectoryError, UsageError
from brimful.job import Data
from brimful.planner import Alternative, Plan, PlanStatus
from brimful.report import training_text
from brimful.results import StopReason, TrainingResult
from brimful.settings import OptimizerImplementation, Precision, Settings
from brimful.trainer import Callback, Trainer, load_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:the training data give batches"),
    pytest.mark.filterwarnings("ignore:the last batch of each epoch has"),
]  # told in tests of their own


def plan_for(settings):
    plain = Alternative(
        label="baseline",
        settings=settings,
        predicted_peak_reserved_bytes=2000,
        predicted_step_seconds=0.5,
        fits=False,
    )
    return Plan(
        status=PlanStatus.FEASIBLE,
        device_kind="cpu",
        job="tiny",
        device="cpu",
        budget_bytes=1 << 20,
        settings=settings,
        predicted_peak_allocated_bytes=1000,
        predicted_peak_reserved_bytes=1001,
        predicted_peak_device_bytes=1002,
        predicted_step_seconds=0.25,
        plain=plain,
        alternatives=(),
    )


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(job_with, trained):
    _, first = trained(job_with(), epochs=2, seed=3)
    torch.rand(7)  # the state of the generator before does not matter
    _, second = trained(job_with(), epochs=2, seed=3)
    _, other = trained(job_with(), epochs=2, seed=4)
    assert first.losses == second.losses
    assert first.losses != other.losses


def test_recomputing_gives_the_losses_of_plain_training_bit_for_bit(job_with, trained, recompute):
    _, plain = trained(job_with(), epochs=3)
    planned_trainer, planned = trained(job_with(), epochs=3, units=recompute)
    assert planned.losses == plain.losses
    assert all("forward" not in vars(module) for module in planned_trainer.model.modules())


def test_accumulation_gives_the_losses_of_plain_training_within_summation_error(job_with, trained, recompute):
    job = job_with(model=lambda: nn.Linear(8, 3))  # without dropout, whose masks depend on the cut
    _, plain = trained(job, 16, epochs=3)
    _, planned = trained(job, 4, 4, epochs=3)
    assert planned.losses == pytest.approx(plain.losses, rel=1e-5)
    assert planned.losses[:4] != (0.0,) * 4


def test_a_shorter_last_batch_is_kept_and_its_uneven_parts_are_weighted_right(job_with, trained):
    # 50 samples in global batches of 16 leave 2; as one batch of 50 they leave parts of 16, 16, 16 and 2.
    _, result = trained(job_with(), 16)
    assert [step.samples for step in result.steps] == [16, 16, 16, 2]
    job = job_with(model=lambda: nn.Linear(8, 3), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    whole, _ = trained(job, 50)
    with pytest.warns(UserWarning, match="50 samples to train on, fewer than a global batch of 64"):
        parts, _ = trained(job, 16, 4)
    torch.testing.assert_close(parts.model.weight, whole.model.weight)


def test_a_loss_over_uneven_counts_has_the_gradient_of_the_whole_batch(job_with, trained, samples):
    ignored = samples["y"].clone()
    ignored[:14] = -100  # the micro-batches count 2 to 8 of their 8 samples
    batches = [{"x": samples["x"], "y": ignored}]

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / (batch["y"] != -100).sum()

    job = job_with(
        model=lambda: nn.Linear(8, 3),
        loss=lambda m, b: loss(m, b) if (b["y"] != -100).any() else m(b["x"]).sum() * 0,
        count=lambda b: (b["y"] != -100).sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        data=lambda: Data(train=batches),
    )
    whole, one = trained(job, 50)
    parts, many = trained(job, 8)
    torch.testing.assert_close(parts.model.weight, whole.model.weight)
    assert many.losses == pytest.approx(one.losses, rel=1e-6)
    naive, _ = trained(replace(job, count=None), 8, verify=False)
    assert not torch.allclose(naive.model.weight, whole.model.weight)


def test_an_iterable_gives_the_global_batches_whatever_their_size(job_with, trained, samples):
    batches = [{name: tensor[a:b] for name, tensor in samples.items()} for a, b in ((0, 30), (30, 50))]
    _, result = trained(job_with(data=lambda: Data(train=batches)), 4, 2, epochs=2)
    assert [step.samples for step in result.steps] == [30, 20, 30, 20]
    assert [step.epoch for step in result.steps] == [1, 1, 2, 2]


def test_steps_end_the_run_in_the_middle_of_an_epoch(job_with, trained):
    _, result = trained(job_with(), steps=6)
    assert [(step.step, step.epoch) for step in result.steps] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2),
    ]  # fmt: skip
    assert result.stopped_because is StopReason.FINISHED
    assert len(trained(job_with(), steps=100, epochs=2)[1].steps) == 8


def test_one_early_steady_step_is_measured_and_left_out_of_the_timing(job_with, trained):
    _, result = trained(job_with(), epochs=2)
    assert [step.step for step in result.steps if step.memory_measured] == [3]
    held = 3 * 4 * sum(p.numel() for p in job_with().model().parameters())  # parameters and two moments
    assert result.measured_peak_allocated_bytes > held
    assert result.measured_peak_device_bytes is None
    timed = [s.seconds for s in result.steps if s.step in (2, 5, 6, 7)]  # 4 and 8 have 2 samples
    assert min(timed) <= result.measured_step_seconds <= max(timed)


@pytest.mark.parametrize(("steps", "measured"), [(1, []), (2, [2])])
def test_a_short_run_measures_its_second_step_or_nothing(job_with, trained, steps, measured):
    _, result = trained(job_with(), steps=steps)
    assert [step.step for step in result.steps if step.memory_measured] == measured
    assert (result.measured_peak_allocated_bytes is None) == (not measured)


def test_a_run_whose_third_and_last_step_has_few_samples_measures_its_second(job_with, trained, samples):
    data = Data(train={name: tensor[:36] for name, tensor in samples.items()})
    _, result = trained(job_with(data=lambda: data), epochs=1)
    assert [(step.samples, step.memory_measured) for step in result.steps] == [
        (16, False),
        (16, True),
        (4, False),
    ]


def test_a_resumed_run_has_the_data_that_its_job_draws_at_random(job_with, trained, tmp_path, samples):
    def draw():
        return Data(train=samples | {"x": torch.randn_like(samples["x"])})

    job = job_with(data=draw)
    _, whole = trained(job, epochs=2)
    trained(job, epochs=1, run_dir=tmp_path / "run")
    torch.manual_seed(99)  # as another process
    _, resumed = trained(job, epochs=2, run_dir=tmp_path / "run", resume=True)
    assert resumed.losses == whole.losses


def test_a_resumed_run_measures_a_steady_step_too(job_with, trained, tmp_path):
    """Not one of its first two, which hold copies of parameters and state on the host: a CPU's own memory."""
    run = {"run_dir": tmp_path / "run", "save_every": 4}
    trained(job_with(), steps=4, **run)
    _, resumed = trained(job_with(), steps=8, resume=True, **run)
    _, whole = trained(job_with(), steps=8)
    assert [step.step for step in resumed.steps if step.memory_measured] == [3, 7]
    assert resumed.measured_peak_allocated_bytes == whole.measured_peak_allocated_bytes


def test_measuring_does_not_change_the_losses(job_with, trained, monkeypatch):
    _, measured = trained(job_with(), steps=6)
    monkeypatch.setattr("brimful.trainer.step.memory.MEASURED_UPDATE", 6)
    _, later = trained(job_with(), steps=6)
    assert measured.losses == later.losses


def test_a_plan_puts_its_predictions_beside_what_was_measured(job_with, tmp_path):
    plan = plan_for(Settings(micro_batch_size=8, gradient_accumulation_steps=2))
    run_dir = tmp_path / "run"
    result = Trainer(job_with(), plan, run_dir=run_dir, steps=4, show_progress=False).fit()
    assert result.predicted_peak_allocated_bytes == 1000
    assert result.predicted_step_seconds == 0.25
    assert result.budget_bytes == 1 << 20
    assert result.device == "cpu"
    assert Plan.load(run_dir / "plan.json") == plan
    assert TrainingResult.from_json(json.loads((run_dir / "result.json").read_text())) == result


def test_metrics_are_averaged_by_samples_and_the_loss_by_count(job_with, trained, samples):
    train, validation = ({n: t[part] for n, t in samples.items()} for part in (slice(0, 32), slice(32, 50)))
    job = job_with(
        model=lambda: nn.Linear(8, 3),
        data=lambda: Data(train=train, validation=validation),
        metrics=lambda model, batch: {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean()},
    )
    trainer, result = trained(job, 7, epochs=2)  # 18 samples in parts of 7, 7 and 4
    with torch.no_grad():
        logits = trainer.model(validation["x"])
    last = result.validations[-1]
    assert (last.epoch, last.step, last.samples) == (2, 10, 18)
    assert last.metrics["accuracy"] == pytest.approx(
        (logits.argmax(1) == validation["y"]).float().mean().item()
    )
    assert last.loss == pytest.approx(F.cross_entropy(logits, validation["y"]).item())


def test_a_summary_of_means_does_not_depend_on_how_the_data_are_divided(job_with, trained, samples):
    """F1 is no mean over batches: it follows from means of true and false positives."""
    validation = {name: tensor[:18] for name, tensor in samples.items()}

    def metrics(model, batch):
        chosen = F.one_hot(model(batch["x"]).argmax(1), 3)
        return {
            "chosen": chosen.double().mean(0),
            "right": (chosen * F.one_hot(batch["y"], 3)).double().mean(0),
        }

    def summarize(means):
        return {"precision": (means["right"] / means["chosen"].clamp(min=1e-9)).mean()}

    job = job_with(
        model=lambda: nn.Linear(8, 3),
        data=lambda: Data(train=samples, validation=validation, training_sample=samples),
        metrics=metrics,
        summarize=summarize,
    )
    trainer, result = trained(job, 7, epochs=1)
    for prefix, part in (("", validation), ("training_", samples)):
        with torch.no_grad():
            expected = summarize(metrics(trainer.model, part))["precision"].item()
        assert result.validations[-1].metrics[f"{prefix}precision"] == pytest.approx(expected)
    loss = F.cross_entropy(trainer.model(samples["x"]), samples["y"]).item()
    assert result.validations[-1].metrics["training_loss"] == pytest.approx(loss)


def test_a_training_sample_leaves_the_training_as_it_is(job_with, trained, samples):
    validation = {name: tensor[:18] for name, tensor in samples.items()}
    losses = []
    for sample in (None, samples):
        data = Data(train=samples, validation=validation, training_sample=sample)
        _, result = trained(job_with(data=lambda data=data: data), 16, epochs=2)
        losses.append([*(step.loss for step in result.steps), *(record.loss for record in result.validations)])
    assert losses[0] == losses[1]


def test_a_training_sample_without_validation_data_is_refused(job_with, trained, samples):
    with pytest.raises(UsageError, match="beside validation data"):
        trained(job_with(data=lambda: Data(train=samples, training_sample=samples)), 16)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (5, "returned int"),
        (None, "returned NoneType"),
        ({"a": "much"}, "returned str for 'a'"),
        ({"a": torch.zeros(2)}, r"a tensor of shape \(2,\) for 'a'"),
        ({3: 0.5}, "the name 3"),
    ],
    ids=["number", "nothing", "text", "vector", "name"],
)
def test_metrics_that_are_not_names_and_numbers_are_refused(job_with, trained, samples, returned, found):
    job = job_with(
        data=lambda: Data(train=samples, validation=samples), metrics=lambda _model, _batch: returned
    )
    with pytest.raises(UsageError, match=found):
        trained(job, 16)


def test_a_model_on_the_meta_device_is_refused_where_its_values_are_needed(job_with, trained):
    with pytest.raises(UsageError, match=r"weight of .* is on the meta device"):
        trained(job_with(model=lambda: nn.Linear(8, 3, device="meta")), 16)


def test_the_validation_loss_is_averaged_by_what_the_job_counts(job_with, trained, samples):
    labels = samples["y"].clone()
    labels[:20] = -100
    validation = {"x": samples["x"], "y": labels}
    job = job_with(
        model=lambda: nn.Linear(8, 3),
        count=lambda batch: (batch["y"] != -100).sum(),
        data=lambda: Data(train=samples, validation=validation),
    )
    trainer, result = trained(job, 16)  # the first part counts nothing: its mean is NaN
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model(samples["x"]), labels).item()
    assert result.validations[0].loss == pytest.approx(expected)


@pytest.mark.parametrize(("every", "at"), [(1, [*range(1, 9)]), (3, [3, 4, 6, 8]), (4, [4, 8]), (9, [4, 8])])
def test_validations_come_every_n_steps_and_at_the_end_of_epochs(job_with, trained, samples, every, at):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    _, result = trained(job, 16, epochs=2, validate_every=every)
    _, without = trained(job, 16, epochs=2)
    assert [record.step for record in result.validations] == at
    assert result.losses == without.losses
    assert [record.loss for record in result.validations if record.step in (4, 8)] == [
        record.loss for record in without.validations
    ]


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 4, 5])
def test_a_resumed_run_has_the_validations_of_an_uninterrupted_one(
    job_with, trained, samples, tmp_path, stopped_after
):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    options = {"epochs": 2, "validate_every": 2, "save_every": 1, "run_dir": tmp_path / "run"}
    _, whole = trained(job, 16, epochs=2, validate_every=2)

    class Stop(Callback):
        def on_step(self, _trainer, record):
            if record.step == stopped_after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(job, 16, callbacks=[Stop()], **options)
    _, resumed = trained(job, 16, resume=True, **options)
    assert resumed.losses == whole.losses
    assert [(each.step, each.loss) for each in resumed.validations] == [
        (each.step, each.loss) for each in whole.validations
    ]


def test_patience_counts_the_validations_between_epochs(job_with, trained, samples):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    flat = replace(job, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    _, result = trained(flat, 16, epochs=9, validate_every=1, patience=2)
    assert result.stopped_because is StopReason.NOT_IMPROVING
    assert [record.step for record in result.validations] == [1, 2, 3]


def test_validation_leaves_batch_norm_and_the_modes_of_modules_alone(job_with, trained, samples):
    def frozen_norm():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model[1].train = lambda mode=True: model[1]  # stays in the mode it is in
        model[1].training = False
        return model

    class Modes(Callback):
        seen: list = []  # noqa: RUF012

        def on_validation(self, trainer, record):
            self.seen.append((trainer.model[0].training, trainer.model[1].training))

    job = job_with(model=frozen_norm, data=lambda: Data(train=samples, validation=samples))
    trainer, _ = trained(job, callbacks=[Modes()])
    assert Modes.seen == [(True, False)]
    assert trainer.model[1].num_batches_tracked == 0


def test_the_schedule_is_stepped_once_per_optimizer_step(job_with, trained):
    class Rates(Callback):
        def __init__(self):
            self.rates = []

        def on_step(self, trainer, record):
            self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    rates = Rates()
    halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    trained(job_with(), 8, 2, steps=3, schedule=halved, callbacks=[rates])
    assert rates.rates == pytest.approx([5e-3, 2.5e-3, 1.25e-3])


def test_the_schedule_stays_when_fp16_gradients_overflow(job_with, monkeypatch):
    # A scale of 2**24 makes fp16 gradients overflow until it has been halved often enough.
    from torch.amp.grad_scaler import GradScaler

    monkeypatch.setattr(
        "brimful.execution.executor.make_scaler", lambda *_: GradScaler("cpu", init_scale=2.0**24)
    )
    settings = Settings(micro_batch_size=16, precision=Precision.FP16)
    rates = []

    class Rates(Callback):
        def on_step(self, trainer, record):
            rates.append((record.updated, trainer.optimizer.param_groups[0]["lr"]))

    result = Trainer(
        job_with(),
        settings,
        steps=8,
        device="cpu",
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        callbacks=[Rates()],
        show_progress=False,
    ).fit()
    updates = 0
    for updated, rate in rates:
        updates += updated
        assert rate == pytest.approx(1e-2 * 0.5**updates)
    assert not result.steps[0].updated
    assert math.isinf(result.steps[0].gradient_norm) or math.isnan(result.steps[0].gradient_norm)
    assert TrainingResult.from_json(json.loads(json.dumps(result.to_json()))).losses == result.losses


def test_fp16_gradients_that_never_stop_overflowing_end_the_run(job_with, trained):
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    job = job_with(loss=lambda m, b: Infinite.apply(F.cross_entropy(m(b["x"]), b["y"])))
    settings = Settings(micro_batch_size=16, precision=Precision.FP16)
    with pytest.raises(NonFiniteError, match="bf16"):
        Trainer(job, settings, steps=100, device="cpu", show_progress=False).fit()


def poisoned(step, value=math.nan):
    """A loss that is no number in one step, from a model with statistics that the step would spoil."""
    calls = []

    def loss(model, batch):
        calls.append(len(calls) + 1)
        x = batch["x"] * value if calls[-1] == step else batch["x"]
        return F.cross_entropy(model(x), batch["y"])

    return {
        "loss": loss,
        "model": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    }


@pytest.mark.parametrize("units", [(), "recompute"])
def test_a_nan_stops_before_the_update_and_the_last_good_weights_are_on_disk(
    job_with, trained, tmp_path, recompute, units
):
    seen = {}

    class Remember(Callback):
        def on_step(self, trainer, record):
            seen[record.step] = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    job = job_with(**poisoned(step=3))
    with pytest.raises(NonFiniteError) as caught:
        trained(job, run_dir=tmp_path / "run", callbacks=[Remember()], epochs=2)
    message = str(caught.value)
    weights = tmp_path / "run" / "weights.safetensors"
    for part in (
        "the loss is nan",
        "step 3",
        str(weights),
        "after step 2",
        "learning rate",
        "max_gradient_norm",
    ):
        assert part in message
    model = job.model()
    load_weights(model, weights)
    assert set(seen) == {1, 2}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, seen[2][name]), name
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["updated"] for line in lines] == [True, True, False]
    assert float(lines[-1]["loss"]) != float(lines[-1]["loss"])


def test_an_infinite_gradient_of_a_finite_loss_stops_before_the_update(job_with, trained):
    job = job_with(model=lambda: nn.Linear(8, 3), loss=lambda m, b: (m(b["x"]) * 0).abs().sqrt().mean())
    before = nn.Linear(8, 3)
    with pytest.raises(NonFiniteError, match=r"the loss is 0 .* gradient norm nan.*(\n.*)*Trainer.model"):
        trained(replace(job, model=lambda: before), steps=2)
    assert all(torch.isfinite(p).all() for p in before.parameters())


def test_weights_that_an_update_spoiled_do_not_replace_the_good_ones(job_with, trained, tmp_path, samples):
    class Spoil(Callback):
        def on_step(self, trainer, record):
            if record.step == 6:
                with torch.no_grad():
                    trainer.model.head.weight.fill_(math.inf)

    with pytest.raises(NonFiniteError, match="after step 4"):
        trained(job_with(), run_dir=tmp_path / "run", callbacks=[Spoil()], epochs=3)
    model = job_with().model()
    load_weights(model, tmp_path / "run" / "weights.safetensors")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_run_directory_has_a_line_per_step_epoch_and_validation_and_the_best_weights(
    job_with, trained, tmp_path, samples
):
    losses = iter([1.0, 0.5, 2.0])

    class Model(nn.Linear):
        pass

    def loss(model, batch):
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        return value if model.training else torch.tensor(next(losses))

    job = job_with(model=lambda: Model(8, 3), loss=loss, data=lambda: Data(train=samples, validation=samples))
    weights = {}

    class Remember(Callback):
        def on_validation(self, trainer, record):
            weights[record.epoch] = trainer.model.weight.detach().clone()

    run_dir = tmp_path / "runs" / "a"
    _, result = trained(job, 50, epochs=3, run_dir=run_dir, callbacks=[Remember()])
    kinds = [json.loads(line)["kind"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["step", "epoch", "validation"] * 3
    best, last = job.model(), job.model()
    load_weights(best, run_dir / "best.safetensors")
    load_weights(last, run_dir / "weights.safetensors")
    assert torch.equal(best.weight, weights[2])
    assert torch.equal(last.weight, weights[3])
    assert {path.name for path in run_dir.iterdir()} == {
        "settings.json", "metrics.jsonl", "weights.safetensors", "best.safetensors", "result.json", "saves",
    }  # fmt: skip
    assert result.run_dir == run_dir


def test_without_a_run_directory_nothing_is_written(job_with, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(job_with())
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_before_its_first_step_can_be_started_again(job_with, trained, tmp_path):
    with pytest.raises(ZeroDivisionError):
        trained(job_with(loss=lambda model, batch: 1 / 0), run_dir=tmp_path / "run")
    trained(job_with(), run_dir=tmp_path / "run")


def test_a_used_run_directory_is_refused_before_anything_is_loaded(job_with, trained, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    job = job_with(data=lambda: pytest.fail("the data were loaded"))
    with pytest.raises(RunDirectoryError, match=r"mine\.txt"):
        trained(job, run_dir=tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_actions_are_removed_when_training_fails(job_with, trained, recompute, samples):
    model = job_with().model()
    loss = {name: value for name, value in poisoned(2).items() if name == "loss"}
    with pytest.raises(NonFiniteError):
        trained(job_with(model=model, **loss), units=recompute, verify=False)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_plan_is_certified_before_the_first_step(job_with, trained, recompute):
    _trainer, result = trained(job_with(), epochs=1, units=recompute)
    assert result.certificate is not None
    assert result.certificate.holds
    assert result.certificate.comparisons[0].is_bitwise
    assert TrainingResult.from_json(result.to_json()).certificate == result.certificate
    assert trained(job_with(), epochs=1)[1].certificate is None  # nothing to compare
    assert trained(job_with(), epochs=1, units=recompute, verify=False)[1].certificate is None


def test_verifying_changes_nothing_of_the_run(job_with, trained, recompute):
    _, certified = trained(job_with(), epochs=2, units=recompute)
    _, other = trained(job_with(), epochs=2, units=recompute, verify=False)
    assert certified.losses == other.losses


class Forgetful(nn.Module):
    """Its forward depends on how often it ran, which recomputing does not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.calls = [0]
        self.head = nn.Linear(8, 3)
        self.blocks[0].forward = self._forward

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return torch.tanh(nn.functional.linear(x, self.blocks[0].weight) * self.calls[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x))


def test_a_plan_that_computes_something_else_is_refused_before_the_first_step(job_with, recompute):
    model = Forgetful()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = Settings(micro_batch_size=4, units=recompute[:1])
    trainer = Trainer(job_with(model=model), settings, epochs=1, show_progress=False)
    with pytest.raises(EquivalenceError, match="NOT the same training"):
        trainer.fit()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_stop_ends_the_run_after_the_step_and_saves(job_with, trained, tmp_path, samples):
    class StopAtTwo(Callback):
        def on_step(self, trainer, record):
            if record.step == 2:
                trainer.stop()

    job = job_with(data=lambda: Data(train=samples, validation=samples))
    trainer, result = trained(job, run_dir=tmp_path / "run", callbacks=[StopAtTwo()], epochs=5)
    assert result.stopped_because is StopReason.INTERRUPTED
    assert len(result.steps) == 2
    assert result.validations == ()
    model = job.model()
    load_weights(model, tmp_path / "run" / "weights.safetensors")
    assert torch.equal(model.head.weight, trainer.model.head.weight)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped_because"] == "interrupted"


def test_a_clipped_gradient_is_recorded_before_clipping(job_with, trained):
    job = job_with(model=lambda: nn.Linear(8, 3), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    torch.manual_seed(0)
    before = nn.Linear(8, 3)  # the trainer seeds with 0 too
    trainer, result = trained(job, 50, steps=1, max_gradient_norm=1e-3)
    moved = [a - b for a, b in zip(trainer.model.parameters(), before.parameters(), strict=True)]
    assert result.steps[0].gradient_norm > 1e-2
    assert nn.utils.get_total_norm(moved).item() == pytest.approx(1e-3, rel=1e-2)


def test_a_model_given_as_a_module_is_trained_in_place(job_with, trained):
    model = nn.Linear(8, 3)
    before = model.weight.detach().clone()
    trainer, _ = trained(job_with(model=model))
    assert trainer.model is model
    assert not torch.equal(model.weight, before)


def test_training_warns_of_nothing(job_with, trained, tmp_path, recompute, samples):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(job, 5, 3, epochs=2, run_dir=tmp_path / "run", units=recompute)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": -1}, "steps is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm is 0.0"),
        ({"device": "rtx"}, "'rtx' is not a torch device"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(job_with, options, said):
    with pytest.raises(UsageError, match=said):
        Trainer(job_with(), Settings(micro_batch_size=1), **options)


def test_a_schedule_on_a_metric_is_refused(job_with, trained):
    with pytest.raises(UsageError, match="on_validation"):
        trained(job_with(), schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_missing_data_are_named_with_the_way_to_give_them(job_with, trained):
    with pytest.raises(UsageError, match=r"tiny has no data.*data=Data\(train=…\)"):
        trained(job_with(data=None))


def test_data_that_are_no_data_are_refused(job_with, trained, samples):
    with pytest.raises(UsageError, match="wrap them"):
        trained(job_with(data=lambda: samples))


def test_a_batch_that_has_to_be_split_and_cannot_be_is_refused(job_with, trained):
    batches = [{"x": torch.rand(4, 8), "y": torch.zeros(3, dtype=torch.long)}]
    with pytest.raises(BatchError, match="do not agree"):
        trained(job_with(data=lambda: Data(train=batches)), accumulation=2)


def test_a_generator_that_is_used_up_is_told(job_with, trained, samples):
    with pytest.raises(UsageError, match=r"epoch 2.*not a generator"):
        trained(job_with(data=lambda: Data(train=iter([samples]))), epochs=2)


def test_model_and_optimizer_are_there_once_fit_was_called(job_with):
    trainer = Trainer(job_with(), Settings(micro_batch_size=1))
    with pytest.raises(UsageError, match="fit"):
        _ = trainer.model
    with pytest.raises(UsageError, match="fit"):
        _ = trainer.optimizer


def test_waiting_for_data_is_measured_and_told(job_with, trained, samples):
    class Slow(list):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.05)
                yield batch

    _, result = trained(job_with(data=lambda: Data(train=Slow([samples] * 3))), 50)
    assert all(step.data_seconds >= 0.05 for step in result.steps)
    assert "waited for data" in training_text(result, None)


@pytest.mark.parametrize(
    ("micro_batch", "steps", "peak", "times"),
    [(8, 1, False, False), (8, 2, True, False), (8, 3, True, True), (64, 3, False, True)],
)
def test_what_a_short_run_does_not_measure_is_explained(
    job_with, trained, samples, micro_batch, steps, peak, times
):
    """The data have batches of 8 samples; a full batch of 64 never comes."""
    batches = [{name: tensor[:8] for name, tensor in samples.items()}] * 3
    _, result = trained(job_with(data=lambda: Data(train=batches)), micro_batch, steps=steps)
    for text in (training_text(result), str(result)):
        assert ("peak not measured   it is measured in a step after the first" in text) is not peak
        assert ("time not measured   the first step and" in text) is not times
    assert (result.measured_peak_allocated_bytes is not None) is peak


def test_the_model_is_gone_with_its_trainer_and_the_data_with_the_run(job_with, trained, samples):
    class Held(dict):  # unlike a dict, it can be referred to weakly
        pass

    kept = []

    def data():
        train = Held(samples)
        kept.append(weakref.ref(train))
        return Data(train=train)

    gc.collect()
    gc.disable()  # what is in a cycle would keep a GPU's memory until the next collection
    try:
        trainer, _ = trained(job_with(data=data), callbacks=[Callback()])
        of_data, of_model = kept[0](), weakref.ref(trainer.model)
        del trainer
        assert of_data is None
        assert of_model() is None
    finally:
        gc.enable()


def test_what_is_no_callback_is_refused_before_training(job_with):
    for callback, said in (
        (print_loss, "function, which has no on_step"),
        (Callback, "which is not an instance"),
    ):
        with pytest.raises(UsageError, match=said):
            Trainer(job_with(), Settings(micro_batch_size=8), device="cpu", steps=1, callbacks=[callback])


def test_callbacks_may_come_from_a_generator(job_with, trained):
    told = []

    class Told(Callback):
        def on_step(self, trainer, record) -> None:
            told.append(record.step)

    trained(job_with(), steps=2, callbacks=(each for each in [Told()]))
    assert told == [1, 2]


def test_a_run_that_was_stopped_says_that_it_can_be_gone_on_with(job_with, trained, tmp_path):
    class Stops(Callback):
        def on_step(self, trainer, record) -> None:
            trainer.stop()

    _, stopped = trained(job_with(), steps=3, run_dir=tmp_path / "a", callbacks=[Stops()])
    _, finished = trained(job_with(), steps=3, run_dir=tmp_path / "b")
    assert ["resume" in training_text(each) for each in (stopped, finished)] == [True, False]


def print_loss(trainer, record) -> None:
    print(record.loss)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 2}, ["the batch is split"]),
        ({"optimizer_implementation": OptimizerImplementation.FUSED}, ["the fused optimizer may round"]),
        ({"optimizer": "adafactor"}, ["the optimizer is adafactor"]),
        (
            {"precision": Precision.BF16, "offload_optimizer": True},
            ["the precision is bf16", "the optimizer is on"],
        ),
        ({}, []),
    ],
)
def test_what_may_have_made_losses_differ_is_named(job_with, trained, changes, reasons):
    _, result = trained(job_with(), 8, steps=2)
    plain = replace(result, steps=tuple(replace(step, loss=step.loss + 1) for step in result.steps))
    text = training_text(replace(result, settings=replace(result.settings, **changes)), plain)
    said = text.splitlines()
    place = next(i for i, line in enumerate(said) if line.startswith("  difference  "))
    told = [line.strip() for line in said[place + 1 : place + 3] if line.startswith(22 * " ")]
    assert [any(line.startswith(reason) for line in told) for reason in reasons] == [True] * len(reasons)
    assert len(told) == len(reasons)


def test_ignored_labels_that_the_data_alone_has_are_refused_unless_they_are_counted(job_with, trained, samples):
    labels = samples["y"].clone()
    labels[20:30] = -100  # the first batch of 16 has none, the second has
    batches = [{"x": samples["x"][begin : begin + 16], "y": labels[begin : begin + 16]} for begin in (0, 16)]
    job = job_with(model=lambda: nn.Linear(8, 3), data=lambda: Data(train=batches))
    with pytest.raises(EquivalenceError) as caught:
        trained(job, 8, 2, epochs=1)
    assert "the loss is a mean over labels other than -100" in str(caught.value)
    assert 'Pass Job(count=lambda batch: (batch["y"] != -100).sum()).' in str(caught.value)
    _, counted = trained(replace(job, count=lambda batch: (batch["y"] != -100).sum()), 8, 2, epochs=1)
    _, whole = trained(job, 16, epochs=1)
    assert counted.losses == pytest.approx(whole.losses, rel=1e-5)
    _, unchecked = trained(job, 8, 2, epochs=1, verify=False)
    assert any("labels of -100, 0 to 1 in a sample" in note for note in unchecked.notes)
