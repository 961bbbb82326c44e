"""Models that make images, sounds and densities: diffusion, autoencoders, adversaries, flows, energies."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import SPLIT, job_case
from job_zoo.parts import Block, TinyUNet, conv, mlp, texts

# B samples, C channels, H height, W width, T tokens, D width


def pictures(n: int, channels: int = 3, size: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(n, channels, size, size)}


def noised(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    kept = torch.cos(t * math.pi / 2)[:, None, None, None]
    return kept * x + (1 - kept**2).clamp_min(0).sqrt() * noise


@job_case(64)
def diffusion() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        return F.mse_loss(model(noised(x, t, noise), t), noise)

    return bf.Job(model=TinyUNet, loss=loss, batch=pictures)


@job_case(64, refused=SPLIT)
def diffusion_with_summed_loss() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        return F.mse_loss(model(noised(x, t, noise), t), noise, reduction="sum")

    return bf.Job(model=TinyUNet, loss=loss, batch=pictures)


@job_case(32, needs=("diffusers",))
def diffusers_unet_and_scheduler() -> bf.Job:
    from diffusers import DDPMScheduler, UNet2DModel

    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        noise = torch.randn(x.shape)
        steps = torch.randint(0, scheduler.config.num_train_timesteps, (x.shape[0],), dtype=torch.int64)
        return F.mse_loss(model(scheduler.add_noise(x, noise, steps), steps).sample, noise)

    return bf.Job(
        model=lambda: UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        loss=loss,
        batch=pictures,
    )


@job_case(16, needs=("diffusers",))
def latent_diffusion_around_frozen_encoders() -> bf.Job:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, latent_channels=4)
    text = CLIPTextModel(
        CLIPTextConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    vae.eval().requires_grad_(False)
    text.eval().requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            latents = vae.encode(batch["x"]).latent_dist.sample() * 0.18
            words = text(batch["ids"])[0]
        t, noise = torch.rand(len(latents)), torch.randn_like(latents)
        return F.mse_loss(model(noised(latents, t, noise), t * 1000, words).sample, noise)

    return bf.Job(
        model=lambda: UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=32,
            attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        loss=loss,
        batch=lambda n: pictures(n) | {"ids": torch.randint(0, 256, (n, 16))},
    )


@job_case(32)
def diffusion_transformer() -> bf.Job:
    """Adaptive norms from time and class, guidance by dropping classes."""

    class DiTBlock(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
            self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
            self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
            self.mlp = mlp(width, 4 * width, width, act=nn.GELU)
            self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            s1, b1, g1, s2, b2, g2 = self.modulate(c)[:, None].chunk(6, -1)
            y = self.norm1(x) * (1 + s1) + b1
            x = x + g1 * self.attention(y, y, y, need_weights=False)[0]
            return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)

    class DiT(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, width, 2, stride=2)
            self.places = nn.Parameter(torch.zeros(1, 64, width))
            self.time, self.label = mlp(1, width, width, act=nn.SiLU), nn.Embedding(11, width)
            self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(2))
            self.out = nn.Linear(width, 12)

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            y = torch.where(torch.rand(len(y)) < 0.1, 10, y)
            c = self.time(t[:, None]) + self.label(y)
            x = self.patch(x).flatten(2).transpose(1, 2) + self.places
            for block in self.blocks:
                x = block(x, c)
            return F.pixel_shuffle(self.out(x).transpose(1, 2).unflatten(2, (8, 8)), 2)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        return F.mse_loss(model(noised(x, t, noise), t, batch["y"]), noise)

    return bf.Job(model=DiT, loss=loss, batch=lambda n: pictures(n) | {"y": torch.randint(0, 10, (n,))})


@job_case(64)
def flow_matching() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        t, start = torch.sigmoid(torch.randn(len(x))), torch.randn_like(x)
        mixed = torch.lerp(start, x, t[:, None, None, None])
        return (model(mixed, t) - (x - start)).square().mean()

    return bf.Job(model=TinyUNet, loss=loss, batch=pictures, optimizer="muon")


@job_case(64)
def sliced_score_matching() -> bf.Job:
    """The loss contains a gradient with respect to the input."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        v = torch.randn_like(x)
        score = model(x, torch.zeros(len(x)))
        slope = torch.autograd.grad((score * v).sum(), x, create_graph=True)[0]
        return ((slope * v).sum((1, 2, 3)) + 0.5 * (score * v).sum((1, 2, 3)).square()).mean()

    return bf.Job(model=TinyUNet, loss=loss, batch=pictures)


class VAE(nn.Module):
    """Of pytorch/examples."""

    def __init__(self, width: int = 784, hidden: int = 128) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (
            nn.Linear(width, hidden),
            nn.Linear(hidden, 20),
            nn.Linear(hidden, 20),
        )
        self.fc3, self.fc4 = nn.Linear(20, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(h), self.fc22(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log_variance


def digits(n: int) -> dict[str, Tensor]:
    return {"x": torch.rand(n, 784)}


@job_case(2048)
def vae_mean() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made, mean, log_variance = model(batch["x"])
        fit = F.binary_cross_entropy(made, batch["x"], reduction="none").sum(1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return (fit + divergence).mean()

    return bf.Job(model=VAE, loss=loss, batch=digits)


@job_case(2048, refused=SPLIT)
def vae_sum_as_in_pytorch_examples() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made, mean, log_variance = model(batch["x"])
        fit = F.binary_cross_entropy(made, batch["x"], reduction="sum")
        return fit - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())

    return bf.Job(model=VAE, loss=loss, batch=digits)


@job_case(128)
def autoencoder() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(
            conv(3, 16),
            conv(16, 16, stride=2),
            conv(16, 16),
            nn.Upsample(scale_factor=2),
            conv(16, 16),
            nn.Conv2d(16, 3, 1),
        ),
        loss=lambda m, b: F.l1_loss(m(b["x"]), b["x"]),
        batch=pictures,
    )


@job_case(128, budget="65%")
def vq_vae_with_moving_codebook() -> bf.Job:
    """The codebook is a buffer that each forward moves towards what chose its entries."""

    class VQVAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(conv(3, 16, stride=2), nn.Conv2d(16, 8, 1))
            self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), conv(8, 16), nn.Conv2d(16, 3, 1))
            self.register_buffer("codes", torch.randn(64, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x)
            rows = z.permute(0, 2, 3, 1).flatten(0, 2)
            nearest = torch.cdist(rows, self.codes).argmin(1)
            if self.training:
                with torch.no_grad():
                    chosen = F.one_hot(nearest, 64).to(rows.dtype)
                    means = chosen.T @ rows / chosen.sum(0)[:, None].clamp_min(1)
                    self.codes.lerp_(means, 0.05)
            q = self.codes[nearest].view(len(x), 8, 8, 8).permute(0, 3, 1, 2)
            return self.decoder(z + (q - z).detach()), F.mse_loss(z, q)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made, commitment = model(batch["x"])
        return F.mse_loss(made, batch["x"]) + 0.25 * commitment

    return bf.Job(model=VQVAE, loss=loss, batch=pictures)


class Adversaries(nn.Module):
    def __init__(self, spectral: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(32, 16 * 64), nn.Unflatten(1, (16, 8, 8)), nn.Upsample(scale_factor=2), conv(16, 16)
        )
        self.generator.append(nn.Conv2d(16, 3, 3, padding=1))
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)]
        if spectral:
            layers = [nn.utils.parametrizations.spectral_norm(layer) for layer in layers]
        act = nn.LeakyReLU(0.2)
        self.critic = nn.Sequential(layers[0], act, layers[1], act, nn.Flatten(), nn.Linear(16 * 64, 1))


def two_optimizers(model: Adversaries, batches: Iterable[dict[str, Tensor]], penalty: float = 0.0) -> None:
    """The usual GAN loop; with a penalty that of WGAN-GP."""
    of_g = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(model.critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for batch in batches:
        real = batch["x"]
        fake = model.generator(torch.randn(len(real), 32))
        of_d.zero_grad()
        loss_d = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()
        if penalty:
            mixed = torch.lerp(real, fake.detach(), torch.rand(len(real), 1, 1, 1)).requires_grad_()
            slope = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)[0]
            loss_d = loss_d + penalty * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        F.softplus(-model.critic(fake)).mean().backward()
        of_g.step()


def unused(_model: nn.Module, _batch: Any) -> Tensor:
    raise NotImplementedError("the loop has losses of its own")


@job_case(64)
def gan_with_two_optimizers() -> bf.Job:
    return bf.Job(model=Adversaries, loss=unused, batch=pictures, loop=two_optimizers)


@job_case(64, named="oneDNN's scratch memory for convolutions with a stride")
def wgan_with_gradient_penalty() -> bf.Job:
    return bf.Job(
        model=Adversaries,
        loss=unused,
        batch=pictures,
        loop=lambda model, batches: two_optimizers(model, batches, penalty=10.0),
    )


@job_case(64, budget="6MiB")
def spectral_norm_critic() -> bf.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.softplus(torch.where(batch["real"][:, None], -1, 1) * model.critic(batch["x"])).mean()

    return bf.Job(
        model=lambda: Adversaries(spectral=True),
        loss=loss,
        batch=lambda n: pictures(n) | {"real": torch.rand(n) < 0.5},
        optimizer=lambda ps: torch.optim.Adam(ps, lr=2e-4, betas=(0.0, 0.9)),
    )


@job_case(1024)
def normalising_flow() -> bf.Job:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.flip, self.net = flip, mlp(8, 64, 64, 16, act=nn.SiLU)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = (x.flip(1) if self.flip else x).chunk(2, 1)
            scale, shift = self.net(a).chunk(2, 1)
            scale = scale.tanh()
            return torch.cat([a, b * scale.exp() + shift], 1), scale.sum(1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Coupling(flip=bool(i % 2)) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            total = 0.0
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            normal = torch.distributions.Normal(0.0, 1.0)
            return normal.log_prob(x).sum(1) + total

    return bf.Job(model=Flow, loss=lambda m, b: -m(b["x"]).mean(), batch=lambda n: {"x": torch.randn(n, 16)})


@job_case(64)
def energy_model_with_langevin_chain() -> bf.Job:
    """The loss runs a few steps of sampling, each with a gradient of its own, before its backward."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        fake = torch.rand_like(batch["x"])
        for _ in range(3):
            fake = fake.detach().requires_grad_()
            slope = torch.autograd.grad(model(fake).sum(), fake)[0]
            fake = fake - 0.1 * slope + 0.01 * torch.randn_like(fake)
        real, made = model(batch["x"]), model(fake.detach())
        return (real - made + 0.1 * (real.square() + made.square())).mean()

    return bf.Job(
        model=lambda: nn.Sequential(
            conv(3, 16, norm="none"), conv(16, 16, norm="none"), nn.Flatten(), nn.Linear(4096, 1)
        ),
        loss=loss,
        batch=pictures,
    )


@job_case(64)
def pixel_cnn() -> bf.Job:
    class Masked(nn.Conv2d):
        def __init__(self, *sizes: int, own: bool) -> None:
            super().__init__(*sizes, padding=sizes[2] // 2)
            mask = torch.ones_like(self.weight)
            mask[..., sizes[2] // 2, sizes[2] // 2 + own :] = 0
            mask[..., sizes[2] // 2 + 1 :, :] = 0
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight * self.mask, self.bias)

    layers: list[tuple[int, int, int, bool]] = [(1, 16, 5, False), (16, 16, 3, True), (16, 16, 3, True)]
    return bf.Job(
        model=lambda: nn.Sequential(
            *(nn.Sequential(Masked(a, b, k, own=own), nn.ReLU()) for a, b, k, own in layers),
            nn.Conv2d(16, 16, 1),
        ),
        loss=lambda m, b: F.cross_entropy(m(b["x"][:, None].float() / 15), b["x"]),
        batch=lambda n: {"x": torch.randint(0, 16, (n, 16, 16))},
    )


@job_case(512)
def radiance_field() -> bf.Job:
    """Rays are sampled at random depths and composed."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        start, direction = batch["start"], batch["direction"]
        depths = (torch.arange(16) + torch.rand(len(start), 16)) / 16
        points = start[:, None] + depths[..., None] * direction[:, None]
        waves = torch.cat([f(points * 2**k) for k in range(4) for f in (torch.sin, torch.cos)], -1)
        out = model(waves)
        light = 1 - (-F.relu(out[..., 3]) / 16).exp()
        through = torch.cumprod(torch.cat([torch.ones(len(light), 1), 1 - light + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((light * through)[..., None] * out[..., :3].sigmoid()).sum(1), batch["colour"])

    return bf.Job(
        model=lambda: mlp(24, 64, 64, 4),
        loss=loss,
        batch=lambda n: {
            "start": torch.randn(n, 3),
            "direction": F.normalize(torch.randn(n, 3), dim=1),
            "colour": torch.rand(n, 3),
        },
    )


@job_case(64)
def consistency_with_teacher_outside() -> bf.Job:
    """The teacher is an average of the model that the loss moves by itself."""
    model = TinyUNet(width=32)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        with torch.no_grad():
            target = teacher(noised(x, t * 0.9, noise), t * 0.9)
        return F.smooth_l1_loss(model(noised(x, t, noise), t), target)

    return bf.Job(model=model, loss=loss, batch=pictures)


@job_case(32)
def masked_diffusion_of_texts() -> bf.Job:
    """As many words of each text are hidden as chance wills; each text's loss is weighted by it."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(257, 64)
            self.blocks = nn.Sequential(Block(64), Block(64))
            self.head = nn.Linear(64, 256)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(ids)))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["x"]
        t = 0.05 + 0.95 * torch.rand(len(ids), 1)
        hidden = torch.rand(ids.shape) < t
        losses = F.cross_entropy(model(ids.masked_fill(hidden, 256)).transpose(1, 2), ids, reduction="none")
        return (losses * hidden / t).mean()

    return bf.Job(model=Denoiser, loss=loss, batch=lambda n: {"x": texts(n)["x"]})
