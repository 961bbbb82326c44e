"""A seed makes a run repeatable: weights, losses and batches, bit for bit, whatever was drawn before."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from brimful.job import Data
from helpers.tiny_jobs import all_samples, make_job, train


class Noisy(Dataset):
    """Draws from every generator when a sample is read."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self):
        return 48

    def __getitem__(self, index):
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return {"x": self.samples["x"][index] + noise, "y": self.samples["y"][index]}


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore:splitting the batch changes:UserWarning")  # BatchNorm, in halves
@pytest.mark.parametrize("workers", [0, 1])
def test_a_seed_repeats_weights_noise_and_order_bit_for_bit(workers):
    samples = all_samples()

    def run(seed):
        loader = DataLoader(Noisy(samples), batch_size=8, shuffle=True, num_workers=workers)
        job = make_job(model=net, data=lambda: Data(train=loader, validation=samples))
        trainer, result = train(job, 4, 2, epochs=2, seed=seed, ema_decay=0.9)
        return trainer.model.state_dict(), result

    state, result = run(5)
    for draw in (torch.rand, np.random.rand, random.seed):
        draw(11)
    again, repeated = run(5)
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    for record, other in zip(repeated.steps, result.steps, strict=True):
        assert (record.loss, record.gradient_norm) == (other.loss, other.gradient_norm)
    assert [record.loss for record in repeated.validations] == [record.loss for record in result.validations]
    assert run(6)[1].losses != result.losses


PROGRAM = """
import sys
sys.path.insert(0, "tests")
from equivalence.test_repeatable import digest
print(digest())
"""


def digest() -> str:
    """Of the weights after a short run."""
    torch.set_num_threads(1)
    trainer, _ = train(make_job(), 8, epochs=2)
    weights = trainer.model.state_dict().values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights)).hexdigest()


@pytest.mark.slow
def test_another_process_comes_to_the_same_weights(request):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == digest()
