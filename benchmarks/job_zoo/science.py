"""Physics, inner loops, second derivatives, and layers of people's own making."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import Block, classify, conv, images, mlp, vectors

# B samples, C channels, D width


@job_case(1024)
def physics_informed_in_float64() -> bf.Job:
    """Burgers' equation: first and second derivatives of the net by its inputs."""

    def derivative(of: Tensor, by: Tensor) -> Tensor:
        return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        t, x = batch["t"].requires_grad_(), batch["x"].requires_grad_()
        u = model(torch.cat([t, x], 1))
        u_x = derivative(u, x)
        residual = derivative(u, t) + u * u_x - 0.01 / math.pi * derivative(u_x, x)
        start = model(torch.cat([torch.zeros_like(t), x], 1))
        return residual.square().mean() + (start + torch.sin(math.pi * x)).square().mean()

    return bf.Job(
        model=lambda: mlp(2, 32, 32, 32, 1, act=nn.Tanh).double(),
        loss=loss,
        batch=lambda n: {"t": torch.rand(n, 1).double(), "x": 2 * torch.rand(n, 1).double() - 1},
        optimizer=lambda ps: torch.optim.Adam(ps, lr=1e-3),
    )


@job_case(32)
def fourier_neural_operator() -> bf.Job:
    class Spectral(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.modes = modes
            weights = torch.randn(width, width, modes, modes, dtype=torch.cfloat)
            self.weights = nn.Parameter(weights / width**2)
            self.local = nn.Conv2d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            full = torch.fft.rfft2(x)
            out = torch.zeros_like(full)
            m = self.modes
            out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", full[:, :, :m, :m], self.weights)
            return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))

    return bf.Job(
        model=lambda: nn.Sequential(nn.Conv2d(1, 16, 1), Spectral(16, 6), Spectral(16, 6), nn.Conv2d(16, 1, 1)),
        loss=lambda m, b: ((m(b["a"]) - b["u"]).flatten(1).norm(dim=1) / b["u"].flatten(1).norm(dim=1)).mean(),
        batch=lambda n: {"a": torch.randn(n, 1, 32, 32), "u": torch.randn(n, 1, 32, 32)},
    )


@job_case(4)
def meta_learning_with_inner_loop() -> bf.Job:
    """MAML: each task of the batch adapts the weights by two steps, through which the gradient goes."""

    def adapted(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        inner = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        return {name: w - 0.01 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = []
        for x, y, new_x, new_y in zip(*(batch[k] for k in ("x", "y", "new_x", "new_y")), strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                weights = adapted(model, weights, x, y)
            losses.append(F.mse_loss(torch.func.functional_call(model, weights, (new_x,)), new_y))
        return torch.stack(losses).mean()

    return bf.Job(
        model=lambda: mlp(1, 40, 40, 1),
        loss=loss,
        batch=lambda n: {k: torch.randn(n, 256, 1) for k in ("x", "y", "new_x", "new_y")},
    )


@job_case(512, named="the profiler that measures holds the arguments of ops under vmap")
def jacobian_penalty_by_vmap() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(model))(batch["x"])
        return F.cross_entropy(model(batch["x"]), batch["y"]) + 0.01 * slopes.square().sum((1, 2)).mean()

    return bf.Job(model=lambda: mlp(16, 32, 32, 10, act=nn.Softplus), loss=loss, batch=lambda n: vectors(n, 16))


@job_case(512)
def neural_differential_equation() -> bf.Job:
    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = mlp(8, 64, 8, act=nn.Tanh)

        def forward(self, x: Tensor) -> Tensor:
            step, path = 0.25, [x]
            for _ in range(4):
                k1 = self.field(x)
                k2 = self.field(x + step / 2 * k1)
                k3 = self.field(x + step / 2 * k2)
                k4 = self.field(x + step * k3)
                x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                path.append(x)
            return torch.stack(path, 1)

    return bf.Job(
        model=Ode,
        loss=lambda m, b: F.mse_loss(m(b["start"]), b["path"]),
        batch=lambda n: {"start": torch.randn(n, 8), "path": torch.randn(n, 5, 8)},
    )


@job_case(256)
def operator_network_with_shared_grid() -> bf.Job:
    """DeepONet: the places where the function is asked for belong to the whole batch; they are a global."""
    places = torch.linspace(0, 1, 100)[:, None]

    class DeepONet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch, self.trunk = mlp(50, 128, 128, 64, act=nn.GELU), mlp(1, 64, 64, act=nn.GELU)

        def forward(self, u: Tensor) -> Tensor:
            return self.branch(u) @ self.trunk(places).T

    return bf.Job(
        model=DeepONet,
        loss=lambda m, b: F.mse_loss(m(b["u"]), b["s"]),
        batch=lambda n: {"u": torch.randn(n, 50), "s": torch.randn(n, 100)},
    )


@job_case(64, refused=SPLIT)
def gaussian_process() -> bf.Job:
    """Exact: all samples together have one likelihood."""

    class GP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_length, self.log_noise = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: Tensor) -> torch.distributions.MultivariateNormal:
            scaled = x / self.log_length.exp()
            covariance = (-0.5 * torch.cdist(scaled, scaled).square()).exp()
            covariance = covariance + self.log_noise.exp() * torch.eye(len(x))
            return torch.distributions.MultivariateNormal(torch.zeros(len(x)), covariance)

    return bf.Job(
        model=GP,
        loss=lambda m, b: -m(b["x"]).log_prob(b["y"]) / len(b["y"]),
        batch=lambda n: {"x": torch.randn(n, 4), "y": torch.randn(n)},
    )


@job_case(8, named="oneDNN chooses the layouts of volumes")
def volumes_through_3d_convolutions() -> bf.Job:
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU())

    return bf.Job(
        model=lambda: nn.Sequential(block(1, 8), block(8, 8), nn.Conv3d(8, 2, 1)),
        loss=lambda m, b: F.cross_entropy(m(b["scan"]), b["mask"]),
        batch=lambda n: {
            "scan": torch.randn(n, 1, 16, 16, 16),
            "mask": torch.randint(0, 2, (n, 16, 16, 16)),
        },
        optimizer=lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    )


@job_case(32)
def weight_norm_of_convolutions() -> bf.Job:
    from torch.nn.utils.parametrizations import weight_norm

    return bf.Job(
        model=lambda: nn.Sequential(
            *(
                nn.Sequential(weight_norm(nn.Conv1d(a, 32, 3, padding=2**i, dilation=2**i)), nn.ELU())
                for i, a in enumerate((1, 32, 32, 32))
            ),
            nn.Conv1d(32, 8, 1),
        ),
        loss=lambda m, b: F.cross_entropy(m(b["wave"]), b["level"]),
        batch=lambda n: {"wave": torch.randn(n, 1, 256), "level": torch.randint(0, 8, (n, 256))},
    )


class Orthogonal(nn.Module):
    """A recurrent net whose matrix stays orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 64), nn.Linear(64, 10)
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(64, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 64)
        for step in self.enter(x).unbind(1):
            state = F.relu(self.turn(state) + step)
        return self.head(state)


def short_sequences(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 16, 4), "y": torch.randint(0, 10, (n,))}


@job_case(128, named="how many powers a matrix exponential takes depends on its norm")
def orthogonal_recurrent_weights() -> bf.Job:
    return bf.Job(model=Orthogonal(), loss=classify, batch=short_sequences)


@job_case(128, refused="reads its weights while it is built")
def orthogonal_weights_built_by_a_function() -> bf.Job:
    """The parametrization looks at the weights as the model is built."""
    return bf.Job(model=Orthogonal, loss=classify, batch=short_sequences)


class Swish(torch.autograd.Function):
    """x · sigmoid(x), of which only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s * (1 + x * (1 - s)))


class Binarise(torch.autograd.Function):
    """Signs, with the gradient straight through; keeps a mask as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = x.abs() <= 1
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.inside


@job_case(1024)
def own_autograd_functions() -> bf.Job:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)])

        def forward(self, x: Tensor) -> Tensor:
            x = Swish.apply(self.layers[0](x))
            return self.layers[2](Binarise.apply(self.layers[1](x)))

    return bf.Job(model=Net, loss=classify, batch=vectors)


def _declare_scaled_relu() -> None:
    """An op of one's own, with a fake form and a backward; declared once in a process."""
    if hasattr(torch.ops.job_zoo, "scaled_relu"):
        return

    @torch.library.custom_op("job_zoo::scaled_relu", mutates_args=())
    def scaled_relu(x: Tensor, scale: float) -> Tensor:
        return torch.relu(x * scale)

    @scaled_relu.register_fake
    def _(x: Tensor, _scale: float) -> Tensor:
        return torch.empty_like(x)

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.scale = inputs[1]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * (y > 0) * ctx.scale, None

    scaled_relu.register_autograd(backward, setup_context=set_up)


@job_case(1024, named="an op that brimful does not know may take more than it shows")
def own_op_with_fake_form() -> bf.Job:
    _declare_scaled_relu()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = torch.ops.job_zoo.scaled_relu(layer(x), 1.5)
            return self.layers[2](x)

    return bf.Job(model=Net, loss=classify, batch=vectors)


@job_case(64)
def capsules_with_routing() -> bf.Job:
    def squash(s: Tensor) -> Tensor:
        length = s.square().sum(-1, keepdim=True)
        return length / (1 + length) * s / (length + 1e-8).sqrt()

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = conv(3, 16, 2)
            self.turns = nn.Parameter(0.1 * torch.randn(64, 10, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            u = squash(F.avg_pool2d(self.first(x), 2).flatten(2).transpose(1, 2)[..., :8])
            votes = torch.einsum("bid,iodk->biok", u, self.turns)
            logits = torch.zeros(votes.shape[:3])
            for _ in range(3):
                v = squash((logits.softmax(2)[..., None] * votes).sum(1))
                logits = logits + (votes * v[:, None]).sum(-1)
            return v.norm(dim=-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        lengths, truth = model(batch["x"]), F.one_hot(batch["y"], 10)
        missed, wrong = F.relu(0.9 - lengths).square(), F.relu(lengths - 0.1).square()
        return (truth * missed + 0.5 * (1 - truth) * wrong).sum(1).mean()

    return bf.Job(model=Capsules, loss=loss, batch=images)


@job_case(256)
def deep_equilibrium_with_backward_hook() -> bf.Job:
    """A fixed point found without a graph; the gradient is solved for in a hook."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
            with torch.no_grad():
                self.cell.weight.mul_(0.5)

        def step(self, z: Tensor, x: Tensor) -> Tensor:
            return (self.cell(z) + x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(8):
                    z = self.step(z, x)
            z = self.step(z, x)
            if z.requires_grad:
                start = z.detach().requires_grad_()
                again = self.step(start, x)

                def solve(gradient: Tensor) -> Tensor:
                    g = gradient
                    for _ in range(8):
                        g = torch.autograd.grad(again, start, g, retain_graph=True)[0] + gradient
                    return g

                z.register_hook(solve)
            return self.head(z)

    return bf.Job(model=Equilibrium, loss=classify, batch=vectors)


@job_case(64)
def complex_valued_network() -> bf.Job:
    class Complex(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(b, a, dtype=torch.cfloat) / a)

        def forward(self, z: Tensor) -> Tensor:
            z = z @ self.weight.T
            return torch.complex(z.real.relu(), z.imag.relu())

    return bf.Job(
        model=lambda: nn.Sequential(Complex(64, 128), Complex(128, 128), Complex(128, 10)),
        loss=lambda m, b: F.cross_entropy(m(b["z"]).abs().mean(1), b["y"]),
        batch=lambda n: {"z": torch.randn(n, 32, 64, dtype=torch.cfloat), "y": torch.randint(0, 10, (n,))},
        optimizer=lambda ps: torch.optim.Adam(ps),
    )


@job_case(16)
def stochastic_depth_and_early_exit() -> bf.Job:
    """Which blocks run is drawn by torch; a value read from a tensor decides in Python."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
            self.blocks = nn.ModuleList(Block(64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                kept = (torch.rand(len(x), 1, 1) < 0.9).to(x.dtype)
                x = x + kept * (block(x) - x)
            return self.head(x.mean(1))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = classify(model, batch)
        return value if value.item() < 100 else value / value.detach()

    return bf.Job(
        model=Net,
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, 64, 16), "y": torch.randint(0, 10, (n,))},
    )
