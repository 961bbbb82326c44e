"""Scripts that forecast series, and one that recommends what comes next."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from public.case import script
from public.texts import adam

SERIES, PAST, FUTURE = 7, 96, 24


def series(n: int) -> dict[str, Tensor]:
    """Seven series of a day's hours and what follows, with four marks of each hour."""
    values = torch.randn(n, PAST + FUTURE, SERIES).cumsum(1) / 4
    return {"past": values[:, :PAST], "future": values[:, PAST:], "marks": torch.rand(n, PAST, 4) - 0.5}


@script(
    "yuqinie98/PatchTST",
    "204c21efe0b39603ad6e2ca640ef5896646ab1a9",
    "PatchTST_supervised/run_longExp.py",
    32,
    folder="PatchTST_supervised",
)
def series_by_patches() -> bf.Job:
    """Attention over patches of each series, with BatchNorm."""
    from models.PatchTST import Model

    configs = Namespace(
        enc_in=SERIES, seq_len=PAST, pred_len=FUTURE, e_layers=3, n_heads=4, d_model=16, d_ff=64, dropout=0.3,
        fc_dropout=0.3, head_dropout=0.0, individual=0, patch_len=16, stride=8, padding_patch="end", revin=1,
        affine=0, subtract_last=0, decomposition=0, kernel_size=25,
    )  # fmt: skip
    return bf.Job(
        model=lambda: Model(configs),
        loss=lambda model, batch: F.mse_loss(model(batch["past"]), batch["future"]),
        batch=series,
        optimizer=partial(adam, lr=1e-4),
    )


@script(
    "thuml/Time-Series-Library",
    "4e938a1767106324dd753b2a44832bf870a0252e",
    "exp/exp_long_term_forecasting.py",
    16,
)
def series_by_their_periods() -> bf.Job:
    """Shapes follow from the strongest frequencies of the whole batch, which NumPy reads."""
    from models.TimesNet import Model

    configs = Namespace(
        task_name="long_term_forecast", enc_in=SERIES, c_out=SERIES, seq_len=PAST, label_len=48,
        pred_len=FUTURE, e_layers=2, d_model=16, d_ff=16, top_k=3, num_kernels=3, embed="timeF",
        freq="h", dropout=0.1,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["past"], batch["marks"], None, None)
        return F.mse_loss(outputs[:, -FUTURE:], batch["future"])

    return bf.Job(model=lambda: Model(configs), loss=loss, batch=series, optimizer=partial(adam, lr=1e-4))


@script("philipperemy/n-beats", "06a4e209ada80bf1f403ced5228261784dfb26ed", "examples/trainer_pytorch.py", 256)
def forecast_by_residual_stacks() -> bf.Job:
    """Blocks are in lists of their own, and their parameters in one list of the model."""
    from nbeats_pytorch.model import NBeatsNet

    def model() -> nn.Module:
        net: nn.Module = NBeatsNet(
            stack_types=[NBeatsNet.GENERIC_BLOCK, NBeatsNet.TREND_BLOCK, NBeatsNet.SEASONALITY_BLOCK],
            forecast_length=8, backcast_length=40, thetas_dim=[7, 4, 8], nb_blocks_per_stack=2,
            hidden_layer_units=96,
        )  # fmt: skip
        return net

    return bf.Job(
        model=model,
        loss=lambda model, batch: F.mse_loss(model(batch["past"])[1], batch["future"]),
        batch=lambda n: {"past": torch.randn(n, 40), "future": torch.randn(n, 8)},
        optimizer=lambda ps: torch.optim.Adam(ps),
    )


@script(
    "pmixer/SASRec.pytorch", "fde8a9c08febc2c898dc269b1d98ab762c50d2be", "python/main.py", 64, folder="python"
)
def next_item_of_users() -> bf.Job:
    """The model takes NumPy arrays; the loss is a mean over items that are not padding."""
    import numpy as np
    from model import SASRec

    args = Namespace(
        device="cpu", norm_first=False, hidden_units=32, maxlen=24, dropout_rate=0.2, num_blocks=2, num_heads=1
    )

    def batch(n: int) -> dict[str, Tensor]:
        made = {name: torch.randint(1, 500, (n, 24)) for name in ("seq", "pos", "neg")}
        padding = torch.arange(24) < torch.randint(0, 20, (n, 1))
        return {name: items.masked_fill(padding, 0) for name, items in made.items()}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seq, pos, neg = (batch[name].numpy() for name in ("seq", "pos", "neg"))
        pos_logits, neg_logits = model(None, seq, pos, neg)
        indices = np.where(pos != 0)
        found = F.binary_cross_entropy_with_logits(pos_logits[indices], torch.ones(pos_logits.shape)[indices])
        return found + F.binary_cross_entropy_with_logits(
            neg_logits[indices], torch.zeros(neg_logits.shape)[indices]
        )

    def model() -> nn.Module:
        made: nn.Module = SASRec(100, 500, args)
        for parameter in made.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter.data)
        made.item_emb.weight.data[0] = made.pos_emb.weight.data[0] = 0
        return made

    return bf.Job(
        model=model,
        loss=loss,
        batch=batch,
        count=lambda batch: (batch["pos"] != 0).sum(),
        optimizer=partial(adam, lr=0.001, betas=(0.9, 0.98)),
    )
