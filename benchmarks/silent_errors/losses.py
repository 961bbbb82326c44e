"""What decides whether a batch may be split, and state that forwards write: compared with plain loops."""

from __future__ import annotations

import copy
import math
import random
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

WIDTH = 32
SAMPLES = 512
SPLIT = bf.Settings(micro_batch_size=SAMPLES // 4, gradient_accumulation_steps=4)
TOLERANCE = 2e-5
"""Of a loss after four steps: float32, added in another order."""

Loss = Callable[[nn.Module, object], Tensor]


def pairs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randn(n, 8)


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def losses_of(job: bf.Job, settings: bf.Plan | bf.Settings | None, batches: list[object]) -> list[float]:
    """The losses of a few steps, with a plan or in a plain loop, from the same weights."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    found = []
    if settings is not None:
        step = bf.apply(settings, job, model, optimizer)
        for batch in batches:
            found.append(float(step(batch).loss.detach()))
        return found
    for batch in batches:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def differ(found: list[float], expected: list[float]) -> bool:
    return any(abs(a - b) > TOLERANCE * max(abs(b), 0.1) for a, b in zip(found, expected, strict=True))


def batches_of(job: bf.Job) -> list[object]:
    torch.manual_seed(1)
    return [job.batch(SAMPLES) for _ in range(4)]


def compared(make: Callable[[], bf.Job], *, is_control: bool) -> Verdict:
    """Plan, apply and verify a job; each must be right, refuse, or say what differs, and not so a control."""
    job = make()
    batches = batches_of(job)
    expected = losses_of(make(), None, batches)
    verdicts = [planned(job, make, batches, expected)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            is_wrong = differ(losses_of(make(), SPLIT, batches), expected)
            verdicts.append(Verdict.RIGHT)
        except bf.BrimfulError:
            is_wrong, _ = True, verdicts.append(Verdict.REFUSED)
    said = [str(each.message) for each in warned if "split" in str(each.message)]
    if verdicts[-1] is Verdict.RIGHT and is_wrong:
        if not said:
            raise WrongError("apply splits and trains otherwise without a word")
        verdicts[-1] = Verdict.STATED
    if is_control and (said or is_wrong):
        raise WrongError(f"a batch that may be split is not: {said or verdicts}")
    if is_wrong:
        report = bf.verify(make(), SPLIT, "cpu")
        if report.holds and not report.known_differences:
            raise WrongError("verify calls another training the same")
    if is_control and verdicts[0] is not Verdict.RIGHT:
        raise WrongError("no plan splits a batch that may be split")
    return next((v for v in (Verdict.REFUSED, Verdict.STATED) if v in verdicts), Verdict.RIGHT)


def planned(job: bf.Job, make: Callable[[], bf.Job], batches: list[object], expected: list[float]) -> Verdict:
    """A plan that has to split the batch."""
    try:
        plan = bf.plan(
            job, "cpu", global_batch_size=SAMPLES, micro_batch_size=None, budget="45%", recompute="none"
        )
    except bf.BrimfulError:
        return Verdict.REFUSED
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            is_wrong = differ(losses_of(make(), plan, batches), expected)
        except bf.BrimfulError:
            return Verdict.REFUSED
    notes = [note for note in plan.notes if note.startswith("The loss must be a mean over samples")]
    if is_wrong and notes and any("could not be checked" in str(each.message) for each in warned):
        return Verdict.STATED
    if is_wrong:
        raise WrongError(f"the plan ({plan.settings.describe()}) trains otherwise; notes: {plan.notes}")
    return Verdict.RIGHT


class Student(nn.Module):
    """Two layers with room for a state; wide, so that activations decide the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 8))
        self.set_up()

    def set_up(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Moco(Student):
    def set_up(self) -> None:
        self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
                own.mul_(0.9).add_(followed, alpha=0.1)
            kept = self.teacher(x)
        return self.inner(x) - 0.5 * kept


class MocoByData(Student):
    """The teacher is written through `.data`, which raises no version."""

    def set_up(self) -> None:
        self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, followed in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
            own.data = own.data * 0.9 + followed.data * 0.1
        return self.inner(x) - 0.5 * self.teacher(x).detach()


class Centre(Student):
    """DINO's centre as a plain attribute."""

    def set_up(self) -> None:
        self.centre = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        centred = found - self.centre
        self.centre = 0.5 * self.centre + 0.5 * found.detach().mean(0)
        return centred


class Lazy(Student):
    """The state is made by the first forward."""

    def set_up(self) -> None:
        self.mean = None

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().square().mean(0)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return self.inner(x / (1 + self.mean))


class Queue(Student):
    def set_up(self) -> None:
        self.queue: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        self.queue.append(found.detach().mean(0))
        return found - torch.stack(tuple(self.queue)).mean(0)


class InDict(Student):
    def set_up(self) -> None:
        self.memory = {"scale": torch.ones(1)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.memory["scale"].mul_(0.9).add_(x.abs().mean(), alpha=0.1)
        return self.inner(x) * self.memory["scale"]


class Tempered(Student):
    def set_up(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + math.exp(-self.calls))


class EveryThird(Student):
    """Forwards are counted, and every third one is another."""

    def set_up(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (2.0 if self.calls % 3 == 0 else 1.0)


class Hooked(Student):
    def set_up(self) -> None:
        kept = {"mean": torch.zeros(WIDTH)}

        def centre(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            kept["mean"] = 0.5 * kept["mean"] + 0.5 * args[0].detach().square().mean(0)
            return (args[0] - kept["mean"],)

        self.inner.register_forward_pre_hook(centre)


class Counted(Student):
    """A control: what is counted and kept for a log is read by no forward."""

    def set_up(self) -> None:
        self.calls, self.log, self.features = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.features = self.inner[0](x)
        found = self.inner[2](self.inner[1](self.features))
        self.log.append(found.detach().mean())
        return found


class Frozen(Student):
    """A control: a teacher that stays as it is."""

    def set_up(self) -> None:
        self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) - 0.5 * self.teacher(x)


class Renormed(Student):
    """A control: rows that are normalised again are the same."""

    def set_up(self) -> None:
        self.table = nn.Embedding(16, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.table((x[:, 0].abs() * 4).long().clamp(max=15)))


def averaged_outside() -> bf.Job:
    average = torch.zeros(8)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal average
        found = model(batch[0])
        average = 0.5 * average + 0.5 * found.detach().mean(0)
        return F.mse_loss(found - average, batch[1])

    return bf.Job(model=Student, loss=loss, batch=pairs, optimizer="sgd", name="average")


def job_of(model: Callable[[], nn.Module]) -> bf.Job:
    return bf.Job(model=model, loss=mean_square, batch=pairs, optimizer="sgd", name=model.__name__)


STATE = "state written by forward"
STATEFUL: dict[str, Callable[[], bf.Job]] = {
    "a momentum teacher in the model": lambda: job_of(Moco),
    "a teacher written through .data": lambda: job_of(MocoByData),
    "a centre that is an attribute": lambda: job_of(Centre),
    "a mean made by the first forward": lambda: job_of(Lazy),
    "a queue in a deque": lambda: job_of(Queue),
    "a scale in a dict": lambda: job_of(InDict),
    "a temperature that falls with each call": lambda: job_of(Tempered),
    "every third forward is another": lambda: job_of(EveryThird),
    "a mean kept by a hook": lambda: job_of(Hooked),
    "an average in the loss's closure": averaged_outside,
}
STATELESS: dict[str, Callable[[], bf.Job]] = {
    "control: counts and logs": lambda: job_of(Counted),
    "control: a frozen teacher": lambda: job_of(Frozen),
    "control: rows of bounded norm": lambda: job_of(Renormed),
}


VOCABULARY, LENGTH = 24, 1
IGNORED = -100
PADDING = 0


def tokens(n: int, *, ignored: float = 0.1, value: int = IGNORED, length: int = LENGTH) -> dict[str, Tensor]:
    """Texts of one token, some of whose labels are ignored: most often none of four samples'."""
    labels = torch.randint(1, VOCABULARY, (n, length))
    labels[torch.rand(n, length) < ignored] = value
    return {"x": torch.randint(0, VOCABULARY, (n, length)), "y": labels}


def reader() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, VOCABULARY)
    )


def of_tokens(batch: dict[str, Tensor], model: nn.Module) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).flatten(0, 1), batch["y"].flatten()


def text_job(loss: Callable[[Tensor, Tensor], Tensor], **data: float) -> bf.Job:
    return bf.Job(
        model=reader,
        loss=lambda model, batch: loss(*of_tokens(batch, model)),
        batch=lambda n: tokens(n, **data),
        optimizer="sgd",
        name="texts",
    )


def each(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none", ignore_index=IGNORED)


def counted(labels: Tensor) -> Tensor:
    return labels != IGNORED


def beside_metric(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean, beside a metric over the labels that count, which is logged."""
    right = ((scores.detach().argmax(1) == labels) * counted(labels)).sum() / counted(labels).sum()
    return F.cross_entropy(scores, labels) + 0.0 * float(right)


def beside_mean_of_class(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean, beside that of some labels, which is logged with its gradient."""
    losses = each(scores, labels)
    losses[labels < VOCABULARY // 2].mean()
    return losses.mean()


def shares_in_heads(scores: Tensor, labels: Tensor) -> Tensor:
    share = counted(labels) / counted(labels).sum()
    return sum((each(scores * scale, labels) * share).sum() for scale in (1.0, 0.5, 0.25, 0.125))


CLASS_WEIGHTS = torch.linspace(0.1, 3.0, VOCABULARY)


def focal(scores: Tensor, labels: Tensor) -> Tensor:
    """Normalised by the number of rare labels, as detectors do."""
    is_rare = (labels < 4).float()
    losses = F.cross_entropy(scores, labels, reduction="none")
    return (losses * is_rare).sum() / max(float(is_rare.sum()), 1.0)


def per_text(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A control: a mean over each text's own tokens, then over texts."""
    losses = F.cross_entropy(
        model(batch["x"]).transpose(1, 2), batch["y"], reduction="none", ignore_index=IGNORED
    )
    mask = batch["y"] != IGNORED
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A control: the last token of each text has no label, as in causal language models."""
    labels = F.pad(batch["y"], (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), labels.flatten())


MEAN = "mean over something else than samples"
MEANS: dict[str, Callable[[], bf.Job]] = {
    "ignored labels": lambda: text_job(F.cross_entropy),
    "eight labels a sample, few ignored": lambda: text_job(F.cross_entropy, length=8, ignored=0.02),
    "padding as ignore_index": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores, labels, ignore_index=PADDING), value=PADDING
    ),
    "class weights": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores, labels, weight=CLASS_WEIGHTS), ignored=0
    ),
    "nll_loss with class weights": lambda: text_job(
        lambda scores, labels: F.nll_loss(scores.log_softmax(1), labels, weight=CLASS_WEIGHTS), ignored=0
    ),
    "a sum over the mask's": lambda: text_job(
        lambda scores, labels: (each(scores, labels) * counted(labels)).sum() / counted(labels).sum()
    ),
    "weights that are shares of the mask": lambda: text_job(
        lambda scores, labels: (each(scores, labels) * (counted(labels) / counted(labels).sum())).sum()
    ),
    "such weights, used often": lambda: text_job(shares_in_heads),
    "a product with the reciprocal of a count": lambda: text_job(
        lambda scores, labels: each(scores, labels).sum() * counted(labels).sum().reciprocal()
    ),
    "a sum over a count that is read": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores, labels, reduction="sum") / counted(labels).sum().item()
    ),
    "chosen losses": lambda: text_job(lambda scores, labels: each(scores, labels)[counted(labels)].mean()),
    "chosen scores": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores[counted(labels)], labels[counted(labels)])
    ),
    "masked_select": lambda: text_job(
        lambda scores, labels: torch.masked_select(each(scores, labels), counted(labels)).mean()
    ),
    "label smoothing and ignored labels": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1)
    ),
    "by the number of rare labels": lambda: text_job(focal, ignored=0),
}
PLAIN_MEANS: dict[str, Callable[[], bf.Job]] = {
    "control: cross_entropy": lambda: text_job(F.cross_entropy, ignored=0),
    "control: label smoothing": lambda: text_job(
        lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1), ignored=0
    ),
    "control: a fixed divisor": lambda: text_job(
        lambda scores, labels: each(scores, labels).sum() / len(labels), ignored=0
    ),
    "control: a mean beside a metric": lambda: text_job(beside_metric, ignored=0),
    "control: a mean beside that of a class": lambda: text_job(beside_mean_of_class, ignored=0),
    "control: a mean of masked losses": lambda: text_job(
        lambda scores, labels: (each(scores, labels) * counted(labels)).mean()
    ),
    "control: weights of single labels": lambda: text_job(
        lambda scores, labels: F.binary_cross_entropy_with_logits(
            scores[:, 0], (labels > 8).float(), weight=1 + (labels > 4).float()
        ),
        ignored=0,
    ),
    "control: a mean of each text's": lambda: replace(text_job(F.cross_entropy, length=8), loss=per_text),
    "control: no label after the last token": lambda: replace(
        text_job(F.cross_entropy, ignored=0, length=8), loss=shifted
    ),
    "control: counted": lambda: replace(
        text_job(F.cross_entropy), count=lambda batch: (batch["y"] != IGNORED).sum()
    ),
}


class Remembers(nn.Module):
    """A layer with a state, to be recomputed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.followed = copy.deepcopy(self.linear).requires_grad_(False)
        self.calls, self.mean, self.queue = 0, torch.zeros(WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.kind == "a count"
        if self.kind == "a mean":
            x = x - self.mean
            self.mean = 0.5 * self.mean + 0.5 * x.detach().square().mean(0)
        elif self.kind == "a list":
            self.queue.append(x.detach().square().mean(0))
            x = x - torch.stack(self.queue).mean(0)
        elif self.kind == "a teacher":
            with torch.no_grad():
                for own, other in zip(self.followed.parameters(), self.linear.parameters(), strict=True):
                    own.mul_(0.5).add_(other, alpha=0.5)
            x = x + self.followed(x)
        return F.gelu(self.linear(x * (1 + 0.1 * self.calls)))


class RemembersByData(nn.Module):
    """A layer that writes to its state through `.data`, which raises no version."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.zeros(WIDTH))
        followed = self.linear.weight.detach().clone()
        self.held = followed if kind == "a held teacher" else nn.Parameter(followed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.codes + x @ self.held.detach().clone()
        mean = 0.5 * x.detach().square().mean(0)
        if self.kind == "a codebook":
            self.codes.data.mul_(0.5).add_(mean)
        elif self.kind == "another codebook":
            self.codes.data = 0.5 * self.codes + mean
        elif self.kind == "a part of a codebook":
            self.codes.data[1:].copy_(mean[1:])
        else:
            self.held.data.lerp_(self.linear.weight.data, 0.5)
        return F.gelu(self.linear(x))


class Draws(nn.Module):
    """A layer that draws from a generator of its own, or counts in an array."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held, self.draw = {
            "torch's generator": lambda: (
                torch.Generator().manual_seed(1),
                lambda g: torch.rand((), generator=g),
            ),
            "Python's generator": lambda: (random.Random(1), lambda g: g.random()),
            "NumPy's generator": lambda: (np.random.default_rng(1), lambda g: g.random()),
            "NumPy's old generator": lambda: (np.random.RandomState(1), lambda g: g.rand()),
            "an array": lambda: (np.zeros(1), _count_in),
        }[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(F.gelu(x * (0.5 + float(self.draw(self.held))))))


def _count_in(array: np.ndarray) -> float:
    array += 0.3
    return float(array[0]) % 1


DRAWN = ("torch's generator", "Python's generator", "NumPy's generator", "NumPy's old generator", "an array")
BY_DATA = ("a codebook", "another codebook", "a part of a codebook", "a held teacher", "a frozen teacher")


def recomputed(kind: str, layer: Callable[[str], nn.Module] = Remembers) -> Verdict:
    """Two layers with a state are recomputed; the losses are those of a plain loop."""
    job = bf.Job(
        model=lambda: nn.Sequential(layer(kind), layer(kind), nn.Linear(WIDTH, 8)),
        loss=mean_square,
        batch=pairs,
        optimizer="sgd",
    )
    batches = batches_of(job)
    units = tuple(bf.settings.UnitAction(fqn=name, action=bf.settings.Action.RECOMPUTE) for name in ("0", "1"))
    settings = bf.Settings(micro_batch_size=SAMPLES, units=units)
    try:
        is_wrong = differ(losses_of(job, settings, batches), losses_of(job, None, batches))
    except bf.BrimfulError:
        return Verdict.REFUSED
    if is_wrong:
        raise WrongError("the state changes twice where its layer is recomputed")
    return Verdict.RIGHT


def mixed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mixup with the batch in reverse."""
    x, y = (0.7 * each + 0.3 * each.flip(0) for each in batch)
    return F.mse_loss(model(x), y)


def contrasted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(found @ F.normalize(batch[1], dim=1).T, torch.arange(len(found)))


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def root(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mean_square(model, batch).sqrt()


ZERO = "losses that are zero for few samples"
_FAR = 4.5
"""Less than the distances of four samples that are drawn here, and more than those of some pairs of 512."""


def _apart(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Distances (N, N) of inputs and results together."""
    found = torch.cat([batch[0], model(batch[0])], dim=1)
    return torch.cdist(found, found) + 100 * torch.eye(len(found))


def close_pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu(_FAR - _apart(model, batch)).sum() / len(batch[0])


def closest(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu(_FAR - _apart(model, batch).amin(1)).mean()


def sharp_contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = torch.cat([batch[0], model(batch[0])], dim=1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def outliers(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu((model(batch[0]) - batch[1]).abs() - _FAR).sum()


def scaled_by_largest(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0]) - batch[1]
    return F.relu(found.abs().amax() - _FAR) * found.square().mean()


ZEROS: dict[str, Callable[[], bf.Job]] = {
    name: partial(lambda loss: replace(job_of(Student), loss=loss), loss)
    for name, loss in (
        ("pairs that are too close", close_pairs),
        ("the closest of the others", closest),
        ("a contrast at a low temperature", sharp_contrast),
        ("a sum over outliers", outliers),
        ("the largest error as a factor", scaled_by_largest),
    )
}


LATE = "labels that are ignored in later batches"
_LATE_SETTINGS = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=4)


def _steps(job: bf.Job, batches: list[dict[str, Tensor]]) -> list[str]:
    """Warnings of steps of a loop."""
    model = job.model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = bf.apply(_LATE_SETTINGS, job, model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            step(batch)
    return [str(each.message) for each in caught]


def _run(job: bf.Job, batches: list[dict[str, Tensor]]) -> list[str]:
    """Notes of a run over the same batches."""
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    loader = torch.utils.data.DataLoader(
        [dict(zip(joined, each, strict=True)) for each in zip(*joined.values(), strict=True)],
        batch_size=len(batches[0]["x"]),
    )
    job = replace(job, data=lambda: bf.Data(train=loader))
    with tempfile.TemporaryDirectory() as folder:
        result, _ = bf.fit(
            job, _LATE_SETTINGS, run_dir=f"{folder}/run", epochs=1, device="cpu", show_progress=False
        )
    return list(result.notes)


def ignored_later(
    train: Callable[[bf.Job, list[dict[str, Tensor]]], list[str]], *, counts: bool = False, every: int = 5
) -> Verdict:
    """The batch of the job, and the first of training, ignore no label; the third ignores some."""
    job = text_job(F.cross_entropy, ignored=0)
    if counts:
        job = replace(job, count=lambda batch: (batch["y"] != IGNORED).sum())
    batches = [job.batch(16) for _ in range(4)]
    if every:
        batches[2]["y"].flatten()[::every] = IGNORED
    is_refused = False
    try:
        said = [each for each in train(job, batches) if str(IGNORED) in each]
    except bf.errors.EquivalenceError as error:
        said, is_refused = [str(error)], "Job(count=" in str(error)
    if len(said) != (0 if counts or not every else 1):
        raise WrongError(f"of ignored labels is said: {said}")
    return Verdict.REFUSED if is_refused else Verdict.STATED if said else Verdict.RIGHT


IGNORED_LATER = {
    "a loop": partial(ignored_later, _steps),
    "a run": partial(ignored_later, _run),
    "a loop, one label": partial(ignored_later, _steps, every=10**6),
    "a run, half of the labels": partial(ignored_later, _run, every=3),
    "control: counted in a loop": partial(ignored_later, _steps, counts=True),
    "control: counted in a run": partial(ignored_later, _run, counts=True),
    "control: none": partial(ignored_later, _steps, every=0),
}

REFUSED_LATE = "a plan that the first step refuses"
SPLIT_WRONGLY: dict[str, Callable[[], bf.Job]] = {
    "mixup in the loss": lambda: replace(job_of(Student), loss=mixed),
    "a contrast of samples": lambda: replace(job_of(Student), loss=contrasted),
    "a sum": lambda: replace(job_of(Student), loss=summed),
    "the root of a mean": lambda: replace(job_of(Student), loss=root),
    "class weights": MEANS["class weights"],
    "padding as ignore_index": MEANS["padding as ignore_index"],
}


def refused_by_plan(make: Callable[[], bf.Job]) -> Verdict:
    """The plan refuses what the first step would."""
    try:
        plan = bf.plan(make(), "cpu", global_batch_size=16, micro_batch_size=4)
    except bf.BrimfulError:
        return Verdict.REFUSED
    torch.manual_seed(0)
    job = make()
    model = job.model()
    try:
        bf.apply(plan, job, model, torch.optim.SGD(model.parameters(), 0.1))(job.batch(16))
    except bf.errors.EquivalenceError as error:
        raise WrongError("the plan promises what its first step refuses") from error
    raise WrongError("split in silence")


def case(kind: str, name: str, make: Callable[[], bf.Job], *, is_control: bool = False) -> Case:
    return Case(kind, name, lambda: compared(make, is_control=is_control))


CASES = (
    *(case(STATE, name, make) for name, make in STATEFUL.items()),
    *(case(STATE, name, make, is_control=True) for name, make in STATELESS.items()),
    *(
        Case(STATE, f"recomputed: {kind}", partial(recomputed, kind))
        for kind in ("a count", "a mean", "a list", "a teacher")
    ),
    *(
        Case(STATE, f"recomputed, through .data: {kind}", partial(recomputed, kind, RemembersByData))
        for kind in BY_DATA
    ),
    *(Case(STATE, f"recomputed: {kind}", partial(recomputed, kind, Draws)) for kind in DRAWN),
    *(case(MEAN, name, make) for name, make in MEANS.items()),
    *(case(MEAN, name, make, is_control=True) for name, make in PLAIN_MEANS.items()),
    *(case(ZERO, name, make) for name, make in ZEROS.items()),
    *(Case(LATE, name, run) for name, run in IGNORED_LATER.items()),
    *(Case(REFUSED_LATE, name, partial(refused_by_plan, make)) for name, make in SPLIT_WRONGLY.items()),
)
