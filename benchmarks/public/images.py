"""Scripts that train on images."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from public.case import script
from public.texts import adam


def labelled(n: int, *shape: int, classes: int = 10) -> dict[str, Tensor]:
    return {"x": torch.randn(n, *shape), "y": torch.randint(0, classes, (n,))}


@script("milesial/Pytorch-UNet", "21d7850f2af30a9695bbeea75f3136aa538cfc4a", "train.py", 4)
def segmentation_by_a_unet() -> bf.Job:
    """Cross-entropy and a Dice loss of the whole batch; BatchNorm; images in channels_last."""
    from unet import UNet
    from utils.dice_score import dice_loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        images = batch["image"].to(dtype=torch.float32, memory_format=torch.channels_last)
        masks_pred, true_masks = model(images), batch["mask"]
        found = F.cross_entropy(masks_pred, true_masks)
        found += dice_loss(
            F.softmax(masks_pred, dim=1).float(),
            F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float(),
            multiclass=True,
        )
        return found

    return bf.Job(
        model=lambda: UNet(3, 2, bilinear=True).to(memory_format=torch.channels_last),
        loss=loss,
        batch=lambda n: {"image": torch.rand(n, 3, 32, 32), "mask": torch.randint(0, 2, (n, 32, 32))},
        optimizer=lambda ps: torch.optim.RMSprop(ps, lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True),
    )


@script("kuangliu/pytorch-cifar", "49b7aa97b0c12fe0d4054e670403a16b6b834ddd", "main.py", 16)
def images_by_a_shufflenet() -> bf.Job:
    from models import ShuffleNetV2

    return bf.Job(
        model=lambda: ShuffleNetV2(0.5),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: labelled(n, 3, 32, 32),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=5e-4),
    )


@script(
    "Blealtan/efficient-kan", "7b6ce1c87f18c8bc90c208f6b494042344216b11", "examples/mnist.py", 64, folder="src"
)
def digits_by_splines() -> bf.Job:
    from efficient_kan import KAN

    return bf.Job(
        model=lambda: KAN([28 * 28, 64, 10]),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"].view(-1, 28 * 28)), batch["y"]),
        batch=lambda n: labelled(n, 1, 28, 28),
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=1e-4),
    )


@script("lucidrains/perceiver-pytorch", "96097c6a27cc64fc1f196d3a58d32b8a82f573e1", "README.md", 8)
def images_by_a_perceiver() -> bf.Job:
    from perceiver_pytorch import Perceiver

    return bf.Job(
        model=lambda: Perceiver(
            num_freq_bands=4, depth=2, max_freq=10.0, num_latents=24, latent_dim=48, latent_heads=4,
            cross_dim_head=16, latent_dim_head=16, num_classes=10, attn_dropout=0.0, ff_dropout=0.0,
            weight_tie_layers=True, self_per_cross_attn=2,
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: labelled(n, 16, 16, 3),
    )  # fmt: skip


@script("adambielski/siamese-triplet", "0c719f9e8f59fa386e8c59d10b2ddde9fac46276", "trainer.py", 40)
def triplets_chosen_in_the_batch() -> bf.Job:
    """Which triplets count is decided in NumPy, from the embeddings of the batch, partly at random."""
    from losses import OnlineTripletLoss
    from networks import EmbeddingNet
    from utils import RandomNegativeTripletSelector

    criterion = OnlineTripletLoss(1.0, RandomNegativeTripletSelector(1.0))
    return bf.Job(
        model=EmbeddingNet,
        loss=lambda model, batch: criterion(model(batch["x"]), batch["y"])[0],
        batch=lambda n: {"x": torch.randn(n, 1, 28, 28), "y": torch.arange(n) % 10},
        optimizer=partial(adam, lr=1e-3),
    )


@script("chrischute/glow", "faffa5ba02f878902a211db76c0bd4ea074b39f7", "train.py", 8)
def images_by_a_flow() -> bf.Job:
    """The first batch that the model sees decides scale and bias of its layers; a flag in a buffer says so."""
    from models import Glow
    from util import NLLLoss

    criterion = NLLLoss()
    return bf.Job(
        model=lambda: Glow(num_channels=24, num_levels=2, num_steps=2),
        loss=lambda model, batch: criterion(*model(batch["x"], reverse=False)),
        batch=lambda n: {"x": torch.rand(n, 3, 16, 16)},
        optimizer=partial(adam, lr=1e-3),
    )


@script("rosinality/vq-vae-2-pytorch", "ef5f67c46f93624163776caec9e0d95063910eca", "train_vqvae.py", 8)
def images_by_two_codebooks() -> bf.Job:
    """Codebooks are buffers that each forward moves, through `.data`."""
    from vqvae import VQVAE

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, latent_loss = model(batch["x"])
        return F.mse_loss(out, batch["x"]) + 0.25 * latent_loss.mean()

    return bf.Job(
        model=lambda: VQVAE(channel=24, n_res_block=1, n_res_channel=8, embed_dim=16, n_embed=32),
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, 3, 32, 32)},
        optimizer=partial(adam, lr=3e-4),
    )


@script(
    "AntixK/PyTorch-VAE",
    "a6896b944c918dd7030e7d795a8c13e5c6345ec7",
    "run.py",
    16,
    absent=("torchvision", "torchvision.models"),
)
def images_by_a_beta_vae() -> bf.Job:
    """An attribute of the model counts how often its loss was computed, and the loss follows it."""
    from models import BetaVAE

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model.loss_function(*model(batch["x"]), M_N=0.00025)["loss"]
        return found

    return bf.Job(
        model=lambda: BetaVAE(
            in_channels=3,
            latent_dim=16,
            hidden_dims=[8, 16, 32, 64, 512],
            loss_type="B",
            Capacity_max_iter=10000,
        ),
        loss=loss,
        batch=lambda n: {"x": torch.rand(n, 3, 64, 64)},
        optimizer=partial(adam, lr=0.005, weight_decay=0.0),
    )


@script("cloneofsimo/minDiffusion", "00a3c8066d25a34d3d472ef6c87c7b6b238ea444", "train_cifar10.py", 8)
def images_by_diffusion() -> bf.Job:
    from mindiffusion.ddpm import DDPM
    from mindiffusion.unet import NaiveUnet

    return bf.Job(
        model=lambda: DDPM(eps_model=NaiveUnet(3, 3, n_feat=16), betas=(1e-4, 0.02), n_T=1000),
        loss=lambda model, batch: model(batch["x"]),
        batch=lambda n: {"x": torch.randn(n, 3, 32, 32)},
        optimizer=partial(adam, lr=1e-5),
    )
