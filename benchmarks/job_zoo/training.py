"""Optimizers and loops: what people call between the gradient and the next batch."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from job_zoo.case import job_case
from job_zoo.parts import TinyGPT, classify, convnet, images, mlp, next_token, texts, vectors


def words(n: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 4000, (n, 32)), "y": torch.randint(0, 10, (n,))}


def bag_of_words(*, sparse: bool) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4000, 64, mode="mean", sparse=sparse), mlp(64, 256, 256, 10))


def sparse_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


@job_case(1024, refused="sparse gradients")
def sparse_adam() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(nn.Embedding(4000, 64, sparse=True), nn.Flatten()),
        loss=lambda m, b: F.mse_loss(m(b["ids"]), torch.ones(())),
        batch=lambda n: {"ids": torch.randint(0, 4000, (n, 4))},
        optimizer=lambda ps: torch.optim.SparseAdam(ps, lr=1e-3),
    )


@job_case(1024, refused="sparse gradients")
def sparse_embedding_with_sgd() -> bf.Job:
    return bf.Job(
        model=lambda: bag_of_words(sparse=True),
        loss=sparse_loss,
        batch=words,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )


@job_case(1024)
def dense_embedding_bag() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(nn.EmbeddingBag(400, 64, mode="mean"), mlp(64, 256, 256, 10)),
        loss=sparse_loss,
        batch=lambda n: {"ids": torch.randint(0, 400, (n, 32)), "y": torch.randint(0, 10, (n,))},
    )


@job_case(1024, refused="closure")
def lbfgs() -> bf.Job:
    return bf.Job(
        model=lambda: mlp(64, 256, 256, 10),
        loss=classify,
        batch=vectors,
        optimizer=lambda ps: torch.optim.LBFGS(ps, history_size=4, max_iter=4),
    )


@job_case(1024)
def lbfgs_in_own_loop() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=4)
        for batch in batches:

            def closure(batch: dict[str, Tensor] = batch) -> Tensor:
                optimizer.zero_grad()
                loss = classify(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    return bf.Job(model=lambda: mlp(64, 128, 128, 10), loss=classify, batch=vectors, loop=loop)


@job_case(32)
def muon_and_adamw() -> bf.Job:
    """torch's Muon for matrices, AdamW for the rest, in one wrapper as people write it."""
    return bf.Job(model=TinyGPT, loss=next_token, batch=texts, optimizer="muon")


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_((momentum * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - b2)


@job_case(1024)
def own_optimizer() -> bf.Job:
    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, optimizer=Lion)


@job_case(1024, refused="closure")
def sharpness_aware_with_closure() -> bf.Job:
    """Its step calls forward and backward a second time, at a worse point."""

    class SAM(torch.optim.SGD):
        def step(self, closure: Any) -> Tensor:
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                moved = [(p, p.grad.clone()) for g in self.param_groups for p in g["params"]]
                norm = torch.stack([g.norm() for _, g in moved]).norm()
                for p, g in moved:
                    p.add_(g, alpha=0.05 / float(norm))
            self.zero_grad()
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for p, g in moved:
                    p.sub_(g, alpha=0.05 / float(norm))
            super().step()
            return loss

    return bf.Job(
        model=lambda: mlp(64, 256, 256, 256, 10),
        loss=classify,
        batch=vectors,
        optimizer=lambda ps: SAM(ps, lr=0.1, momentum=0.9),
    )


def trained(model: nn.Module, batches: Iterable[Any], *, every: int = 1, keep: list[Any] | None = None) -> None:
    """A loop with accumulation, and perhaps a leak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index, batch in enumerate(batches):
        loss = classify(model, batch) / every
        loss.backward()
        if keep is not None:
            keep.append(loss)
        if (index + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()


@job_case(1024)
def own_loop_with_accumulation() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[Any]) -> None:
        trained(model, itertools.chain.from_iterable([batch, batch] for batch in batches), every=2)

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(32, named="brimful says that memory grows with every step")
def own_loop_that_leaks_graphs() -> bf.Job:
    """What each step computed is kept, for a mean that is never taken."""

    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        history = []
        for batch in batches:
            logits = model(batch["x"])
            loss = F.cross_entropy(logits, batch["y"])
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            history.append(loss)

    return bf.Job(model=convnet, loss=classify, batch=images, loop=loop)


@job_case(32)
def own_loop_with_autocast_and_scaler() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu")
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = classify(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return bf.Job(model=convnet, loss=classify, batch=images, loop=loop)


@job_case(1024)
def own_loop_with_schedule_and_swa() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        average = torch.optim.swa_utils.AveragedModel(model)
        for batch in batches:
            loss = classify(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(1024)
def own_loop_with_metrics_in_numpy() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        from sklearn.metrics import f1_score

        optimizer = torch.optim.Adam(model.parameters())
        for batch in batches:
            logits = model(batch["x"])
            loss = F.cross_entropy(logits, batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            guess = logits.argmax(1).detach().cpu().numpy()
            f1_score(batch["y"].numpy(), guess, average="macro")

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(1024)
def own_loop_that_saves() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for batch in batches:
            loss = classify(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(1024)
def own_loop_by_next() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        stream = iter(batches)
        for _ in range(3):
            loss = classify(model, next(stream))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(32, gpu="RTX 3090")
def own_loop_with_cuda_calls() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches:
            batch = {name: value.cuda(non_blocking=True) for name, value in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = classify(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            print(torch.cuda.max_memory_allocated() / 2**20, file=io.StringIO())
            torch.cuda.empty_cache()

    return bf.Job(model=lambda: convnet().cuda(), loss=classify, batch=images, loop=loop)


@job_case(1024, needs=("accelerate",))
def accelerate_loop() -> bf.Job:
    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for batch in batches:
            with accelerator.accumulate(model):
                loss = classify(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return bf.Job(model=lambda: mlp(64, 256, 256, 256, 10), loss=classify, batch=vectors, loop=loop)


@job_case(1024, needs=("lightning",))
def lightning_training_step() -> bf.Job:
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(64, 256, 256, 256, 10)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return bf.Job(model=Classifier, loss=lambda m, b: m.training_step(b, 0), batch=vectors)


@job_case(1024, needs=("accelerate",))
def hf_trainer_as_loop() -> bf.Job:
    """The whole Trainer, in a temporary directory, over the batches it is given."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(64, 256, 256, 256, 10)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, batches: Iterable[dict[str, Tensor]]) -> None:
            self.batches = batches

        def __iter__(self) -> Iterable[dict[str, Tensor]]:
            return ({"x": batch["x"], "labels": batch["y"]} for batch in self.batches)

    def loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
        import tempfile

        from transformers import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as directory:
            arguments = TrainingArguments(
                directory,
                max_steps=3,
                per_device_train_batch_size=1,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
                logging_strategy="no",
            )
            Trainer(
                model, arguments, train_dataset=Stream(batches), data_collator=lambda samples: samples[0]
            ).train()

    return bf.Job(model=Net, loss=lambda m, b: m(b["x"], b["y"])["loss"], batch=vectors, loop=loop)
