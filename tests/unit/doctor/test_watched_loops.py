"""Loops of many kinds are watched rightly: what they compute, what they hold, and nothing false."""

from __future__ import annotations

import linecache
import re
import runpy
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import _get_current_dispatch_mode

import brimful as bf
from brimful.doctor import Watch, recording, watched_document, watched_text
from brimful.doctor.evidence import Evidence
from brimful.doctor.findings import findings
from brimful.torch_utils.graphs import grad_fn_of, scaling_of
from brimful.torch_utils.held_names import held_by_names
from brimful.torch_utils.lines import shown_file
from brimful.trace import Category, Phase

WIDTH = 32


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 4))


def watched(step: Callable[[int], object], steps: int = 6, **options: Any) -> Evidence:
    with Watch(**options) as watch:
        for index in range(steps):
            step(index)
    return watch.evidence()


def checks_of(evidence: Evidence) -> list[str]:
    assert evidence.error == ""
    return [each.check for each in findings(evidence)]


def test_forward_and_backward_in_a_closure_have_their_own_phases() -> None:
    model, x = net(), torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    evidence = watched(lambda _: optimizer.step(closure))
    products = [op for op in evidence.trace.ops if op.name == "aten.addmm.default"]
    assert {op.phase for op in products} == {Phase.FORWARD}
    assert {op.module for op in products} == {"0", "2"}
    assert watched_document(evidence)["categories"]["saved_tensors"] >= 256 * 4 * WIDTH * 4
    assert any(op.phase is Phase.OPTIMIZER for op in evidence.trace.ops)


def test_optimizers_may_step_in_backward() -> None:
    """Recording ends in a backward, which restores the modes that it began with."""
    model, x = net(), torch.randn(8, WIDTH)
    optimizers = {each: torch.optim.SGD([each], 1e-3) for each in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    evidence = watched(lambda _: model(x).square().mean().backward())
    assert (len(evidence.steps), checks_of(evidence)) == (3, [])
    assert _get_current_dispatch_mode() is None


def test_keyword_arguments_of_a_model_are_inputs() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, *, x: Tensor) -> Tensor:
            return self.body(x).mean()  # type: ignore[no-any-return]

    model = ByName()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(index: int) -> None:
        x = torch.randn(64, 1 + index, WIDTH)
        model(x=x).backward()
        optimizer.step()
        optimizer.zero_grad()

    evidence = watched(step)
    assert evidence.input_shapes == 3
    assert watched_document(evidence)["categories"]["inputs"] == 64 * 3 * WIDTH * 4


def test_code_that_is_compiled_after_the_recorded_steps_runs_as_alone() -> None:
    model, x = net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Watch() as watch:
        for _ in range(4):
            model(x).mean().backward()
            optimizer.step()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
    assert watch.evidence().error == ""


def test_steps_that_no_optimizer_takes_are_recorded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MOST_OPS", 50)
    model, x = net(), torch.randn(8, WIDTH)

    def step(_index: int) -> None:
        model(x).mean().backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 1e-3 * each.grad  # type: ignore[operator]
                each.grad = None

    with Watch() as watch:
        for index in range(20):
            step(index)
        assert _get_current_dispatch_mode() is None
    assert len(watch.evidence().trace.ops) == 50
    assert "note" in watched_text(watch.evidence())
    assert "recording ended, as too many ops" in watched_text(watch.evidence())


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_models_have_their_categories_and_no_false_finding() -> None:
    model, x = net(), torch.randn(8, WIDTH)
    size_bytes = sum(each.nbytes for each in model.parameters())
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_index: int) -> None:
        for _ in range(2):
            (model(x).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    evidence = watched(step)
    assert checks_of(evidence) == []
    assert evidence.notes
    categories = watched_document(evidence)["categories"]
    assert categories["parameters"] >= size_bytes
    assert categories["optimizer_state"] >= 2 * size_bytes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("as_views", [False, True])
def test_buckets_of_ddp_are_no_saved_tensors_which_smaller_micro_batches_would_halve(*, as_views: bool) -> None:
    def seen(wrap: Callable[[nn.Module], nn.Module]) -> Evidence:
        model, x = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 16)), torch.randn(256, 512)
        called = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step(_index: int) -> None:
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()

        return watched(step)

    alone, of_rank = seen(lambda model: model), seen(lambda model: DDP(model, gradient_as_bucket_view=as_views))
    size_bytes = 4 * (512 * 1024 + 1024 + 1024 * 16 + 16)
    buckets = {each.category for each in of_rank.trace.storages if each.label == "DDP bucket"}
    assert buckets == {Category.GRADIENTS if as_views else Category.OTHER_TENSORS}
    before, after = watched_document(alone)["categories"], watched_document(of_rank)["categories"]
    assert after["saved_tensors"] == before["saved_tensors"]
    assert after["gradients"] == size_bytes
    assert after["other_tensors"] == before["other_tensors"] + (0 if as_views else size_bytes)
    assert checks_of(of_rank) == []


def test_a_scaler_reads_what_no_line_of_the_script_reads() -> None:
    model, x = net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step(_index: int) -> None:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert watched(step).host_reads == {}


def test_a_gradient_penalty_does_not_recompute_normalisations() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        inputs = x.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        slopes.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert "batch-norm-recomputed" not in checks_of(watched(step))


def test_optimizers_from_before_and_master_weights_use_gradients() -> None:
    model, x = net(), torch.randn(8, WIDTH)
    first = torch.optim.SGD(model[0].parameters(), 1e-3)
    seldom = torch.optim.SGD(model[2].parameters(), 1e-3)

    def step(index: int) -> None:
        model(x).mean().backward()
        first.step()
        if index == 5:
            seldom.step()
        model.zero_grad()

    assert "not-optimized" not in checks_of(watched(step))

    masters = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(masters, 1e-3)

    def step_of_masters(_index: int) -> None:
        model(x).mean().backward()
        for master, each in zip(masters, model.parameters(), strict=True):
            master.grad = each.grad
        optimizer.step()
        model.load_state_dict(dict(zip(model.state_dict(), masters, strict=True)))
        model.zero_grad()

    assert "not-optimized" not in checks_of(watched(step_of_masters))


def test_gradients_of_torch_func_are_watched() -> None:
    model, x = net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).mean()  # type: ignore[no-any-return]

    def step(_index: int) -> None:
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        for name, each in model.named_parameters():
            each.grad = found[name].mean(0)
        optimizer.step()

    assert watched(step).error == ""


def test_values_of_the_user_are_not_run() -> None:
    class Loads(UserDict[str, Tensor]):
        def values(self) -> Any:
            raise AssertionError("this may load a file")

    lazy = [Loads(a=torch.ones(2)), torch.ones(4)]
    found = held_by_names(__import__("sys")._getframe(), 0)
    assert (found["lazy"].count, found["lazy"].size_bytes) == (1, 16)
    assert lazy


def test_the_line_of_a_name_may_be_the_last_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\nfrom brimful.torch_utils.held_names import held_by_names\ntotal = torch.ones(1)\n"
        "for _ in range(2):\n    found = held_by_names(sys._getframe(), 0)\n    total += 1\n"
    )
    assert runpy.run_path(str(tmp_path / "train.py"))["found"]["total"].line.endswith("train.py:6")


def test_the_sum_of_many_paths_is_looked_through_once() -> None:
    loss = torch.ones(4, 1, requires_grad=True) * 2
    for _ in range(200):
        loss = loss + loss.mean(0, keepdim=True)
    assert scaling_of(loss.sum()) == (True, set())


def test_a_view_whose_base_has_changed_has_no_known_maker() -> None:
    base = torch.ones(2, 2, requires_grad=True) * 1
    with torch.no_grad():
        view = base[0]
    base.mul_(2)
    assert grad_fn_of(view) is None


def test_lines_are_found_from_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert shown_file("/elsewhere/train.py") == "/elsewhere/train.py"


def test_memory_that_runs_out_over_an_empty_input_is_explained() -> None:
    model = net()

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            model(x)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99999999999999.99 EiB.")

    with pytest.raises(torch.OutOfMemoryError) as raised, bf.explain_out_of_memory():
        Fails()(torch.randn(8, WIDTH)[:0])
    (note,) = raised.value.__notes__
    assert "could not find" not in note


def test_samples_are_those_of_arguments_not_of_variables() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> Tensor:
            positions, mask = torch.arange(128), torch.ones(128, 128)
            self.body(x)
            raise torch.OutOfMemoryError(f"CUDA out of memory. {positions.numel()} {mask.numel()}")

    with pytest.raises(torch.OutOfMemoryError) as raised, bf.explain_out_of_memory():
        Positions()(torch.randn(8, WIDTH))
    assert "128" not in raised.value.__notes__[0].partition("what to change")[2]


def test_what_an_evaluation_between_recorded_steps_leaves_is_counted_and_found() -> None:
    model, x = net(), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    results = list[Tensor]()

    def epoch(_index: int) -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            for _ in range(20):
                results.append(model(x))
            model.train()

    evidence = watched(epoch, steps=3)
    assert [each.name for each in evidence.gathered] == ["results"]
    assert watched_document(evidence)["peak_bytes"] >= 40 * 64 * 4 * 4
    assert "its peak may be higher" in watched_text(evidence)
    assert results


def test_what_autograd_saves_is_so_called_though_a_variable_holds_it_longer() -> None:
    model, x = nn.Linear(WIDTH, 8 * WIDTH), torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    sizes = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def step(_index: int) -> None:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each) if packs else nullcontext():
            chances = model(x).softmax(-1)
            loss = (chances * chances).log().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert chances.requires_grad

    packs = False
    evidence = watched(step)
    packs = True
    step(0)
    held_bytes = watched_document(evidence)["categories"]["saved_tensors"]
    # A scalar of backward is one too.
    assert 0 <= held_bytes - (sum(sizes.values()) - x.nbytes) < 16


@pytest.mark.parametrize("are_slices", [True, False])
def test_an_evaluation_after_the_watched_steps_saves_no_data_of_which_it_takes_slices(are_slices: bool) -> None:
    model, samples, batches = net(), 256, 10
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    whole = torch.randn(samples * batches, WIDTH)
    with Watch() as watch:
        for _ in range(8):
            model(whole[:samples]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        kept = [model(each if are_slices else each.clone()) for each in whole.split(samples)]
        torch.cat(kept)
    (found,) = findings(watch.evidence())
    of_inputs = 0 if are_slices else WIDTH
    saved_bytes = batches * samples * (of_inputs + 4 * WIDTH) * 4  # what ReLU returns, for two layers
    assert (found.check, found.size_bytes) == ("evaluation-with-gradients", saved_bytes)


def test_all_graphs_of_an_evaluation_that_a_list_keeps_are_at_stake() -> None:
    """They are found where the evaluation calls what training calls too; micro-batches change them nowhere."""
    model, x = net(), torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def scores() -> Tensor:
        return model(x).softmax(-1)  # type: ignore[no-any-return]

    def step(_index: int) -> None:
        scores().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        kept = [scores() for _ in range(10)]  # the evaluation
        torch.cat(kept)
        model.train()

    evidence = watched(step)
    (found,) = findings(evidence)
    assert (found.check, found.size_bytes) == ("evaluation-with-gradients", 10 * 256 * (4 * WIDTH + 4) * 4)
    assert found.line.endswith(f":{step.__code__.co_firstlineno + 5}")
    document = watched_document(evidence)
    assert document["peak_phase"] == "evaluation"
    assert document["categories"]["saved_tensors"] >= 10 * 256 * 4 * WIDTH * 4
    assert document["savings"] == []


def test_graphs_beside_those_of_the_step_are_none_that_micro_batches_change() -> None:
    model, x = net(), torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        kept = [model(x) for _ in range(10)]
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert kept

    document = watched_document(watched(step))
    of_step_bytes = 256 * 3 * 4 * WIDTH * 4  # ReLU and its gradient, in and out
    assert document["peak_phase"] == "backward"
    assert all(each["size_bytes"] <= of_step_bytes // 2 + x.nbytes for each in document["savings"])
    (found,) = document["findings"]
    assert found["size_bytes"] >= 10 * 256 * 4 * WIDTH * 4


@pytest.mark.parametrize("trains", [False, True])
def test_forwards_alone_that_build_graphs_are_found(*, trains: bool) -> None:
    model = net().train(trains)
    with Watch() as watch:
        for _ in range(3):
            y = model(torch.randn(256, WIDTH))
    assert y.requires_grad
    evidence = watch.evidence()
    assert checks_of(evidence) == ["graph-unused" if trains else "evaluation-with-gradients"]
    document = watched_document(evidence)
    assert document["savings"] == []
    assert document["categories"]["parameters"] == sum(each.nbytes for each in model.parameters())
    assert "no optimizer of torch.optim stepped" in watched_text(evidence).replace("\n    ", " ")


def test_a_forward_that_is_watched_alone_may_be_one_of_training() -> None:
    model = net()
    with Watch() as watch:
        loss = model(torch.randn(256, WIDTH)).mean()
    loss.backward()
    assert checks_of(watch.evidence()) == []


def test_a_run_without_tensors_or_models_says_what_to_watch() -> None:
    weights = torch.ones(4, requires_grad=True)
    with Watch() as watch:
        pass
    assert "with brimful.watch():" in watched_text(watch.evidence())
    optimizer = torch.optim.SGD([weights], 1e-3)

    def step(_index: int) -> None:
        weights.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert checks_of(watched(step)) == []


@pytest.mark.parametrize("passes_on", [False, True])
def test_a_teacher_with_gradients_is_named_where_it_is_called(*, passes_on: bool) -> None:
    student, teacher = nn.Linear(WIDTH, WIDTH), net().eval()
    optimizer = torch.optim.SGD(student.parameters(), 1e-3)

    def step(_index: int) -> None:
        x = torch.randn(256, WIDTH)
        y = student(x)
        t = teacher(y if passes_on else x)
        (t.mean() - y.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.zero_grad()

    (found,) = (each for each in findings(watched(step)) if each.check == "not-optimized")
    assert found.line.endswith(f":{step.__code__.co_firstlineno + 3}")
    assert found.what.startswith("teacher gets gradients")
    assert found.change.startswith("teacher.requires_grad_" if passes_on else "torch.no_grad()")
    gradient_bytes = sum(each.nbytes for each in teacher.parameters())
    assert found.size_bytes == gradient_bytes + (0 if passes_on else 256 * (4 * WIDTH + 4) * 4)  # and t


def test_what_a_model_without_submodules_holds_is_listed_beside_other_models() -> None:
    model, head = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 1e-3)

    def step(_index: int) -> None:
        head(model(torch.randn(64, 32, WIDTH))[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    text = watched_text(watched(step)).partition("by module")[2]
    assert "model (LSTM)" in text


def test_further_models_are_named_by_the_variables_that_hold_them() -> None:
    class Distillation:
        def __init__(self) -> None:
            self.student, self.teacher = net(), net().requires_grad_(False)

        def loss(self, x: Tensor) -> Tensor:
            return (self.student(x) - self.teacher(x)).square().mean()

    task, critic = Distillation(), nn.Sequential(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD([*task.student.parameters(), *critic.parameters()], 1e-3)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()  # type: ignore[no-any-return]

    def step(_index: int) -> None:
        x = torch.randn(8, WIDTH)
        (task.loss(x) + loss_of(critic, x)).backward()
        optimizer.step()

    evidence = watched(step)
    paths = {path.partition(".")[0] for path, _ in evidence.trace.module_classes}
    assert paths == {"student", "teacher", "critic"}
    assert [*evidence.untrained_bytes] == ["teacher"]


@pytest.mark.parametrize("others", [0, 1])
def test_the_first_of_several_models_is_named_too_though_the_others_come_later(others: int) -> None:
    generator = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    critic, loss_of = nn.Linear(4, 1), nn.MSELoss()
    optimizer = torch.optim.AdamW([*generator.parameters(), *critic.parameters()], 1e-3)

    def step(index: int) -> None:
        made = generator(torch.randn(8, WIDTH))
        if others and index:
            critic(made).mean().backward()
        else:
            loss_of(made, torch.zeros(8, 4)).backward()
        optimizer.step()

    trace = watched(step).trace
    prefix = "generator." if others else ""
    modules = {op.module for op in trace.ops if op.name == "aten.native_batch_norm.default"}
    assert modules == {f"{prefix}1"}
    labels = {(each.category, each.label) for each in trace.storages}
    for name in ("0.weight", "2.bias"):
        assert (Category.GRADIENTS, f"{prefix}{name}") in labels
        assert (Category.OPTIMIZER_STATE, f'{prefix}{name} ["exp_avg"]') in labels
        assert not others or (Category.GRADIENTS, name) not in labels
    assert ("critic" in dict(trace.module_classes)) == bool(others)


def test_a_model_that_steps_less_often_is_trained() -> None:
    generator, critic, x = net(), net(), torch.randn(512, WIDTH)
    often = torch.optim.SGD(critic.parameters(), 1e-3)
    seldom = torch.optim.SGD(generator.parameters(), 1e-3)

    def step(index: int) -> None:
        (critic(x).mean() - generator(x).detach().mean()).backward()
        often.step()
        critic.zero_grad()
        if index == 5:
            generator(x).mean().backward()
            seldom.step()

    assert "untrained-model" not in checks_of(watched(step))


def test_results_that_a_list_keeps_are_to_be_numbers_or_on_the_host() -> None:
    model, x, kept = net(), torch.randn(256, WIDTH), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        scores = model(x)
        scores.mean().backward()
        optimizer.step()
        kept.append(scores)

    (found,) = (each for each in findings(watched(step)) if each.check == "history-kept")
    assert ".detach().cpu()" in found.change
    assert kept


class Later:
    """Has a tensor for later."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def read(self) -> Tensor:
        return self.value


def in_a_cell(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


KEEPING: dict[str, Callable[[Tensor], Any]] = {
    "default": lambda loss: lambda value=loss: value,
    "keyword default": lambda loss: lambda *, value=loss: value,
    "cell": in_a_cell,
    "partial": lambda loss: partial(print, loss),
    "named argument of a partial": lambda loss: partial(print, end=[loss]),
    "method of an object": lambda loss: Later(loss).read,
    "method of a tensor": lambda loss: loss.item,
    "function in a function": lambda loss: partial(in_a_cell(loss)),
}
"""Functions that keep a loss, by how."""


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("how", KEEPING)
def test_what_functions_in_a_list_keep_is_found(how: str, *, keeps: bool) -> None:
    model, x, kept = net(), torch.randn(256, WIDTH), list[Callable[[], object]]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(KEEPING[how](loss if keeps else loss.detach()))

    assert checks_of(watched(step)) == ["history-kept"] * keeps
    assert kept


def test_functions_that_share_a_tensor_or_a_list_with_a_name_hold_no_more_of_it() -> None:
    model, x = net(), torch.randn(256, WIDTH)
    seen, calls = list[Tensor](), list[Callable[[], object]]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seen.append(torch.randn(256, WIDTH))
        calls.extend([lambda: (x, seen, calls), x.sum, optimizer.step, model.forward])

    (found,) = findings(watched(step))
    assert (found.check, found.what.partition(" ")[0]) == ("container-grows", "seen")


def test_what_an_object_of_a_trainer_keeps_is_found() -> None:
    class Meter:
        sum: Tensor | int = 0

        def update(self, value: Tensor) -> None:
            self.sum = self.sum + value

    class OwnTrainer:
        def __init__(self) -> None:
            self.model, self.meter = net(), Meter()
            self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

        def step(self, _index: int) -> None:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.meter.update(loss)

    trainer = OwnTrainer()  # a second name
    (found,) = findings(watched(trainer.step))
    assert found.check == "history-kept"
    assert found.what.startswith("self.meter.sum keeps the graphs")
    assert linecache.getline(__file__, int(found.line.split(":")[1])).strip() == "self.sum = self.sum + value"


@pytest.mark.parametrize("levels", [2, 3])
def test_growth_that_no_name_explains_has_a_note(levels: int) -> None:
    class Holder:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    model, holder = net(), Holder([])
    optimizer, add = torch.optim.SGD(model.parameters(), 1e-3), holder.inner.append
    for _ in range(levels - 1):
        holder = Holder(holder)

    def step(_index: int) -> None:
        model(torch.randn(8, WIDTH)).mean().backward()
        optimizer.step()
        add(torch.ones(4))

    notes = watched(step).notes
    assert any("no name that was looked at keeps more" in each for each in notes) == (levels == 3)


def test_results_of_earlier_steps_are_named_where_memory_runs_out() -> None:
    model, x, kept = net(), torch.randn(256, WIDTH), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loop() -> None:
        for step in range(5):
            scores = model(x)
            if step == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")
            scores.mean().backward()
            optimizer.step()
            kept.append(scores)

    with pytest.raises(torch.OutOfMemoryError) as raised, bf.explain_out_of_memory():
        loop()
    note = raised.value.__notes__[0]
    line = loop.__code__.co_firstlineno + 7
    assert re.search(rf"in kept \(.*test_watched_loops.py:{line}\), which has 4 results of earlier steps", note)


def test_on_a_machine_with_a_gpu_a_model_on_the_host_is_watched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    model, x = net(), torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_index: int) -> None:
        model(x).mean().backward()
        optimizer.step()

    evidence = watched(step)
    assert evidence.trace.device_kind == "cpu"
    categories = watched_document(evidence)["categories"]
    assert categories["parameters"] == sum(each.nbytes for each in model.parameters())
    assert evidence.step_seconds is not None


def test_what_is_there_beside_the_model_is_counted() -> None:
    beside = torch.ones(1 << 18)

    with Watch() as watch:
        made = torch.ones(1 << 18)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(3):
            model(torch.randn(8, WIDTH)).mean().backward()
            optimizer.step()
    assert watched_document(watch.evidence())["categories"]["other_tensors"] == 1 << 20
    assert made.numel() == beside.numel()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_free_memory_is_within_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (used + (1 << 20), -1))
    with pytest.raises(torch.OutOfMemoryError) as raised, bf.explain_out_of_memory():
        raise torch.OutOfMemoryError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: you tried to allocate 8 bytes"
        )
    (free,) = re.findall(r"free +([\d.]+ \w+)", raised.value.__notes__[0])
    assert free.endswith(("KiB", "MiB", " B"))
