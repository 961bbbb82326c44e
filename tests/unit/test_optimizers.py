import re

import pytest
import torch
from torch import nn

from brimful import optimizers
from brimful.errors import UnknownNameError, UsageError
from brimful.job import Job
from brimful.optimizers import make_optimizer, optimizer_names

ROWS, COLUMNS = 30, 20

# Class, learning rate and bytes of state that the table at the top of optimizers.py promises.
DOCUMENTED = {
    "adamw": (torch.optim.AdamW, 1e-3, 8 * ROWS * COLUMNS + 4),
    "adam": (torch.optim.Adam, 1e-3, 8 * ROWS * COLUMNS + 4),
    "sgd": (torch.optim.SGD, 1e-3, 4 * ROWS * COLUMNS),
    "rmsprop": (torch.optim.RMSprop, 1e-2, 4 * ROWS * COLUMNS + 4),
    "adagrad": (torch.optim.Adagrad, 1e-2, 4 * ROWS * COLUMNS + 4),
    "adafactor": (torch.optim.Adafactor, 1e-2, 4 * (ROWS + COLUMNS) + 4),
    "muon": (torch.optim.Muon, 1e-3, 4 * ROWS * COLUMNS),
}


def job(optimizer="adamw") -> Job:
    return Job(
        model=nn.Linear(3, 1),
        loss=lambda model, batch: model(batch).mean(),
        batch=lambda samples: torch.ones(samples, 3),
        optimizer=optimizer,
        name="toy",
    )


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
    assert sum(held.nbytes for held in optimizer.state[parameter].values()) == state_bytes


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
        ("muon", "momentum", 0.95),
        ("muon", "weight_decay", 0.1),
    ],
)
def test_other_defaults_are_as_documented(name, option, value):
    assert make_optimizer(job(name), [matrix()]).defaults[option] == value


def test_the_jobs_own_function_makes_the_optimizer():
    own = job(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert make_optimizer(own, [matrix()]).defaults["lr"] == 0.5


def test_a_name_takes_the_place_of_the_jobs_own():
    own = job(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert isinstance(make_optimizer(own, [matrix()], "adam"), torch.optim.Adam)
    assert isinstance(make_optimizer(job("sgd"), [matrix()], "adam"), torch.optim.Adam)


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
        make_optimizer(job(), [matrix()], "adamv")
    assert "adamw" in caught.value.nearest


def test_muon_says_which_parameters_it_cannot_take():
    with pytest.raises(UsageError, match=r"1 of 2 trainable parameters are none .*shape \(4,\)"):
        make_optimizer(job("muon"), [matrix(), nn.Parameter(torch.ones(4))])
