"""Scripts that train on sounds."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import brimful as bf
from public.case import script
from public.texts import adam


@script("r9y9/wavenet_vocoder", "a35fff76ea3687b05e1a10023cad3f7f64fa25a3", "train.py", 8)
def waves_by_a_wavenet() -> bf.Job:
    """A mixture of logistic distributions, averaged over the samples of each wave that are not padding."""
    from wavenet_vocoder import WaveNet
    from wavenet_vocoder.mixture import discretized_mix_logistic_loss

    def batch(n: int) -> dict[str, Tensor]:
        lengths = torch.randint(200, 257, (n, 1))
        mask = (torch.arange(256) < lengths).float().unsqueeze(-1)
        return {"x": torch.rand(n, 1, 256) * 2 - 1, "c": torch.randn(n, 16, 16), "mask": mask}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y_hat, y = model(batch["x"], batch["c"]), batch["x"].transpose(1, 2)
        losses = discretized_mix_logistic_loss(
            y_hat[:, :, :-1], y[:, 1:], num_classes=65536, log_scale_min=-32.23619130191664, reduce=False
        )
        mask = batch["mask"][:, 1:]
        found: Tensor = (losses * mask).sum() / mask.sum()
        return found

    return bf.Job(
        model=lambda: WaveNet(
            out_channels=30, layers=6, stacks=2, residual_channels=24, gate_channels=48, skip_out_channels=24,
            cin_channels=16, upsample_conditional_features=True, upsample_net="UpsampleNetwork",
            upsample_params={"upsample_scales": [4, 4]}, scalar_input=True, dropout=0.0,
        ),
        loss=loss,
        batch=batch,
        count=lambda batch: batch["mask"][:, 1:].sum(),
        optimizer=partial(adam, lr=1e-3, eps=1e-8),
    )  # fmt: skip


@script(
    "JusperLee/Conv-TasNet",
    "1d05c4730e59034a0f3dfc8d0ee987f9988820b5",
    "Conv_TasNet_Pytorch/trainer.py",
    8,
    folder="Conv_TasNet_Pytorch",
)
def voices_apart() -> bf.Job:
    """For each sample the better of two orders of speakers counts."""
    from Conv_TasNet import ConvTasNet
    from SI_SNR import si_snr_loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = si_snr_loss(
            model(batch["mix"]), {"mix": batch["mix"], "ref": [batch["one"], batch["two"]]}
        )
        return found

    return bf.Job(
        model=lambda: ConvTasNet(
            N=32, L=16, B=16, H=32, P=3, X=3, R=2, norm="gln", num_spks=2, activate="relu"
        ),
        loss=loss,
        batch=lambda n: {name: torch.randn(n, 800) for name in ("mix", "one", "two")},
        optimizer=partial(adam, lr=1e-3, weight_decay=1e-5),
    )
