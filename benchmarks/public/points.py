"""Scripts that train on points, rays and times."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from public.case import script
from public.texts import adam


@script(
    "fxia22/pointnet.pytorch", "bafbf401e0af19be3262e448c59313fd2be0e421", "utils/train_classification.py", 8
)
def points_by_a_pointnet() -> bf.Job:
    """BatchNorm in a classifier and in two networks that align points; a penalty on the second."""
    from pointnet.model import PointNetCls, feature_transform_regularizer

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        pred, _, trans_feat = model(batch["points"].transpose(2, 1))
        found = F.nll_loss(pred, batch["target"])
        found += feature_transform_regularizer(trans_feat) * 0.001
        return found

    return bf.Job(
        model=lambda: PointNetCls(k=10, feature_transform=True),
        loss=loss,
        batch=lambda n: {"points": torch.randn(n, 64, 3), "target": torch.randint(0, 10, (n,))},
        optimizer=partial(adam, lr=0.001, betas=(0.9, 0.999)),
    )


@script(
    "yenchenlin/nerf-pytorch",
    "63a5a630c9abd62b0f21c08703d0ac2ea7d4b9dd",
    "run_nerf.py",
    64,
    absent=("imageio", "cv2"),
)
def rays_by_two_fields() -> bf.Job:
    """A coarse field decides where a fine one is asked; both are trained."""
    from run_nerf import render_rays, run_network
    from run_nerf_helpers import NeRF, get_embedder

    embed, width = get_embedder(4)
    embed_directions, width_of_directions = get_embedder(2)

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coarse, self.fine = (
                NeRF(
                    D=4, W=32, input_ch=width, input_ch_views=width_of_directions, skips=[2], use_viewdirs=True
                )
                for _ in range(2)
            )

    def query(points: Tensor, directions: Tensor, field: nn.Module) -> Tensor:
        found: Tensor = run_network(points, directions, field, embed, embed_directions)
        return found

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = render_rays(
            batch["rays"], model.coarse, query, network_fine=model.fine, N_samples=12, N_importance=12,
            perturb=1.0, raw_noise_std=1.0,
        )  # fmt: skip
        return F.mse_loss(found["rgb_map"], batch["colours"]) + F.mse_loss(found["rgb0"], batch["colours"])

    def batch(n: int) -> dict[str, Tensor]:
        origins, directions = torch.randn(n, 3), F.normalize(torch.randn(n, 3), dim=-1)
        bounds = torch.tensor([2.0, 6.0]).expand(n, 2)
        return {"rays": torch.cat([origins, directions, bounds, directions], -1), "colours": torch.rand(n, 3)}

    return bf.Job(model=Fields, loss=loss, batch=batch, optimizer=partial(adam, lr=5e-4, betas=(0.9, 0.999)))


@script("rtqichen/torchdiffeq", "657943acefa826ef04c025ebeb1ff5e9d60dc268", "examples/ode_demo.py", 20)
def spirals_by_an_ode() -> bf.Job:
    """The solver chooses its steps by the error of the whole batch."""
    from examples.ode_demo import ODEFunc
    from torchdiffeq import odeint

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        times = torch.linspace(0.0, 0.25, 10)
        paths = odeint(model, batch["start"], times)
        return torch.mean(torch.abs(paths - batch["paths"].transpose(0, 1)))

    return bf.Job(
        model=ODEFunc,
        loss=loss,
        batch=lambda n: {"start": torch.randn(n, 1, 2), "paths": torch.randn(n, 10, 1, 2)},
        optimizer=lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    )
