"""A loss that draws random numbers is compared with its parts too, and never called wrong for its noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brimful as bf
from brimful.errors import UsageError
from brimful.profiling.aligned_draws import AlignedDraws
from brimful.results import EquivalenceReport
from brimful.trainer import Trainer

WIDTH = 64
SETTINGS = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=4)


class Vae(nn.Module):
    """The model of pytorch/examples, small."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 32), nn.Linear(8, WIDTH)
        self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.decoder(latent)), mean, log_variance


def vae_loss(reduction: str) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found, mean, log_variance = model(batch)
        terms = 1 + log_variance - mean**2 - log_variance.exp()
        reduced = terms.sum() if reduction == "sum" else terms.mean()
        return F.binary_cross_entropy(found, batch, reduction=reduction) - 0.5 * reduced

    return loss


def diffusion_loss(reduction: str) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        time = torch.randint(0, 1000, (len(batch),))
        kept = torch.cos(time / 1000)[:, None]
        noise = torch.randn_like(batch)
        noisy = kept * batch + (1 - kept**2).sqrt() * noise
        return F.mse_loss(model(noisy), noise, reduction=reduction)

    return loss


def simclr_loss(model: nn.Module, batch: Tensor) -> Tensor:
    one, other = (F.normalize(model(batch + 0.1 * torch.randn_like(batch)), dim=1) for _ in range(2))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(batch)))


def mixup_loss(model: nn.Module, batch: Tensor) -> Tensor:
    share, order = torch.rand(()), torch.randperm(len(batch))
    return model(share * batch + (1 - share) * batch[order]).square().mean()


def drop_path_loss(model: nn.Module, batch: Tensor) -> Tensor:
    kept = torch.empty(len(batch), 1).bernoulli_(0.8)
    return (batch + kept * model(batch)).square().mean()


def teacher_forcing_loss(model: nn.Module, batch: Tensor) -> Tensor:
    for _ in range(4):
        batch = model(batch) if random.random() < 0.5 else batch
    return batch.square().mean()


def time_first_loss(model: nn.Module, batch: Tensor) -> Tensor:
    steps = batch.view(len(batch), 8, 8).transpose(0, 1)
    return model((steps + torch.randn_like(steps)).transpose(0, 1).flatten(1)).square().mean()


OWN = torch.Generator().manual_seed(5)


def own_generator_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch + torch.randn(batch.shape, generator=OWN)).square().mean()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def certified(model: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> EquivalenceReport:
    job = bf.Job(model=model, loss=loss, batch=lambda n: torch.rand(n, WIDTH), name="random")
    return bf.verify(job, SETTINGS)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Vae, vae_loss("mean")),
        (linear, diffusion_loss("mean")),
        (linear, drop_path_loss),
        (linear, own_generator_loss),
    ],
    ids=["vae", "diffusion", "drop path", "a generator of its own"],
)
def test_a_mean_over_samples_with_random_numbers_of_their_own_is_found_equal(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor]
) -> None:
    found = certified(model, loss)
    assert found.holds
    (made,) = [each for each in found.comparisons if not each.why_not_compared]
    assert made.name == "splitting, with the same random numbers for each sample"


@pytest.mark.parametrize(
    ("model", "loss"),
    [(Vae, vae_loss("sum")), (linear, diffusion_loss("sum")), (linear, simclr_loss)],
    ids=["vae", "diffusion", "simclr"],
)
def test_a_sum_or_a_contrast_that_draws_random_numbers_is_found_different(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor]
) -> None:
    found = certified(model, loss)
    assert not found.holds
    assert "of the batch" in str(found)


@pytest.mark.parametrize(
    "loss", [mixup_loss, time_first_loss, teacher_forcing_loss], ids=["mixup", "time first", "teacher forcing"]
)
def test_noise_that_cannot_be_given_to_single_samples_does_not_refuse(
    loss: Callable[..., Tensor],
) -> None:
    found = certified(linear, loss)
    assert found.holds
    assert "was not compared with the baseline" in str(found)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randn(len(x), 3, 5),
        lambda x: torch.rand(2 * len(x), 3),
        lambda x: torch.randint(0, 9, (len(x),)),
        lambda x: torch.rand_like(x),
        lambda x: torch.bernoulli(x),
        lambda x: torch.empty(len(x), 40).normal_(),
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: torch.multinomial(x, 2),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.randn(len(x), 3, generator=torch.Generator().manual_seed(3)),
        lambda x: x.clone().exponential_(),
    ],
)
def test_a_part_draws_the_rows_of_the_whole(draw: Callable[[Tensor], Tensor]) -> None:
    batch = torch.linspace(0.1, 0.9, 6 * WIDTH).view(6, WIDTH)
    with AlignedDraws(begin=0, samples=6, whole=6):
        whole = draw(batch)
    for begin, end in ((0, 4), (4, 6)):
        with AlignedDraws(begin=begin, samples=end - begin, whole=6):
            part = draw(batch[begin:end])
        rows = len(whole) // 6
        assert torch.equal(part, whole[begin * rows : end * rows])


def test_noise_of_samples_in_dimension_1_is_the_same_in_their_parts() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch + torch.randn_like(batch)), F.dropout(batch, 0.5))

    job = bf.Job(model=linear, loss=loss, batch=lambda n: torch.rand(5, n, WIDTH), batch_dim=1)
    found = bf.verify(job, SETTINGS)
    assert found.holds
    (made,) = [each for each in found.comparisons if not each.why_not_compared]
    assert made.name == "splitting, with the same random numbers for each sample"


def test_the_error_says_which_reduction_the_loss_has() -> None:
    assert 'which is a sum: pass Job(reduction="sum")' in str(certified(Vae, vae_loss("sum")))
    job = bf.Job(model=linear, loss=diffusion_loss("mean"), batch=rows, reduction="sum")
    found = bf.verify(job, SETTINGS)
    assert not found.holds
    assert 'which is a mean: pass Job(reduction="mean")' in str(found)


def rows(count: int) -> Tensor:
    return torch.rand(count, WIDTH)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def trained_on_sums(micro_batch_size: int) -> bf.trainer.TrainingResult:
    torch.manual_seed(0)
    samples = torch.rand(18, WIDTH, generator=torch.Generator().manual_seed(1))
    job = bf.Job(
        model=linear,
        loss=squares,
        batch=rows,
        reduction="sum",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        data=lambda: bf.Data(train=samples, validation=samples),
    )
    settings = bf.Settings(micro_batch_size=micro_batch_size, gradient_accumulation_steps=6 // micro_batch_size)
    options = {"device": "cpu", "show_progress": False, "epochs": 2}
    return Trainer(job, settings, **options).fit()  # type: ignore[arg-type]


def test_micro_batches_of_a_sum_are_added_in_training_and_validation() -> None:
    whole, split = trained_on_sums(6), trained_on_sums(2)
    assert split.losses == pytest.approx(whole.losses)
    assert [v.loss for v in split.validations] == pytest.approx([v.loss for v in whole.validations])
    assert whole.losses[0] > whole.validations[-1].loss > 0.5 * whole.losses[-1], "both of a global batch"


def test_micro_batches_of_a_sum_are_added_in_a_loop_of_ones_own() -> None:
    job = bf.Job(model=linear, loss=squares, batch=rows, reduction="sum")
    batch, model = rows(16), linear()
    whole = squares(model, batch)
    whole.backward()
    expected = model.weight.grad.norm(), model.bias.grad.norm()  # type: ignore[union-attr, operator]
    model.zero_grad()
    step = bf.apply(SETTINGS, job, model, torch.optim.SGD(model.parameters(), lr=0.0))
    outcome = step(batch)
    assert float(outcome.loss) == pytest.approx(whole.item())
    assert float(outcome.gradient_norm) == pytest.approx(math.hypot(*map(float, expected)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"reduction": "max"}, 'must be "mean" or "sum"'),
        ({"reduction": "sum", "count": len}, "`count` has no effect"),
        ({"reduction": "sum", "embed": lambda model, batch: model(batch)}, "`reduction` has no effect"),
    ],
)
def test_reductions_that_mean_nothing_are_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bf.Job(model=linear, loss=squares, batch=rows, **parts)


Attention = Callable[[Tensor], tuple[Tensor, ...]]


@pytest.fixture
def seeded_attention() -> Iterator[Attention]:
    """Returns what fused attention on CUDA does: a result with rows, its seed and a mask that is empty."""
    library = torch.library.Library("brimful_tests", "FRAGMENT")
    library.define("attend(Tensor x) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("attend", lambda x: (x + torch.rand_like(x), torch.tensor(7), x.new_empty(0)), "CPU")
    yield torch.ops.brimful_tests.attend
    library._destroy()


def test_a_result_without_rows_is_left_as_it_is(
    seeded_attention: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    """On CUDA such a seed made every batch of a model with fused attention one that may not be split."""
    x = torch.randn(6, 3)
    with AlignedDraws(begin=0, samples=6, whole=6):
        whole = seeded_attention(x)[0]
    for begin in (0, 3):
        with AlignedDraws(begin=begin, samples=3, whole=6):
            found, seed, mask = seeded_attention(x[begin : begin + 3])
        assert torch.equal(found, whole[begin : begin + 3])
        assert (seed.item(), mask.numel()) == (7, 0)
