"""Reinforcement learning's losses, on what was collected before."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.generative import unused
from job_zoo.parts import conv, mlp


class ActorCritic(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.trunk = mlp(16, width, width, width, act=nn.Tanh)
        self.actor, self.critic = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        h = self.trunk(x).tanh()
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


def steps_taken(n: int) -> dict[str, Tensor]:
    return {
        "state": torch.randn(n, 16),
        "action": torch.randint(0, 4, (n,)),
        "log_p": -torch.rand(n) - 1,
        "advantage": torch.randn(n),
        "return": torch.randn(n),
    }


@job_case(2048)
def policy_gradient_weighted_by_advantages() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        policy, value = model(batch["state"])
        gain = policy.log_prob(batch["action"]) * batch["advantage"]
        return -(gain + 0.01 * policy.entropy()).mean() + 0.5 * F.mse_loss(value, batch["return"])

    return bf.Job(model=ActorCritic, loss=loss, batch=steps_taken)


@job_case(2048, refused=SPLIT)
def policy_gradient_with_standardised_advantages() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        policy, value = model(batch["state"])
        advantage = batch["return"] - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return -(policy.log_prob(batch["action"]) * advantage).mean() + 0.5 * F.mse_loss(value, batch["return"])

    return bf.Job(model=ActorCritic, loss=loss, batch=steps_taken)


@job_case(2048)
def clipped_policy_optimisation() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        policy, value = model(batch["state"])
        ratio = (policy.log_prob(batch["action"]) - batch["log_p"]).exp()
        gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
        return -gain.mean() + 0.5 * F.mse_loss(value, batch["return"]) - 0.01 * policy.entropy().mean()

    return bf.Job(
        model=ActorCritic, loss=loss, batch=steps_taken, optimizer=lambda ps: torch.optim.Adam(ps, eps=1e-5)
    )


def transitions(n: int) -> dict[str, Tensor]:
    return {
        "state": torch.randn(n, 4, 20, 20),
        "action": torch.randint(0, 4, (n,)),
        "reward": torch.randn(n),
        "next": torch.randn(n, 4, 20, 20),
        "done": (torch.rand(n) < 0.1).float(),
    }


def q_network(width: int = 64) -> nn.Module:
    return nn.Sequential(
        conv(4, 16, 2, norm="none"), conv(16, 16, norm="none"), nn.Flatten(), mlp(1600, width, 4)
    )


@job_case(128)
def q_learning_with_target_network() -> bf.Job:
    model = q_network()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        q = model(batch["state"]).gather(1, batch["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = target(batch["next"]).amax(1)
        return F.smooth_l1_loss(q, batch["reward"] + 0.99 * (1 - batch["done"]) * best)

    return bf.Job(
        model=model, loss=loss, batch=transitions, optimizer=lambda ps: torch.optim.RMSprop(ps, lr=2.5e-4)
    )


@job_case(128)
def q_learning_with_target_inside() -> bf.Job:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.target = q_network(), q_network().requires_grad_(False)

    def loss(model: Double, batch: dict[str, Tensor]) -> Tensor:
        q = model.q(batch["state"]).gather(1, batch["action"][:, None]).squeeze(1)
        with torch.no_grad():
            chosen = model.q(batch["next"]).argmax(1, keepdim=True)
            best = model.target(batch["next"]).gather(1, chosen).squeeze(1)
        return F.smooth_l1_loss(q, batch["reward"] + 0.99 * (1 - batch["done"]) * best)

    return bf.Job(
        model=Double,
        loss=loss,
        batch=transitions,
        optimizer=lambda ps: torch.optim.Adam([p for p in ps if p.requires_grad], lr=1e-4),
    )


@job_case(1024)
def soft_actor_critic_loop() -> bf.Job:
    """Three optimizers and a target that follows."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.q1, self.q2 = mlp(16, 128, 128, 8), mlp(20, 128, 128, 1), mlp(20, 128, 128, 1)
            self.target1, self.target2 = (copy.deepcopy(q).requires_grad_(False) for q in (self.q1, self.q2))
            self.log_alpha = nn.Parameter(torch.zeros(()))

        def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std = self.actor(state).chunk(2, -1)
            normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
            raw = normal.rsample()
            action = raw.tanh()
            return action, (normal.log_prob(raw) - (1 - action**2 + 1e-6).log()).sum(-1)

    def loop(model: Agent, batches: Iterable[dict[str, Tensor]]) -> None:
        of_q = torch.optim.Adam([*model.q1.parameters(), *model.q2.parameters()], lr=3e-4)
        of_actor = torch.optim.Adam(model.actor.parameters(), lr=3e-4)
        of_alpha = torch.optim.Adam([model.log_alpha], lr=3e-4)
        for batch in batches:
            alpha = model.log_alpha.exp().detach()
            with torch.no_grad():
                following, log_p = model.act(batch["next"])
                both = torch.cat([batch["next"], following], 1)
                least = torch.minimum(model.target1(both), model.target2(both)).squeeze(1)
                goal = batch["reward"] + 0.99 * (least - alpha * log_p)
            taken = torch.cat([batch["state"], batch["action"]], 1)
            loss_q = sum(F.mse_loss(q(taken).squeeze(1), goal) for q in (model.q1, model.q2))
            of_q.zero_grad()
            loss_q.backward()
            of_q.step()
            action, log_p = model.act(batch["state"])
            both = torch.cat([batch["state"], action], 1)
            loss_actor = (alpha * log_p - torch.minimum(model.q1(both), model.q2(both)).squeeze(1)).mean()
            of_actor.zero_grad()
            loss_actor.backward()
            of_actor.step()
            of_alpha.zero_grad()
            (-model.log_alpha * (log_p.detach() - 4).mean()).backward()
            of_alpha.step()
            with torch.no_grad():
                for q, target in ((model.q1, model.target1), (model.q2, model.target2)):
                    for a, b in zip(q.parameters(), target.parameters(), strict=True):
                        b.lerp_(a, 0.005)

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "state": torch.randn(n, 16),
            "action": torch.rand(n, 4),
            "reward": torch.randn(n),
            "next": torch.randn(n, 16),
        }

    return bf.Job(model=Agent, loss=unused, batch=batch, loop=loop)


@job_case(256)
def recurrent_policy_over_episodes() -> bf.Job:
    """Episodes with their own lengths; what is after the end does not count."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, states: Tensor) -> Tensor:
            return self.head(self.gru(states)[0]).log_softmax(-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = model(batch["states"]).gather(2, batch["actions"][..., None]).squeeze(2)
        alive = torch.arange(16) < batch["lengths"][:, None]
        return -(log_p * batch["returns"] * alive).sum() / alive.sum()

    def batch(n: int) -> dict[str, Any]:
        return {
            "states": torch.randn(n, 16, 16),
            "actions": torch.randint(0, 4, (n, 16)),
            "returns": torch.randn(n, 16),
            "lengths": 16 - torch.arange(n) // 32,
        }

    return bf.Job(model=Policy, loss=loss, batch=batch, count=lambda b: b["lengths"].sum())
