from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

import brimful as bf
from brimful.capture import capture_step
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Settings
from brimful.torch_utils.module_names import plain_modules, plain_namer, plain_state, unwrapped, wrapped_state
from brimful.transforms import apply_units
from helpers.captured_jobs import CPU
from helpers.trained_alike import mean_square, recomputing, saved_bytes, train

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler reads it


class Net(nn.Module):
    """With a submodule that is called as wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(x)
        for block in self.blocks:
            x = block(x)
        return x


class _FabricModule(nn.Module):
    """What `lightning.fabric.wrappers._FabricModule` is to names (lightning 2.6)."""

    def __init__(self, model: nn.Module, original: nn.Module | None = None) -> None:
        super().__init__()
        self._forward_module = model
        self._original_module = original or model

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)

    def load_state_dict(self, state: Any, strict: bool = True, **options: Any) -> Any:
        return self._original_module.load_state_dict(state, strict, **options)


_FabricModule.__module__ = "lightning.fabric.wrappers"


class Holder(nn.Module):
    """A user's module, which wraps another under a wrapper's name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def with_compiled_blocks(model: nn.Module) -> nn.Module:
    assert isinstance(model, Net)
    for name, block in model.blocks.named_children():
        model.blocks[int(name)] = compiled(block)
    return model


def with_a_compiled_sequential(model: nn.Module) -> nn.Module:
    model.module = compiled(model.module)  # type: ignore[assignment, arg-type]
    return model


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    compiled,
    with_compiled_blocks,
    with_a_compiled_sequential,
    DistributedDataParallel,
    DataParallel,
    _FabricModule,
    lambda model: compiled(with_compiled_blocks(model)),
    lambda model: DistributedDataParallel(compiled(model)),
    lambda model: _FabricModule(DistributedDataParallel(model), model),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_modules_parameters_and_state_have_the_names_of_the_model_alone(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    plain = Net()
    wrapped = wrap(copy.deepcopy(plain))
    name = plain_namer(wrapped)
    assert list(plain_modules(wrapped)) == [path for path, _ in plain.named_modules()]
    assert {name(each) for each, _ in wrapped.named_parameters()} == {n for n, _ in plain.named_parameters()}
    assert list(plain_state(wrapped)) == list(plain.state_dict())
    wrapped.load_state_dict(wrapped_state(wrapped, plain.state_dict()))
    wrapped.load_state_dict(wrapped_state(wrapped, wrapped.state_dict()))
    assert unwrapped(wrapped).__class__ is Net


def test_a_submodule_that_a_user_calls_as_wrappers_do_keeps_its_name() -> None:
    model = Holder(Net())
    assert list(plain_modules(model)) == [path for path, _ in model.named_modules()]
    assert plain_state(model).keys() == model.state_dict().keys()
    assert unwrapped(model) is model
    name = plain_namer(DistributedDataParallel(model))
    assert name("module._orig_mod.module.0.weight") == "_orig_mod.module.0.weight"


def test_a_module_that_checkpoints_itself_by_a_wrapper_keeps_its_name() -> None:
    model = Net()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    assert list(plain_state(model)) == list(Net().state_dict())


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("units", [("module", "blocks.1"), ("module[0..2]", "blocks.0")])
def test_a_plan_for_the_model_alone_is_applied_to_a_wrapped_one(
    wrap: Callable[[nn.Module], nn.Module], units: tuple[str, ...]
) -> None:
    plain = Net()
    wrapped = wrap(copy.deepcopy(plain))
    batches = [torch.randn(4, 8) for _ in range(2)]
    with saved_bytes() as kept:
        wrapped(batches[0])
    applied = apply_units(wrapped, recomputing(*units))
    with saved_bytes() as recomputed:
        wrapped(batches[0])
    assert recomputed.total_bytes < kept.total_bytes
    expected, name = train(plain, batches), plain_namer(wrapped)
    for before, after in zip(expected, train(wrapped, batches), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before.losses, after.losses, strict=True))
        gradients = {name(key): value for key, value in after.gradients.items()}
        assert gradients.keys() == before.gradients.keys()
        assert all(torch.equal(before.gradients[key], gradients[key]) for key in gradients)
    applied.remove()


def test_a_plan_for_a_wrapped_model_is_applied_to_the_model_alone() -> None:
    plain = Net()
    applied = apply_units(plain, recomputing("_orig_mod.blocks.0", "_forward_module.module.module[0..1]"))
    assert "forward" in plain.blocks[0].__dict__
    assert "forward" in plain.module.__dict__
    applied.remove()
    wrapped = compiled(Net())
    apply_units(wrapped, recomputing("_orig_mod.blocks.0"))
    with pytest.raises(UsageError, match=r"'blocks\.0' is recomputed already"):
        apply_units(wrapped, recomputing("blocks.0"))


def test_a_whole_plan_holds_for_a_compiled_model() -> None:
    plain: nn.Sequential = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4))
    )

    def job(model: nn.Module) -> bf.Job:
        return bf.Job(model=model, loss=mean_square, batch=lambda samples: torch.randn(samples, 16))

    plan = bf.plan(job(plain), "cpu", global_batch_size=256, budget="70%", micro_batch_size=256)
    assert plan.settings.changed
    for wrap in (compiled, lambda model: nn.Sequential(*map(compiled, model))):
        model = wrap(copy.deepcopy(plain))
        assert plan.check(job(model)).fits
        assert bf.verify(job(model), plan, "cpu").holds
        step = bf.apply(plan, job(model), model, torch.optim.SGD(model.parameters(), lr=0.1))
        reference = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        batch = torch.randn(256, 16)
        loss = mean_square(reference, batch)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(batch).loss, loss)
        assert all(map(torch.equal, reference.parameters(), model.parameters()))
        step.remove()
        captured, expected = (capture_step(job(each), plan.settings, CPU) for each in (model, plain))
        assert captured.ops == expected.ops


def test_an_unknown_unit_is_told_with_few_names_and_no_empty_one() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(200)))
    with pytest.raises(UnknownNameError) as raised:
        apply_units(compiled(model), recomputing("encoder"))
    assert str(raised.value) == (
        "unknown unit 'encoder'. Known: 0, 1, 10, 100, 101, 102, … (200 in all). "
        "The plan was made for another model."
    )


def test_weights_of_a_compiled_model_are_written_and_read_without_the_wrapper(tmp_path: Path) -> None:
    rows = torch.randn(8, 8)
    job = bf.Job(
        model=lambda: with_compiled_blocks(Net()),
        loss=mean_square,
        batch=lambda samples: torch.randn(samples, 8),
        data=lambda: bf.Data(train=rows),
    )
    bf.fit(job, Settings(micro_batch_size=4), run_dir=tmp_path / "run", epochs=1, show_progress=False)
    file = tmp_path / "run" / "weights.safetensors"
    with safe_open(file, framework="pt") as written:
        assert set(written.keys()) == set(Net().state_dict())
    plain, wrapped = Net(), compiled(with_compiled_blocks(Net()))
    for model in (plain, wrapped):
        bf.trainer.load_weights(model, file)
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))
    save_file({f"_orig_mod.{name}": value for name, value in plain.state_dict().items()}, tmp_path / "other")
    other = Net()
    bf.trainer.load_weights(other, tmp_path / "other")
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_a_run_of_a_compiled_model_is_resumed_by_the_model_alone(tmp_path: Path) -> None:
    rows = torch.randn(8, 8)

    def losses(
        build: Callable[[], nn.Module], where: Path, *, epochs: int, resume: bool = False
    ) -> list[float]:
        job = bf.Job(
            model=build,
            loss=mean_square,
            batch=lambda samples: torch.randn(samples, 8),
            data=lambda: bf.Data(train=rows),
        )
        result, _ = bf.fit(
            job, Settings(micro_batch_size=4), run_dir=where, epochs=epochs, resume=resume, show_progress=False
        )
        return [record.loss for record in result.steps]

    undisturbed = losses(Net, tmp_path / "whole", epochs=2)
    losses(lambda: compiled(Net()), tmp_path / "run", epochs=1)
    resumed = losses(Net, tmp_path / "run", epochs=2, resume=True)
    assert resumed[-2:] == undisturbed[-2:]
