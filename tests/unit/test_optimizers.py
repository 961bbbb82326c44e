import copy
import dataclasses
import math
import re
import sys

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn

import brimful as bf
from brimful import optimizers
from brimful.errors import UnknownNameError, UsageError
from brimful.job import Data, Job
from brimful.optimizers import (
    has_implementation,
    kept_implementation,
    make_optimizer,
    named_optimizer,
    optimizer_names,
    set_implementation,
)
from brimful.profiling import measure_step
from brimful.settings import OptimizerImplementation, Settings
from brimful.trace import Category
from brimful.trainer import Trainer

ROWS, COLUMNS = 300, 20
"""More numbers than the 4096 from which on AdamW8bit keeps bytes."""

ADAMW8BIT_BYTES = 2 * (ROWS * COLUMNS + 4 * math.ceil(ROWS * COLUMNS / 256) + 4 * 256)
"""Two moments: a byte each, a float32 for each 256, a table of 256."""

# Class, learning rate and bytes of state that the table at the top of optimizers.py promises.
DOCUMENTED = {
    "adamw": (torch.optim.AdamW, 1e-3, 8 * ROWS * COLUMNS + 4),
    "adam": (torch.optim.Adam, 1e-3, 8 * ROWS * COLUMNS + 4),
    "sgd": (torch.optim.SGD, 1e-3, 4 * ROWS * COLUMNS),
    "rmsprop": (torch.optim.RMSprop, 1e-2, 4 * ROWS * COLUMNS + 4),
    "adagrad": (torch.optim.Adagrad, 1e-2, 4 * ROWS * COLUMNS + 4),
    "adafactor": (torch.optim.Adafactor, 1e-2, 4 * (ROWS + COLUMNS) + 4),
    "adamw8bit": (AdamW8bit, 1e-3, ADAMW8BIT_BYTES),
    "muon": (optimizers.Muon, 1e-3, 4 * ROWS * COLUMNS),
}


def job(optimizer="adamw") -> Job:
    return Job(
        model=nn.Linear(3, 1),
        loss=lambda model, batch: model(batch).mean(),
        batch=lambda samples: torch.ones(samples, 3),
        optimizer=optimizer,
        name="toy",
    )


def named(name: str) -> Settings:
    return Settings(micro_batch_size=1, optimizer=name)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(ROWS, COLUMNS))


def test_every_name_is_documented_and_tested():
    assert set(optimizer_names()) == set(DOCUMENTED)
    assert re.findall(r"^\| `(\w+)` \|", optimizers.__doc__, re.MULTILINE) == list(optimizer_names())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_class_learning_rate_and_state_are_as_documented(name):
    kind, learning_rate, state_bytes = DOCUMENTED[name]
    parameter = matrix()
    optimizer = make_optimizer(job(name), [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert type(optimizer) is kind
    assert optimizer.defaults["lr"] == learning_rate
    tensors = (held for held in optimizer.state[parameter].values() if isinstance(held, torch.Tensor))
    assert sum(held.nbytes for held in tensors) == state_bytes


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("adamw", "betas", (0.9, 0.999)),
        ("adamw", "eps", 1e-8),
        ("adamw", "weight_decay", 0.01),
        ("adam", "betas", (0.9, 0.999)),
        ("adam", "weight_decay", 0),
        ("sgd", "momentum", 0.9),
        ("rmsprop", "alpha", 0.99),
        ("adagrad", "eps", 1e-10),
        ("adafactor", "beta2_decay", -0.8),
        ("adafactor", "d", 1.0),
        ("adamw8bit", "betas", (0.9, 0.999)),
        ("adamw8bit", "weight_decay", 0.01),
        ("muon", "momentum", 0.95),
        ("muon", "weight_decay", 0.1),
        ("muon", "adjust_lr_fn", "match_rms_adamw"),
    ],
)
def test_other_defaults_are_as_documented(name, option, value):
    (group,) = make_optimizer(job(name), [matrix()]).param_groups
    assert group[option] == value


def test_the_jobs_own_function_makes_the_optimizer():
    own = job(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert make_optimizer(own, [matrix()]).defaults["lr"] == 0.5


def test_a_name_takes_the_place_of_the_jobs_own():
    own = job(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert isinstance(make_optimizer(own, [matrix()], named("adam")), torch.optim.Adam)
    assert isinstance(make_optimizer(job("sgd"), [matrix()], named("adam")), torch.optim.Adam)


@pytest.mark.parametrize("own", ["adamw", lambda parameters: torch.optim.SGD(parameters, lr=0.5)])
def test_frozen_parameters_are_left_out(own):
    trainable, frozen = matrix(), matrix().requires_grad_(False)
    (group,) = make_optimizer(job(own), iter([frozen, trainable])).param_groups
    assert group["params"] == [trainable]


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(UsageError, match="toy: no parameter requires a gradient"):
        make_optimizer(job(), [matrix().requires_grad_(False)])


def test_an_unknown_name_says_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown optimizer 'adamv'\. Nearest: .*adamw") as caught:
        make_optimizer(job(), [matrix()], named("adamv"))
    assert "adamw" in caught.value.nearest


def test_the_trainers_names_are_explained():
    names = {each.value for each in pytest.importorskip("transformers.training_args").OptimizerNames}
    assert len(names) > 30
    for name in {"adamw_apex_fused", *names} - {*optimizer_names()}:
        with pytest.raises(UnknownNameError, match=rf"Transformers' {name} is (adamw|read from a Trainer)"):
            make_optimizer(job(), [matrix()], named(name))


def test_adamw8bit_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(UsageError, match=r"pip install bitsandbytes.*'adafactor'"):
        make_optimizer(job("adamw8bit"), [matrix()])


@pytest.mark.parametrize("device", ["A100-SXM4-80GB", "cpu"])
def test_adamw8bit_is_predicted_without_the_library(device, monkeypatch):
    def predicted():
        model = nn.Sequential(nn.Linear(8, 700), nn.ReLU(), nn.Linear(700, 300), nn.Linear(300, 1))
        small_and_large = Job(
            model=model,
            loss=lambda model, batch: model(batch).mean(),
            batch=lambda samples: torch.ones(samples, 8),
            optimizer="adamw8bit",
        )
        result = bf.estimate(small_and_large, device, micro_batch_size=4)
        return (
            result.predicted_device_interval_bytes,
            result.breakdown,
            result.phases,
            result.predicted_step_seconds,
        )

    with_it = predicted()
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    assert predicted() == with_it


class Reader(nn.Module):
    """An embedding, hidden layers, a convolution, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.hidden = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.mixed = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mixed(self.hidden(self.embedding(tokens)).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


def reading(optimizer="muon", model=Reader) -> Job:
    return Job(
        model=model,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        batch=lambda samples: torch.randint(20, (samples, 5)),
        optimizer=optimizer,
        data=lambda: Data(train=torch.arange(60).remainder(20).reshape(12, 5)),
    )


def step_of(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("chosen", ["muon", named_optimizer("muon")])
def test_muon_is_torchs_muon_on_hidden_matrices_and_torchs_adamw_on_the_rest(chosen):
    model = Reader()
    other = copy.deepcopy(model)
    hidden = [other.hidden[0].weight, other.hidden[2].weight]
    rest = [p for p in other.parameters() if all(p is not matrix for matrix in hidden)]
    step_of(make_optimizer(reading(chosen), model), model)
    muon, adamw = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        for parameter in other.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        muon.step()
        adamw.step()
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_muon_goes_on_from_its_state_and_can_be_copied():
    model = Reader()
    optimizer = make_optimizer(reading(), model)
    step_of(optimizer, model)
    others = [copy.deepcopy(model), copy.deepcopy(model)]
    loaded = make_optimizer(reading(), others[0])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair = copy.deepcopy((model, optimizer))
    step_of(optimizer, model, 1)
    step_of(loaded, others[0], 1)
    step_of(pair[1], pair[0], 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, others[0].get_parameter(name))
        assert torch.equal(parameter, pair[0].get_parameter(name))


def test_muon_takes_a_decay_and_a_rate_for_all_its_matrices():
    optimizer = make_optimizer(reading(named_optimizer("muon", learning_rate=0.5, weight_decay=0.2)), Reader())
    groups = [(g["algorithm"], len(g["params"]), g["weight_decay"], g["lr"]) for g in optimizer.param_groups]
    # the embedding, the convolution and the head; then five biases and the norm's weight
    assert groups == [("muon", 2, 0.2, 0.5), ("adamw", 3, 0.2, 0.5), ("adamw", 6, 0.0, 0.5)]


def test_muon_is_predicted_and_resumes(tmp_path):
    settings = Settings(micro_batch_size=4)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 200), nn.Linear(200, 64), nn.Linear(64, 20))

    linear = reading(model=wide)
    predicted = bf.estimate(linear, "cpu", micro_batch_size=4)
    assert predicted.peak_phase == "optimizer"
    measured = measure_step(linear, settings, steps=1)
    beyond = measured.measured_peak_allocated_bytes - predicted.predicted_peak_allocated_bytes
    # products in bf16 take scratch memory on a CPU, which is not predicted
    assert 0 <= beyond <= sum(temporary.size_bytes for temporary in measured.temporaries_at_peak)
    model = wide()
    optimizer = make_optimizer(linear, model)
    step_of(optimizer, model, 1)
    state_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert dict(predicted.breakdown)["optimizer_state"] == state_bytes

    def trained(**options):
        trainer = Trainer(reading(), settings, device="cpu", show_progress=False, **options)
        trainer.fit()
        return trainer.model.state_dict()

    expected = trained(steps=5)
    trained(steps=3, run_dir=tmp_path / "run")
    torch.testing.assert_close(
        trained(steps=5, run_dir=tmp_path / "run", resume=True), expected, rtol=0, atol=0
    )


def test_optimizers_of_torchao_are_refused_for_their_state():
    kind = type("AdamW4bit", (torch.optim.SGD,), {"__module__": "torchao.optim.adam"})
    with pytest.raises(UsageError, match=r"torchao's AdamW4bit.*'adamw8bit'"):
        make_optimizer(job(lambda parameters: kind(parameters)), [matrix()])


def test_muon_is_refused_where_nothing_is_hidden():
    with pytest.raises(UsageError, match="hidden matrices, and none of the 2"):
        make_optimizer(job("muon"), nn.Linear(3, 1))


def trained(
    optimizer_name: str, implementation: OptimizerImplementation | None, *, switched_at: int = 0
) -> torch.Tensor:
    """A parameter after some steps, with the implementation chosen before one of them."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(ROWS, COLUMNS))
    optimizer = make_optimizer(job(optimizer_name), [parameter])
    for step in range(4):
        if step == switched_at and implementation is not None:
            set_implementation(optimizer, implementation)
        parameter.grad = torch.randn(ROWS, COLUMNS)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("switched_at", [0, 2])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad"])
def test_every_implementation_computes_the_same(name: str, switched_at: int) -> None:
    """Also with the state that another one made. Fused rounds in another order, in the last digits."""
    plain = trained(name, None)
    for implementation in OptimizerImplementation:
        other = trained(name, implementation, switched_at=switched_at)
        torch.testing.assert_close(other, plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(trained(name, OptimizerImplementation.FOR_LOOP), plain)


def test_what_an_optimizer_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="Adafactor has no fused implementation"):
        make_optimizer(
            job("adafactor"),
            [matrix()],
            Settings(micro_batch_size=1, optimizer_implementation=OptimizerImplementation.FUSED),
        )


@pytest.mark.parametrize(
    ("chosen", "is_open"),
    [({}, True), ({"foreach": False}, False), ({"foreach": True}, False), ({"fused": True}, False)],
)
def test_what_a_user_chose_is_no_choice_of_ours(chosen: dict[str, bool], is_open: bool) -> None:
    optimizer = torch.optim.AdamW([matrix()], **chosen)
    assert has_implementation(optimizer, OptimizerImplementation.FUSED) is is_open


def test_muon_has_no_other_implementation() -> None:
    assert not has_implementation(torch.optim.Muon([matrix()]), OptimizerImplementation.FUSED)


def test_a_weight_decay_leaves_biases_and_norms_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = named_optimizer("adamw", learning_rate=0.5, weight_decay=0.2)(model.parameters())
    groups = [(len(g["params"]), g["weight_decay"], g["lr"]) for g in optimizer.param_groups]
    assert groups == [(1, 0.2, 0.5), (3, 0.0, 0.5)]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    before = model[1].weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight = model[0].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(model[0].weight.detach(), weight * (1 - 0.5 * 0.2))


def test_options_of_a_named_optimizer_are_checked():
    assert named_optimizer("sgd", learning_rate=0.1)([nn.Parameter(torch.ones(2))]).defaults["lr"] == 0.1
    only_vectors = named_optimizer("adamw", weight_decay=0.1)([nn.Parameter(torch.ones(2))])
    assert [group["weight_decay"] for group in only_vectors.param_groups] == [0.0]
    with pytest.raises(UnknownNameError):
        named_optimizer("adamx")
    with pytest.raises(UsageError, match=r"learning_rate is -1"):
        named_optimizer("adamw", learning_rate=-1)


def test_a_fused_kernel_is_not_given_a_parameter_with_gaps_which_it_would_be_wrong_about() -> None:
    whole = torch.zeros(4, 6)
    optimizer = torch.optim.AdamW([nn.Parameter(whole[:, :3]), nn.Parameter(torch.zeros(3, 4).t())])
    with pytest.raises(UsageError, match=r"shape \(4, 3\) is a part of a larger tensor"):
        set_implementation(optimizer, OptimizerImplementation.FUSED)
    assert not optimizer.param_groups[0]["fused"]
    set_implementation(optimizer, OptimizerImplementation.FOREACH)


def by_named_parameters(named_parameters):
    """Weight decay by name, in a line each, as training scripts write it."""
    named = dict(named_parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def by_model(model):
    return by_named_parameters(model.named_parameters())


def by_names_of_torch(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=1e-2)


def test_an_optimizer_of_a_function_that_reads_weights_is_fused():
    """Weights without values have none to read, so the implementation is found with others."""

    def without_zeros(parameters):
        return torch.optim.AdamW([each for each in parameters if each.abs().sum().item() >= 0])

    samples = {"x": torch.randn(16, 3)}
    given = dataclasses.replace(
        job(without_zeros),
        model=lambda: nn.Linear(3, 1),
        batch=samples,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
    )
    plan = bf.plan(given, "RTX 3090", global_batch_size=8)
    assert plan.settings.optimizer_implementation == "fused"


@pytest.mark.parametrize("make", [by_named_parameters, by_model, by_names_of_torch])
def test_an_optimizer_may_be_made_of_names_or_of_the_model(make, tmp_path):
    samples = {"x": torch.randn(16, 3)}
    given = dataclasses.replace(
        job(make),
        model=lambda: nn.Linear(3, 1),
        batch=samples,
        data=lambda: Data(train=samples),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
    )
    state_bytes = dict(bf.estimate(given, "cpu", micro_batch_size=8).breakdown)[Category.OPTIMIZER_STATE]
    assert state_bytes == 4 * 2 * (3 + 1) + 2 * 4, "two moments of four parameters, and two counts of steps"
    assert bf.plan(given, "RTX 3090", global_batch_size=8).settings.optimizer_implementation == "fused"
    options = {"device": "cpu", "show_progress": False}
    settings = Settings(micro_batch_size=8)
    whole = Trainer(given, settings, steps=4, run_dir=tmp_path / "whole", **options).fit()
    Trainer(given, settings, steps=2, run_dir=tmp_path / "run", **options).fit()
    resumed = Trainer(given, settings, steps=4, run_dir=tmp_path / "run", resume=True, **options).fit()
    assert resumed.losses == whole.losses


def test_names_are_those_without_wrappers():
    seen = []

    def optimizer(named_parameters):
        seen.extend(name for name, _parameter in named_parameters)
        return torch.optim.SGD([parameter for _name, parameter in named_parameters], lr=0.1)

    make_optimizer(job(optimizer), torch.compile(nn.Sequential(nn.Linear(3, 1))))
    assert seen == ["0.weight", "0.bias"]


def refusals(job: Job) -> set[str]:
    """What each function says that is given a job it cannot train."""
    settings = Settings(micro_batch_size=8)

    def apply() -> object:
        model = job.model()
        return bf.apply(settings, job, model, make(model.parameters()))(SAMPLES)

    make = job.optimizer
    messages = set()
    for call in (
        lambda: bf.estimate(job, "cpu", micro_batch_size=8),
        lambda: bf.plan(job, "cpu", budget="1GiB", global_batch_size=8),
        apply,
        lambda: bf.measure(job, settings, "cpu"),
        lambda: bf.fit(job, settings, steps=1, show_progress=False),
    ):
        with pytest.raises(UsageError) as refused:
            call()
        messages.add(str(refused.value))
    return messages


SAMPLES = torch.randint(0, 5, (8, 2))


def make_job(**others: object) -> Job:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    defaults = {"batch": SAMPLES, "loss": loss, "data": lambda: Data(train=SAMPLES)}
    return Job(**defaults | others)


def test_an_optimizer_that_needs_a_closure_is_refused_by_every_function_in_the_same_words() -> None:
    (message,) = refusals(make_job(model=lambda: nn.Embedding(5, 4), optimizer=torch.optim.LBFGS))
    assert "LBFGS computes the loss several times in a step" in message


class SparseLookup(nn.Module):
    """Asks for a sparse gradient, though no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(indices, self.table, sparse=True)


@pytest.mark.parametrize(
    "model",
    [lambda: nn.Embedding(5, 4, sparse=True), lambda: nn.EmbeddingBag(5, 4, sparse=True), SparseLookup],
    ids=["embedding", "embedding bag", "function"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_are_refused_by_every_function_in_the_same_words(
    model: object, optimizer: object
) -> None:
    (message,) = refusals(make_job(model=model, optimizer=optimizer))
    assert "sparse gradients are not supported" in message
    assert "Set sparse=False" in message


def test_a_sparse_embedding_that_is_not_trained_is_accepted() -> None:
    def model() -> nn.Module:
        embedding = nn.Embedding(5, 4, sparse=True)
        embedding.weight.requires_grad_(False)
        return nn.Sequential(embedding, nn.Linear(4, 1))

    job = make_job(model=model, optimizer="sgd")
    assert bf.estimate(job, "cpu", micro_batch_size=8).predicted_peak_allocated_bytes > 0
    assert bf.measure(job, Settings(micro_batch_size=8), "cpu").measured_peak_allocated_bytes > 0


def test_a_fused_optimizer_that_is_changed_steps_under_a_loss_scaler() -> None:
    """A scaler leaves the check for infinity to an optimizer that was made fused; a for-loop refuses it."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    restore = kept_implementation(optimizer)
    set_implementation(optimizer, OptimizerImplementation.FOR_LOOP)
    scaler = torch.amp.GradScaler("cpu")
    before = layer.weight.detach().clone()
    for _ in range(2):  # the second as it was made
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not torch.equal(layer.weight, before)
        before = layer.weight.detach().clone()
        restore()
    assert optimizer.param_groups[0]["fused"]
    assert vars(optimizer)["_step_supports_amp_scaling"]
