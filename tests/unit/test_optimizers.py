import math
import re
import sys

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn

from brimful import optimizers
from brimful.errors import UnknownNameError, UsageError
from brimful.job import Job
from brimful.optimizers import (
    has_implementation,
    make_optimizer,
    named_optimizer,
    optimizer_names,
    set_implementation,
)
from brimful.settings import OptimizerImplementation, Settings

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
    ],
)
def test_other_defaults_are_as_documented(name, option, value):
    assert make_optimizer(job(name), [matrix()]).defaults[option] == value


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


def test_adamw8bit_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(UsageError, match=r"brimful\[bitsandbytes\].*'adafactor'"):
        make_optimizer(job("adamw8bit"), [matrix()])


def test_muon_says_which_parameters_it_cannot_take():
    with pytest.raises(UsageError, match=r"1 of 2 trainable parameters are none .*shape \(4,\)"):
        make_optimizer(job("muon"), [matrix(), nn.Parameter(torch.ones(4))])


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
