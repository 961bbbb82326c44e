"""Batches that differ in a dimension other than that of the samples: of which do predictions speak?"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

CPU = bf.devices.find_device("cpu")
WORDS, WIDTH, SHORT, LONG = 100, 32, 8, 96
CLOSE = 1.02
"""Measured over predicted peak that counts as the same: the project's own bound of errors on a CPU."""


class Mean(nn.Module):
    """Mean of wide states of all tokens, whose activations are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)).mean(1))


def _ids(samples: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (samples, length))


def _texts(samples: int, length: int) -> dict[str, Tensor]:
    return {"x": _ids(samples, length), "y": torch.randint(0, 2, (samples,))}


def _text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _tuple_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


TEXTS = bf.Job(model=Mean, loss=_text_loss, batch=lambda n: _texts(n, SHORT), optimizer="sgd")


def _peak(job: bf.Job, batch: Any, settings: bf.Settings) -> int:
    """Measured peak of a step on one batch, whatever the job's own batches are."""
    alone = replace(job, batch=lambda _samples: batch, data=None)
    return bf.measure(alone, settings, "cpu").measured_peak_allocated_bytes


def _speaks(notes: tuple[str, ...]) -> bool:
    """Whether notes give lengths, and how a longer batch is named."""
    return any("Predicted for" in note and "longest" in note for note in notes)


def _judge(predicted: int, measured: int, notes: tuple[str, ...]) -> Verdict:
    if measured <= predicted * CLOSE:
        return Verdict.RIGHT
    if _speaks(notes):
        return Verdict.STATED
    raise WrongError(
        f"{predicted:,} bytes predicted, {measured:,} measured of the longest batch; notes {notes}"
    )


# Draws of `Job.batch`


def _drawn(job: bf.Job, longest: Callable[[int], Any], samples: int = 8) -> Verdict:
    """Plans with different random states are the same, within the budget at the longest length, or say so."""
    peaks, notes, verdicts = set(), (), []
    for seed in range(2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        found = bf.estimate(job, CPU, micro_batch_size=samples)
        peaks.add(found.predicted_peak_allocated_bytes)
        notes = found.notes
        measured = _peak(job, longest(samples), found.settings)
        verdicts.append(_judge(found.predicted_peak_allocated_bytes, measured, notes))
    if len(peaks) > 1 and not _speaks(notes):
        raise WrongError(f"predictions of one job differ: {peaks}")
    return verdicts[-1]


def _padded_texts() -> Verdict:
    job = replace(TEXTS, batch=lambda n: _texts(n, int(torch.randint(SHORT, LONG, (n,)).max())))
    return _drawn(job, lambda n: _texts(n, LONG - 1))


def _waveforms() -> Verdict:
    def made(n: int, length: int | None = None) -> Tensor:
        return torch.randn(n, 1, length or random.randrange(500, 4000))

    job = bf.Job(
        model=lambda: nn.Sequential(
            nn.Conv1d(1, 16, 9), nn.ReLU(), nn.Conv1d(16, 16, 9), nn.AdaptiveAvgPool1d(1)
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=made,
    )
    return _drawn(job, lambda n: made(n, 3999), 4)


def _time_first() -> Verdict:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    def made(n: int, length: int | None = None) -> dict[str, Tensor]:
        length = length or int(np.random.randint(10, 200))
        return {"x": torch.randn(length, n, 8), "tags": torch.randint(0, 4, (length, n))}

    job = bf.Job(
        model=Tagger,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["tags"].flatten()),
        batch=made,
        batch_dim=1,
        optimizer="adam",
    )
    return _drawn(job, lambda n: made(n, 199))


def _image_sizes() -> Verdict:
    def made(n: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        size = size or 16 * int(torch.randint(2, 8, ()))
        return torch.randn(n, 3, size, size), torch.randint(0, 5, (n,))

    job = bf.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        ),
        loss=_tuple_loss,
        batch=made,
        optimizer="sgd",
    )
    return _drawn(job, lambda n: made(n, 112), 4)


@dataclass
class Translated:
    """Source and target, each of its own length."""

    source: Tensor
    target: Tensor


def _two_lengths() -> Verdict:
    def made(n: int, source: int = 0, target: int = 0) -> Translated:
        return Translated(
            _ids(n, source or random.randrange(8, 64)), _ids(n, target or random.randrange(8, 64))
        )

    job = bf.Job(
        model=Mean,
        loss=lambda model, batch: model(batch.source).mean() + model(batch.target).square().mean(),
        batch=made,
        optimizer="sgd",
    )
    return _drawn(job, lambda n: made(n, 63, 63))


def _objects_in_images() -> Verdict:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 64)

        def forward(self, images: Tensor, boxes: list[Tensor]) -> Tensor:
            states = self.head(self.conv(images).mean((2, 3)))
            return sum(
                (box @ states.new_ones(4, 64) + state).relu().square().mean()
                for box, state in zip(boxes, states, strict=True)
            )

    def made(n: int, most: int = 0) -> dict[str, Any]:
        counts = [most] * n if most else torch.randint(1, 500, (n,)).tolist()
        return {
            "images": torch.randn(n, 3, 16, 16),
            "targets": [{"boxes": torch.rand(count, 4)} for count in counts],
        }

    job = bf.Job(
        model=Detector,
        loss=lambda model, batch: (
            model(batch["images"], [t["boxes"] for t in batch["targets"]]) / len(batch["targets"])
        ),
        batch=made,
        optimizer="sgd",
    )
    return _drawn(job, lambda n: made(n, 499), 4)


class Packed(nn.Module):
    """A GRU over packed texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, 16, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.rnn(pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False))[1]


def _packed_sequences() -> Verdict:
    def made(n: int, length: int = 0) -> dict[str, Tensor]:
        lengths = torch.full((n,), length) if length else torch.randint(4, 128, (n,))
        return {"x": _ids(n, int(lengths.max())), "lengths": lengths}

    job = bf.Job(model=Packed, loss=lambda model, batch: model(batch["x"], batch["lengths"]).mean(), batch=made)
    return _drawn(job, lambda n: made(n, 127))


def _even_batches_alone() -> Verdict:
    def made(n: int, length: int = 0) -> Tensor:
        if n % 4:
            raise ValueError("pairs of pairs")
        return _ids(n, length or random.randrange(SHORT, LONG))

    job = bf.Job(
        model=Mean, loss=lambda model, batch: model(batch).square().mean(), batch=made, optimizer="sgd"
    )
    return _drawn(job, lambda n: made(n, LONG - 1))


def _own_loop() -> Verdict:
    def loop(model: nn.Module, batches: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            _text_loss(model, batch).backward()
            optimizer.step()

    job = replace(TEXTS, batch=lambda n: _texts(n, random.choice([16, 24, 64])), loop=loop)
    return _drawn(job, lambda n: _texts(n, 64))


# Data


SEQUENCES = [SHORT] * 40 + [LONG] + [SHORT + 4] * 23


def _samples(lengths: list[int] = SEQUENCES) -> list[tuple[Tensor, int]]:
    return [(_ids(1, length)[0], index % 2) for index, length in enumerate(lengths)]


def _pad(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {
        "x": pad_sequence([ids for ids, _ in samples], batch_first=True),
        "y": torch.tensor([y for _, y in samples]),
    }


class Stream(IterableDataset):
    """Samples without indices."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(_samples())


class Reiterable:
    """Batches, again for each epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _of_data(train: Any, samples: int = 8) -> Verdict:
    """The estimate is of the longest batch of the data, which are as they were afterwards."""
    own = getattr(train, "generator", None)
    state = None if own is None else own.get_state()
    found = bf.estimate(replace(TEXTS, data=lambda: bf.Data(train=train)), CPU, micro_batch_size=samples)
    if own is not None and not torch.equal(state, own.get_state()):
        raise WrongError("the loader's order has changed")
    measured = _peak(TEXTS, _texts(samples, LONG), found.settings)
    return _judge(found.predicted_peak_allocated_bytes, measured, found.notes)


def _padded_loader() -> Verdict:
    own = torch.Generator().manual_seed(3)
    return _of_data(DataLoader(_samples(), batch_size=8, shuffle=True, generator=own, collate_fn=_pad))


def _stream_loader() -> Verdict:
    return _of_data(DataLoader(Stream(), batch_size=8, collate_fn=_pad))


def _buckets() -> Verdict:
    indices = sorted(range(len(SEQUENCES)), key=SEQUENCES.__getitem__)
    buckets = [indices[start : start + 8] for start in range(0, len(indices), 8)]
    return _of_data(DataLoader(_samples(), batch_sampler=buckets, collate_fn=_pad))


def _batches_of_lengths() -> Verdict:
    return _of_data(Reiterable([_texts(8, length) for length in (16, 24, LONG, 16, 16)]))


def _one_longer_tensor() -> Verdict:
    return _of_data(_texts(64, LONG))


def _texts_tokenized_late() -> Verdict:
    class Texts(Dataset):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": "a" * (LONG if index == 37 else SHORT), "label": index % 2}

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.ones(len(sample["text"]), dtype=torch.long) for sample in samples]
        return {
            "x": pad_sequence(ids, batch_first=True),
            "y": torch.tensor([sample["label"] for sample in samples]),
        }

    return _of_data(DataLoader(Texts(), batch_size=8, collate_fn=collate))


def _a_used_up_iterator() -> Verdict:
    """Data that can be iterated over once are not touched."""
    batches = iter([_texts(8, length) for length in (16, LONG)])
    bf.estimate(replace(TEXTS, data=lambda: bf.Data(train=batches)), CPU, micro_batch_size=8)
    if len(list(batches)) != 2:
        raise WrongError("the iterator was used up")
    return Verdict.RIGHT


def _named_longest() -> Verdict:
    job = replace(
        TEXTS, data=lambda: bf.Data(train=Reiterable([_texts(8, 16)]), longest=lambda n: _texts(n, LONG))
    )
    found = bf.plan(job, CPU, global_batch_size=8, budget="90%")
    return _judge(found.budget_bytes, _peak(TEXTS, _texts(8, LONG), found.settings), found.notes)


# Training


def _trained(
    lengths: tuple[int, ...],
    *,
    made: Callable[[int, int], Any] = _texts,
    job: bf.Job = TEXTS,
    **options: Any,
) -> Verdict:
    """The first larger batch is told before it runs; what is reported as measured is the peak of the run."""
    job = replace(job, batch=lambda n: made(n, SHORT))
    plan = bf.plan(job, CPU, global_batch_size=16, micro_batch_size=8)
    data = bf.Data(train=Reiterable([made(16, length) for length in lengths]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result, _ = bf.fit(job, plan, data=data, device="cpu", verify=False, show_progress=False, **options)
    if len(result.steps) != len(lengths):
        raise WrongError(f"{len(result.steps)} steps")
    largest = _peak(job, made(16, max(lengths)), plan.settings)
    measured = result.measured_peak_allocated_bytes or 0
    if not largest / CLOSE <= measured <= largest * CLOSE:
        raise WrongError(f"{measured:,} bytes reported as measured, the longest batch takes {largest:,}")
    says = [text for text in (*result.notes, *(str(each.message) for each in told)) if "planned" in text]
    if max(lengths) > SHORT and not says:
        raise WrongError("a longer batch than planned is not told")
    if max(lengths) == SHORT and says:
        raise WrongError(f"told of batches as planned: {says}")
    return Verdict.RIGHT


def _longer_late() -> Verdict:
    return _trained((SHORT,) * 5 + (LONG,) + (SHORT,))


def _longer_first() -> Verdict:
    return _trained((LONG, *(SHORT,) * 5))


def _longer_and_longer() -> Verdict:
    return _trained((8, 16, 24, 32, 40, 48, 64, 96))


def _longer_tuples() -> Verdict:
    def made(n: int, length: int) -> tuple[Tensor, ...]:
        return tuple(_texts(n, length).values())

    return _trained((8, 8, 8, 8, 96, 8), made=made, job=replace(TEXTS, loss=_tuple_loss))


def _longer_second_update() -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        return _trained((8, 64, 8, 8, 8), run_dir=folder)


def _as_planned() -> Verdict:
    return _trained((SHORT,) * 5)


def _applied(lengths: tuple[int, ...]) -> list[str]:
    plan = bf.plan(TEXTS, CPU, global_batch_size=16)
    model = Mean()
    step = bf.apply(plan, TEXTS, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in lengths:
            step(_texts(16, length))
    return [text for each in told if "planned" in (text := str(each.message))]


def _applied_to_longer() -> Verdict:
    told = _applied((SHORT, LONG, SHORT, LONG))
    if len(told) != 1 or str(LONG) not in told[0] or str(SHORT) not in told[0]:
        raise WrongError(f"told of a longer batch: {told}")
    return Verdict.STATED


def _applied_as_planned() -> Verdict:
    if told := _applied((SHORT, SHORT // 2, SHORT)):
        raise WrongError(f"told of batches as planned: {told}")
    return Verdict.RIGHT


def _prepared_for_shorter() -> Verdict:
    plan = bf.plan(TEXTS, CPU, global_batch_size=16)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bf.prepare(plan, model, optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in (SHORT, LONG, LONG):
            for _ in range(plan.settings.gradient_accumulation_steps):
                _text_loss(model, _texts(plan.settings.micro_batch_size, length)).backward()
            optimizer.step()
            optimizer.zero_grad()
    says = [text for each in told if "planned" in (text := str(each.message))]
    if len(says) != 1 or str(LONG) not in says[0]:
        raise WrongError(f"told of a longer batch: {says}")
    return Verdict.STATED


# Lightning and Transformers


def _lightning(
    loader: DataLoader, longest: Any, loss: Callable[[nn.Module, Any], Tensor] = _text_loss
) -> Verdict:
    import lightning

    import brimful.integrations.lightning as bfl

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mean()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plan = bfl.plan(Module(), loader, CPU, global_batch_size=8, micro_batch_size=8)
    measured = bf.measure(replace(bfl.job(Module(), loader), batch=longest), plan.settings, "cpu")
    return _judge(plan.predicted_peak_allocated_bytes, measured.measured_peak_allocated_bytes, plan.notes)


def _lightning_padded() -> Verdict:
    return _lightning(DataLoader(_samples(), batch_size=8, collate_fn=_pad), _texts(8, LONG))


def _lightning_sorted() -> Verdict:
    samples = _samples([SHORT] * 400 + [LONG] * 8)
    return _lightning(DataLoader(samples, batch_size=8, collate_fn=_pad), _texts(8, LONG))


def _lightning_shuffled() -> Verdict:
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(_samples(), batch_size=8, shuffle=True, generator=own, collate_fn=_pad, drop_last=True)
    before = own.get_state()
    verdict = _lightning(loader, _texts(8, LONG))
    if not torch.equal(before, own.get_state()):
        raise WrongError("the loader's order has changed")
    return verdict


def _lightning_stream() -> Verdict:
    return _lightning(DataLoader(Stream(), batch_size=8, collate_fn=_pad), _texts(8, LONG))


def _lightning_buckets() -> Verdict:
    indices = sorted(range(len(SEQUENCES)), key=SEQUENCES.__getitem__)
    buckets = [indices[start : start + 8] for start in range(0, len(indices), 8)]
    return _lightning(DataLoader(_samples(), batch_sampler=buckets, collate_fn=_pad), _texts(8, LONG))


def _lightning_fixed() -> Verdict:
    import brimful.integrations.lightning  # noqa: F401

    data = TensorDataset(_ids(64, 16), torch.randint(0, 2, (64,)))
    return _lightning(
        DataLoader(data, batch_size=8), (_ids(8, 16), torch.ones(8, dtype=torch.long)), _tuple_loss
    )


def _transformers(
    lengths: list[int], *, longest: int, says: bool = True, stream: bool = False, **arguments: Any
) -> Verdict:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import brimful.integrations.transformers as bft

    texts = [{"input_ids": [3] * length, "labels": [3] * length} for length in lengths]

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
        return {"input_ids": ids, "labels": ids}

    class Texts(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter(texts)

    config = GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            folder, per_device_train_batch_size=8, use_cpu=True, report_to=[], max_steps=2, **arguments
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), asked, train_dataset=Texts() if stream else texts, data_collator=collate
        )
        plan = bft.plan(trainer, CPU, budget="1GiB", micro_batch_size=8)
        ids = torch.full((8, longest), 3)
        job = replace(bft.job(trainer), batch=lambda n: {"input_ids": ids[:n], "labels": ids[:n]})
        measured = bf.measure(job, plan.settings, "cpu").measured_peak_allocated_bytes
    if says != any(str(longest) in note or "stream" in note for note in plan.notes):
        raise WrongError(f"lengths of the plan: {plan.notes}")
    return _judge(plan.predicted_peak_allocated_bytes, measured, plan.notes)


def _trainer_padded() -> Verdict:
    return _transformers([8] * 30 + [90] + [12] * 30, longest=90)


def _trainer_sorted() -> Verdict:
    return _transformers([8] * 300 + [90] * 3, longest=90)


def _trainer_grouped() -> Verdict:
    return _transformers([8, 16, 90, 20] * 10, longest=90, train_sampling_strategy="group_by_length")


def _trainer_stream() -> Verdict:
    return _transformers([8, 16, 90, 20] * 10, longest=90, stream=True)


def _trainer_fixed() -> Verdict:
    return _transformers([16] * 40, longest=16, says=False)


def _lightning_meets_longer() -> Verdict:
    import lightning

    import brimful.integrations.lightning as bfl

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mean()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return _text_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    short, all_lengths = (
        DataLoader(_samples(lengths), batch_size=8, collate_fn=_pad) for lengths in ([SHORT] * 64, SEQUENCES)
    )
    plan = bfl.plan(Module(), short, CPU)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = lightning.Trainer(
            **bfl.trainer_options(plan), **options, accelerator="cpu", callbacks=[bfl.PlanCallback(plan)]
        )
        trainer.fit(Module(), bfl.loader(plan, all_lengths))
    return _told_once([str(each.message) for each in told], LONG)


def _trainer_meets_longer() -> Verdict:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import brimful.integrations.transformers as bft

    texts = [{"input_ids": [3] * length, "labels": [3] * length} for length in [8] * 20 + [90] + [8] * 11]

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
        return {"input_ids": ids, "labels": ids}

    config = GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asked = TrainingArguments(
            folder, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no"
        )
        trainer = Trainer(GPT2LMHeadModel(config), asked, train_dataset=texts, data_collator=collate)
        plan = bft.plan(trainer, CPU, longest=texts[0], budget="1GiB")
        bft.apply(plan, trainer, report=False)
        trainer.train()
    return _told_once([str(each.message) for each in told], 90)


def _told_once(told: list[str], length: int) -> Verdict:
    says = [text for text in told if "planned" in text]
    if len(says) != 1 or str(length) not in says[0]:
        raise WrongError(f"told of a longer batch: {says}")
    return Verdict.STATED


# Controls


def _silent(job: bf.Job) -> Verdict:
    """Batches of one size: no note of lengths, and the prediction of the batch itself."""
    found = bf.estimate(job, CPU, micro_batch_size=8)
    if any("Predicted for" in note for note in found.notes):
        raise WrongError(f"lengths are noted: {found.notes}")
    torch.manual_seed(0)
    measured = _peak(job, job.batch(8), found.settings)
    if not measured / CLOSE <= found.predicted_peak_allocated_bytes <= measured * CLOSE:
        raise WrongError(f"{found.predicted_peak_allocated_bytes:,} predicted, {measured:,} measured")
    return Verdict.RIGHT


def _fixed_texts() -> Verdict:
    return _silent(TEXTS)


def _fixed_loader() -> Verdict:
    return _silent(
        replace(
            TEXTS, data=lambda: bf.Data(train=DataLoader(_samples([SHORT] * 64), batch_size=8, collate_fn=_pad))
        )
    )


def _fixed_tensors() -> Verdict:
    return _silent(replace(TEXTS, data=lambda: bf.Data(train=_texts(64, SHORT), validation=_texts(8, LONG))))


def _padded_to_a_fixed_length() -> Verdict:
    def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        batch = _pad(samples)
        return batch | {"x": F.pad(batch["x"], (0, LONG - batch["x"].shape[1]))}

    job = replace(TEXTS, batch=lambda n: _texts(n, LONG))
    return _silent(
        replace(job, data=lambda: bf.Data(train=DataLoader(_samples(), batch_size=8, collate_fn=collate)))
    )


def _random_values() -> Verdict:
    def made(n: int) -> Tensor:
        return torch.full((n, 24), int(torch.randint(0, WORDS, ())))

    return _silent(bf.Job(model=Mean, loss=lambda model, batch: model(batch).square().mean(), batch=made))


_PROGRAMS: dict[str, tuple[Callable[[], Verdict], ...]] = {
    "lengths of draws": (
        _padded_texts,
        _waveforms,
        _time_first,
        _image_sizes,
        _two_lengths,
        _objects_in_images,
        _packed_sequences,
        _even_batches_alone,
        _own_loop,
    ),
    "lengths of data": (
        _padded_loader,
        _stream_loader,
        _buckets,
        _batches_of_lengths,
        _one_longer_tensor,
        _texts_tokenized_late,
        _a_used_up_iterator,
        _named_longest,
    ),
    "longer batches in training": (
        _longer_late,
        _longer_first,
        _longer_and_longer,
        _longer_tuples,
        _longer_second_update,
        _as_planned,
        _applied_to_longer,
        _applied_as_planned,
        _prepared_for_shorter,
    ),
    "lengths in other trainers": (
        _lightning_padded,
        _lightning_sorted,
        _lightning_shuffled,
        _lightning_stream,
        _lightning_buckets,
        _lightning_fixed,
        _lightning_meets_longer,
        _trainer_padded,
        _trainer_sorted,
        _trainer_grouped,
        _trainer_stream,
        _trainer_fixed,
        _trainer_meets_longer,
    ),
    "batches of one length": (
        _fixed_texts,
        _fixed_loader,
        _fixed_tensors,
        _padded_to_a_fixed_length,
        _random_values,
    ),
}

CASES = tuple(
    Case(kind, program.__name__.strip("_").replace("_", " "), program)
    for kind, programs in _PROGRAMS.items()
    for program in programs
)
