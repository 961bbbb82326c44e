"""A cross-entropy computed in chunks gives the loss and the gradients of the baseline, without all logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Action, ChunkedLoss, Settings, UnitAction
from brimful.transforms import apply_units

B, T, D, V = 3, 7, 5, 211
CHUNKED = Settings(micro_batch_size=B, chunked_loss=ChunkedLoss(layer="head", chunks=4))
IN_FLOAT64 = 1e-12
"""Of the largest entry: float64 rounds to 1e-16, and sums are of hundreds of terms."""


class Model(nn.Module):
    """Tokens (B, T) to logits (B, T, V), through a block that can be recomputed."""

    def __init__(self, *, bias: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.block = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.head = nn.Linear(D, V, bias=bias)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embedding(tokens)))
        return logits


def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    made = tokens().flip(0)
    made[0, :3] = -100
    return made


def shifted(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), labels()[..., 1:].flatten())


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda logits: F.cross_entropy(logits.flatten(0, 1), labels().flatten()),
    "sum": lambda logits: F.cross_entropy(logits.view(-1, V), labels().view(-1), reduction="sum"),
    "shifted": shifted,
    "cast first": lambda logits: F.cross_entropy(
        logits.to(torch.float64).reshape(B * T, V), labels().flatten()
    ),
    "class weights": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), labels().flatten(), weight=torch.linspace(0.1, 2, V, dtype=torch.float64)
    ),
    "label smoothing": lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits.flatten(0, 1), labels().flatten()
    ),
    "labelled tokens only": lambda logits: F.cross_entropy(logits[labels() >= 0], labels()[labels() >= 0]),
    "one sample at a time": lambda logits: sum(
        (F.cross_entropy(logits[i], labels()[i]) for i in range(B)), torch.zeros(())
    ),
    "another ignored index": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), tokens().flatten(), ignore_index=int(tokens()[0, 0])
    ),
    "with the logits too": lambda logits: (
        F.cross_entropy(logits.flatten(0, 1), labels().flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()
    ),
    "classes in the middle": lambda logits: F.cross_entropy(logits.transpose(1, 2), labels()),
    "no class indices": lambda logits: F.cross_entropy(logits.flatten(0, 1), torch.full((B * T, V), 1 / V)),
}


def computed(model: nn.Module, loss: Callable[[Tensor], Tensor], autocast: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model(tokens()))
    value.backward()
    return {"loss": value.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


class RowsOfLogits(TorchDispatchMode):
    """The most rows of V numbers, and more than a weight has, that an op returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim >= 2 and out.shape[-1] == V:
            self.most = max(self.most, out.numel() // V)
        return out


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    torch.manual_seed(0)
    model = Model(bias=True).double()
    expected = computed(model, LOSSES[name])
    applied = apply_units(model, CHUNKED)
    assert_close(computed(model, LOSSES[name]), expected, IN_FLOAT64)
    applied.remove()
    assert_close(computed(model, LOSSES[name]), expected, 0.0)


@pytest.mark.parametrize("name", ["mean", "sum", "shifted", "cast first", "class weights", "label smoothing"])
def test_never_makes_all_logits(name: str) -> None:
    model = Model().double()
    apply_units(model, CHUNKED)
    with RowsOfLogits() as rows:
        computed(model, LOSSES[name])
    assert 0 < rows.most <= -(-B * T // 4)


def test_under_autocast_differs_by_its_rounding_only() -> None:
    torch.manual_seed(0)
    model = Model(bias=True)
    expected = computed(model, LOSSES["mean"], autocast=True)
    apply_units(model, CHUNKED)
    assert_close(computed(model, LOSSES["mean"], autocast=True), expected, torch.finfo(torch.bfloat16).eps)


def test_is_computed_under_the_autocast_that_the_layer_was_called_in() -> None:
    torch.manual_seed(0)
    model = Model()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens())
        assert logits.dtype is torch.bfloat16
        return F.cross_entropy(logits.float().flatten(0, 1), labels().flatten())

    expected = loss()
    apply_units(model, CHUNKED)
    assert torch.allclose(loss(), expected, rtol=1e-6)


@pytest.mark.parametrize("is_tied", [False, True])
def test_beside_recomputed_units(is_tied: bool) -> None:
    torch.manual_seed(0)
    model = Model(is_tied=is_tied).double()
    expected = computed(model, LOSSES["mean"])
    units = (UnitAction(fqn="block", action=Action.RECOMPUTE),)
    apply_units(model, Settings(micro_batch_size=B, units=units, chunked_loss=CHUNKED.chunked_loss))
    assert_close(computed(model, LOSSES["mean"]), expected, IN_FLOAT64)


@pytest.mark.parametrize("frozen", ["head", "embedding", "block"])
def test_with_frozen_parameters(frozen: str) -> None:
    model = Model(bias=True).double()
    model.get_submodule(frozen).requires_grad_(False)
    expected = computed(model, LOSSES["mean"])
    apply_units(model, CHUNKED)
    assert_close(computed(model, LOSSES["mean"]), expected, IN_FLOAT64)


def test_two_backward_passes_add_up() -> None:
    model = Model().double()
    expected = {name: 2 * value for name, value in computed(model, LOSSES["mean"]).items() if name != "loss"}
    apply_units(model, CHUNKED)
    model.zero_grad()
    loss = LOSSES["mean"](model(tokens()))
    loss.backward(retain_graph=True)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close(found, expected, IN_FLOAT64)


def test_ignoring_every_token_is_not_a_number_as_in_plain_training() -> None:
    model = Model().double()
    apply_units(model, CHUNKED)
    assert F.cross_entropy(model(tokens()).flatten(0, 1), torch.full((B * T,), -100)).isnan()


def test_logits_can_be_used_like_any() -> None:
    model = Model().double()
    expected = model(tokens())
    apply_units(model, CHUNKED)
    logits = model(tokens())
    assert logits.shape == expected.shape
    assert logits.size(-1) == V
    assert logits.dtype is torch.float64
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.softmax(-1)[0], expected.softmax(-1)[0])
    assert torch.equal(torch.stack([logits, logits])[1], expected)
    assert torch.equal(logits[..., :3], expected[..., :3])
    assert torch.equal(logits[0, 1, 2], expected[0, 1, 2])
    assert torch.equal(logits[..., -1], expected[..., -1])
    assert torch.equal(logits.view(torch.int64), expected.view(torch.int64))
    assert torch.equal(logits.detach().clone(), expected)
    assert logits.tolist() == expected.tolist()
    assert (logits.detach().numpy() == expected.detach().numpy()).all()
    assert "tensor(" in repr(logits)
    with torch.no_grad():
        assert torch.equal(model(tokens()), expected)
        assert LOSSES["mean"](model(tokens())).requires_grad is False


def test_a_layer_that_cannot_be_deferred_is_refused() -> None:
    model = Model()
    with pytest.raises(UnknownNameError, match="lm_head"):
        apply_units(model, Settings(micro_batch_size=B, chunked_loss=ChunkedLoss(layer="lm_head", chunks=4)))
    with pytest.raises(UsageError, match="'embedding' is not a plain"):
        apply_units(model, Settings(micro_batch_size=B, chunked_loss=ChunkedLoss(layer="embedding", chunks=4)))
    with pytest.raises(UsageError, match="at least 2"):
        ChunkedLoss(layer="head", chunks=1)
    assert "forward" not in vars(model.head)


def test_a_compiled_model_computes_its_logits_at_once() -> None:
    model = Model()
    expected = computed(model, LOSSES["mean"])
    apply_units(model, CHUNKED)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(
        computed(compiled, LOSSES["mean"]),
        {f"_orig_mod.{k}" if k != "loss" else k: v for k, v in expected.items()},
        1e-5,
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_computes_with_its_own_layer(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = Model().double()
    apply_units(model, CHUNKED)
    other = copied(model)
    expected = computed(model, LOSSES["mean"])
    model.head.weight.data.zero_()
    assert_close(computed(other, LOSSES["mean"]), expected, IN_FLOAT64)


def test_targets_of_another_number_are_refused_as_in_plain_training() -> None:
    model = Model().double()
    apply_units(model, CHUNKED)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(model(tokens()).flatten(0, 1), labels().flatten()[:-5])


@pytest.mark.parametrize(
    "used",
    [
        lambda logits: logits.to(torch.float32, non_blocking=True),
        lambda logits: logits.to(dtype=torch.float32, copy=True),
        lambda logits: logits.contiguous(memory_format=torch.contiguous_format),
        lambda logits: logits.reshape(shape=(-1, V)),
        lambda logits: logits.float(memory_format=torch.preserve_format),
    ],
)
def test_whatever_else_is_asked_of_logits_is_computed(used: Callable[[Tensor], Tensor]) -> None:
    model = Model().double()
    expected = used(model(tokens()))
    apply_units(model, CHUNKED)
    assert torch.equal(used(model(tokens())), expected)


def test_an_input_that_was_written_to_before_the_logits_are_used_is_told() -> None:
    head = nn.Linear(D, V).double()
    apply_units(head, Settings(micro_batch_size=B, chunked_loss=ChunkedLoss(layer="", chunks=4)))
    hidden = torch.randn(B, D, dtype=torch.float64)
    hidden.mul_(2)
    assert F.cross_entropy(head(hidden[:, :]), labels()[:, 0].clamp(0)).isfinite()
    logits = head(hidden)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="chunked_loss=False"):
        F.cross_entropy(logits, labels()[:, 0].clamp(0))
