"""Runs whose batches are made of samples of similar length, stopped anywhere and resumed."""

from functools import partial
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from brimful.errors import DataError
from brimful.job import Data, Job
from brimful.trainer import LengthBuckets, pad_batch
from helpers.tiny_jobs import StopAfter

LENGTHS = [3, 9, 14, 2, 7, 16, 5, 11, 8, 1, 13, 6, 10, 4, 15, 12, 3, 9, 2]
COLLATE = partial(pad_batch, pad_values={"tokens": 0, "labels": -100}, multiple_of=4)


class Texts(Dataset):
    """Texts whose tokens are replaced at random when they are read, as augmentation does."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.raises_at, self.reads = raises_at, 0

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        self.reads += 1
        if self.reads == self.raises_at:
            raise OSError("the disk is gone")
        tokens = torch.arange(LENGTHS[index]) % 10 + 1
        tokens[torch.rand(len(tokens)) < 0.3] = index % 10
        return {"tokens": tokens, "labels": tokens.roll(-1), "index": index}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 11))

    def forward(self, tokens):
        return self.layers(tokens)


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def bucketed_job(*, workers=0, raises_at=None, seen=None):
    def collate(samples):
        if seen is not None:
            seen.append([sample["index"] for sample in samples])
        return COLLATE(samples)

    def data():
        texts = Texts(raises_at)
        buckets = LengthBuckets(LENGTHS, 4, seed=1, window=2)
        loader = DataLoader(
            texts, batch_sampler=buckets, collate_fn=COLLATE if workers else collate, num_workers=workers
        )
        return Data(train=loader, longest=COLLATE([Texts()[index] for index in buckets.longest]))

    return Job(
        model=Tagger,
        loss=loss,
        batch=COLLATE([Texts()[index] for index in range(4)]),
        count=lambda batch: (batch["labels"] != -100).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=data,
        name="texts",
    )


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stopped_after", [2, 5, 8])  # in an epoch, at its end, in the next
def test_a_bucketed_run_is_resumed_bit_for_bit(trained, tmp_path, workers, stopped_after):
    job = partial(bucketed_job, workers=workers)
    whole, expected = trained(job(), 2, 2, epochs=3)
    run = {"epochs": 3, "run_dir": tmp_path / "run"}
    trained(job(), 2, 2, callbacks=[StopAfter(stopped_after)], **run)
    trainer, result = trained(job(), 2, 2, resume=True, **run)
    assert len(expected.steps) == 15
    assert result.losses == expected.losses
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_bucketed_run_whose_data_failed_goes_on_with_the_batch_that_was_missing(trained, tmp_path):
    seen: list[list[int]] = []
    _, expected = trained(bucketed_job(seen=seen), 4, epochs=2)
    with pytest.raises(DataError, match="the disk is gone"):
        trained(bucketed_job(raises_at=10), 4, epochs=2, run_dir=tmp_path / "run")
    again: list[list[int]] = []
    _, result = trained(bucketed_job(seen=again), 4, epochs=2, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses
    assert again == seen  # those before the place are read once more, and all others once
    first, second = (list(chain(*batches)) for batches in (seen[:5], seen[5:]))
    assert sorted(first) == sorted(second) == list(range(len(LENGTHS)))
    assert first != second
