"""Healthy runs of many styles: nothing is found, nothing breaks, nothing is kept alive."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from brimful.doctor import Watch, findings

WIDTH = 32


def net(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, outputs))


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for model in models for each in model.parameters()])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, WIDTH), torch.randint(0, 4, (16,))


def loss_network_in_evaluation_mode() -> None:
    model, judge = net(WIDTH), net(8).eval()
    optimizer = adam(model)
    for _ in range(8):
        optimizer.zero_grad()
        judge(model(batch()[0])).square().mean().backward()
        optimizer.step()
        judge.zero_grad()


def reentrant_checkpoints() -> None:
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    optimizer = adam(blocks)
    for _ in range(8):
        x = batch()[0].requires_grad_()
        optimizer.zero_grad()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        x.square().mean().backward()
        optimizer.step()


def forces_in_evaluation() -> None:
    model = net(1)
    optimizer = adam(model)
    for _ in range(8):
        x = batch()[0].requires_grad_()
        optimizer.zero_grad()
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        force.square().mean().backward()
        optimizer.step()
    model.eval()
    x = batch()[0].requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def generator_before_discriminator() -> None:
    generator, critic = net(WIDTH), net(1)
    first, second = adam(generator), adam(critic)
    for _ in range(8):
        made = generator(batch()[0])
        first.zero_grad()
        critic(made).mean().backward()
        first.step()
        second.zero_grad()
        (critic(batch()[0]).mean() - critic(made.detach()).mean()).backward()
        second.step()
        del made


def optimizers_in_turn() -> None:
    model = net()
    both = adam(model[0]), adam(model[2])
    for number in range(12):
        for each in both:
            each.zero_grad()
        x, y = batch()
        functional.cross_entropy(model(x), y).backward()
        both[number % 2].step()


def an_optimizer_that_steps_every_second_time() -> None:
    table, model = nn.Linear(WIDTH, WIDTH), net()
    often, seldom = adam(model), adam(table)
    for number in range(12):
        x, y = batch()
        functional.cross_entropy(model(table(x)), y).backward()
        often.step()
        often.zero_grad()
        if number % 2:
            seldom.step()
            seldom.zero_grad()


def losses_of_one_forward() -> None:
    body, head = net(WIDTH), net()
    optimizer = adam(body, head)
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        hidden = body(x)
        hidden.square().mean().backward(retain_graph=True)
        nn.utils.clip_grad_norm_(body.parameters(), 1.0)
        functional.cross_entropy(head(hidden), y).backward()
        optimizer.step()
        del hidden


def a_discriminator_that_retains_the_graph_of_the_generator() -> None:
    generator, critic = net(WIDTH), net(1)
    first, second = adam(critic), adam(generator)
    for _ in range(8):
        made = generator(batch()[0])
        first.zero_grad()
        (critic(batch()[0]).mean() - critic(made).mean()).backward(retain_graph=True)
        first.step()
        second.zero_grad()
        critic(made).mean().backward()
        second.step()
        del made


def entropy() -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        scores = model(batch()[0])
        optimizer.zero_grad()
        (scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean().backward()
        del scores
        optimizer.step()


def skipped_steps() -> None:
    model = net()
    optimizer = adam(model)
    for number in range(12):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if number not in (0, 1, 4):
            optimizer.step()


def adversarial_examples() -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        x, y = batch()
        x.requires_grad_()
        model.eval()
        functional.cross_entropy(model(x), y).backward()
        model.train()
        optimizer.zero_grad()
        assert x.grad is not None
        functional.cross_entropy(model(x.detach() + x.grad.sign()), y).backward()
        optimizer.step()


def a_perturbation_that_lasts() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = adam(model)
    change = torch.zeros(16, WIDTH, requires_grad=True)
    for _ in range(8):
        x, y = batch()
        for _ in range(4):
            functional.cross_entropy(model(x + change), y).backward()
            assert change.grad is not None
            change.data = (change + 0.01 * change.grad.sign()).detach()
            change.grad.zero_()
        optimizer.zero_grad()
        functional.cross_entropy(model(x + change.detach()), y).backward()
        optimizer.step()


def sharpness_aware_minimization() -> None:
    model = net()
    optimizer = adam(model)

    def backward(x: Tensor, y: Tensor) -> None:
        functional.cross_entropy(model(x), y).backward()

    for _ in range(8):
        x, y = batch()
        backward(x, y)
        changes = [0.05 * each.grad for each in model.parameters() if each.grad is not None]
        with torch.no_grad():
            for each, change in zip(model.parameters(), changes, strict=True):
                each += change
                each.grad = None
        backward(x, y)
        with torch.no_grad():
            for each, change in zip(model.parameters(), changes, strict=True):
                each -= change
        optimizer.step()
        optimizer.zero_grad()


def closures() -> None:
    model = net(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch()[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)


def two_forwards_of_one_backward() -> None:
    for trains in (True, False):
        model = net().train(trains)
        optimizer = adam(model)
        for _ in range(8):
            first, second = model(batch()[0]), model(batch()[0])
            optimizer.zero_grad()
            (first - second).square().mean().backward()
            optimizer.step()
            del first, second
        del model, optimizer


def episodes() -> None:
    policy = net()
    optimizer = adam(policy)
    for _ in range(6):
        results = [policy(batch()[0]).log_softmax(-1)[:, 0] for _ in range(10)]
        optimizer.zero_grad()
        torch.stack(results).mean().backward()
        optimizer.step()
        del results


def accumulated() -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        for _ in range(4):
            x, y = batch()
            (functional.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def sums_of_tasks() -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        for task in range(3):
            functional.cross_entropy(model(x + task), y, reduction="sum").backward()
        for task in range(3):
            (-model(x + task).log_softmax(-1)[:, 0].sum()).backward()
        optimizer.step()


def divided_by_the_tokens_of_a_step() -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        batches = [batch() for _ in range(4)]
        tokens = torch.stack([y != 0 for _, y in batches]).sum()
        for x, y in batches:
            (functional.cross_entropy(model(x), y, ignore_index=0, reduction="sum") / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_batch_norm() -> None:
    norm = nn.BatchNorm1d(WIDTH).eval()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.GELU()) for _ in range(4)))
    optimizer = adam(model)
    for _ in range(8):
        for _ in range(4):
            x, y = batch()
            for each in model:
                x = checkpoint(each, x, use_reentrant=False)
            (functional.cross_entropy(x, y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def critics_with_a_gradient_penalty() -> None:
    generator, critic = net(WIDTH), net(1)
    of_generator, of_critic = adam(generator), adam(critic)
    for _ in range(6):
        for _ in range(3):
            real = batch()[0]
            with torch.no_grad():
                made = generator(batch()[0])
            between = (real + made).requires_grad_()
            (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            of_critic.zero_grad()
            (critic(made).mean() - critic(real).mean() + (slopes.norm(dim=1) - 1).square().mean()).backward()
            of_critic.step()
            del slopes
        of_generator.zero_grad()
        (-critic(generator(batch()[0])).mean()).backward()
        of_generator.step()


def line_searches() -> None:
    model = net(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    x = batch()[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


def shared_checkpoints() -> None:
    block = nn.Linear(WIDTH, WIDTH)
    optimizer = adam(block)
    for _ in range(8):
        x = batch()[0].requires_grad_()
        optimizer.zero_grad()
        for use_reentrant in (False, True, False):
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x.square().mean().backward()
        optimizer.step()


def a_step_that_is_skipped() -> None:
    model = net()
    optimizer = adam(model)
    for number in range(12):
        x, y = batch()
        loss = functional.cross_entropy(model(x), y)
        if number in (6, 10):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def a_recorded_step_that_is_skipped() -> None:
    model = net()
    optimizer = adam(model)
    for number in range(8):
        x, y = batch()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if number == 1:
            continue
        loss.backward()
        optimizer.step()


def a_forward_that_makes_the_layers() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(4))
    model(batch()[0])
    optimizer = adam(model)
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def sparse_gradients() -> None:
    table = nn.Embedding(100, WIDTH, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    for _ in range(8):
        optimizer.zero_grad()
        table(torch.randint(0, 100, (16,))).square().mean().backward()
        optimizer.step()


def sparse_variable() -> None:
    adjacency = torch.eye(16).to_sparse()
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        optimizer.zero_grad()
        torch.sparse.mm(adjacency, model(batch()[0])).square().mean().backward()
        optimizer.step()


def hooks_of_the_script() -> None:
    model = net()
    optimizer = adam(model)
    steps = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    for _ in range(12):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    handle.remove()
    assert len(steps) == 12


def bounded_buffer() -> None:
    model = net()
    optimizer = adam(model)
    buffer = deque[Tensor](maxlen=100)
    for _ in range(8):
        x, y = batch()
        buffer.append(x)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def losses_without_graphs_in_a_list() -> None:
    model, losses = net(), []
    optimizer = adam(model)
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())


def state_of_a_second_model() -> None:
    generator, critic = net(WIDTH), net(1)
    state = generator.state_dict()
    both = adam(generator), adam(critic)
    for _ in range(8):
        with torch.no_grad():
            made = generator(batch()[0])
        both[1].zero_grad()
        (critic(made).mean() - critic(batch()[0]).mean()).backward()
        both[1].step()
        both[0].zero_grad()
        (-critic(generator(batch()[0])).mean()).backward()
        both[0].step()
        del made
    assert state


def gradients_of_each_sample() -> None:
    model = net()
    optimizer = adam(model)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    for _ in range(8):
        weights = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, *batch())
        for name, each in model.named_parameters():
            each.grad = found[name].mean(0)
        optimizer.step()


def an_export_between_steps() -> None:
    model = net()
    optimizer = adam(model)
    for number in range(8):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 1:
            torch.export.export(model, (x,))


def variables_as_a_dict() -> None:
    width = 3
    options = locals()
    model = net()
    optimizer = adam(model)
    for _ in range(4):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (
        json.dumps({name: value for name, value in options.items() if name == "width"})
        == f'{{"width": {width}}}'
    )
    assert "model" not in options


def memory_that_ran_out_and_was_caught() -> None:
    model = net()
    optimizer = adam(model)
    for number in range(8):
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if number == 1:
            with pytest.raises(RuntimeError):
                torch.empty(1 << 50)
        optimizer.step()


HEALTHY: list[Callable[[], None]] = [
    reentrant_checkpoints,
    generator_before_discriminator,
    optimizers_in_turn,
    an_optimizer_that_steps_every_second_time,
    losses_of_one_forward,
    a_discriminator_that_retains_the_graph_of_the_generator,
    entropy,
    skipped_steps,
    adversarial_examples,
    a_perturbation_that_lasts,
    sharpness_aware_minimization,
    closures,
    two_forwards_of_one_backward,
    episodes,
    accumulated,
    sums_of_tasks,
    divided_by_the_tokens_of_a_step,
    frozen_batch_norm,
    critics_with_a_gradient_penalty,
    line_searches,
    shared_checkpoints,
    a_step_that_is_skipped,
    a_recorded_step_that_is_skipped,
    a_forward_that_makes_the_layers,
    sparse_gradients,
    sparse_variable,
    hooks_of_the_script,
    bounded_buffer,
    losses_without_graphs_in_a_list,
    state_of_a_second_model,
    gradients_of_each_sample,
    an_export_between_steps,
    variables_as_a_dict,
    memory_that_ran_out_and_was_caught,
]


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
def test_a_healthy_run_has_no_findings(run: Callable[[], None]) -> None:
    assert checks_of(run) == []


def test_backward_through_a_model_in_evaluation_mode_uses_its_graph() -> None:
    """Its own gradients are unused, and the last bias has none."""
    assert checks_of(loss_network_in_evaluation_mode) == ["not-optimized"]
    assert checks_of(forces_in_evaluation) == ["without-gradient"]


def checks_of(run: Callable[[], None]) -> list[str]:
    torch.manual_seed(0)
    with Watch() as watch:
        run()
    evidence = watch.evidence()
    assert evidence.steps
    assert not evidence.error
    assert evidence.failed is None
    return [each.check for each in findings(evidence)]


def test_weights_are_those_of_a_run_that_is_not_watched() -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(net(WIDTH), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH))
        optimizer = adam(model)
        for _ in range(8):
            optimizer.zero_grad()
            model(batch()[0]).square().mean().backward()
            optimizer.step()
        return [each.detach().clone() for each in model.state_dict().values()]

    alone = trained()
    with Watch():
        watched = trained()
    assert all(map(torch.equal, alone, watched))


def test_nothing_is_kept_alive() -> None:
    kept: list[weakref.ref[object]] = []

    def trained() -> None:
        model = net()
        optimizer = adam(model)
        for _ in range(5):
            scores = model(batch()[0])
            optimizer.zero_grad()
            scores.square().mean().backward()
            optimizer.step()
            kept.append(weakref.ref(scores))
            del scores
            assert kept[-1]() is None
        kept.extend([weakref.ref(model), weakref.ref(optimizer)])

    with Watch() as watch:
        trained()
        gc.collect()
        assert all(each() is None for each in kept)
    assert len(watch.evidence().steps) == 3


def test_an_error_of_watching_ends_recording_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("brimful.doctor.watch.held_by_names", broken)
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = adam(model)
    with Watch() as watch:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()[0]).square().mean().backward()
            optimizer.step()
    assert watch.evidence().error == "ValueError: broken"
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
