"""Threads, event loops, forked workers and process groups around a call: the answer is that of a call alone.

What a call changes of the process, it changes back; and other threads never see it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, Dataset

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

# B batch, T sequence, D width
WIDTH, CLASSES, GPU = 64, 10, "RTX 3090"


# Jobs that differ in what a capture replaces for them


def perceptron() -> bf.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, CLASSES))

    return _classifier("perceptron", model, (WIDTH,))


def convolutions() -> bf.Job:
    def model() -> nn.Module:
        layers = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))

    return _classifier("convolutions", model, (3, 32, 32))


class Encoder(nn.Module):
    """A transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def encoder() -> bf.Job:
    return _classifier("encoder", Encoder, (32, WIDTH))


def recurrent() -> bf.Job:
    return _classifier("recurrent", Recurrent, (16, WIDTH))


def _classifier(name: str, model: Callable[[], nn.Module], shape: Sequence[int]) -> bf.Job:
    return bf.Job(
        name=name,
        model=model,
        loss=cross_entropy,
        batch=lambda n: {"x": torch.randn(n, *shape), "y": torch.randint(CLASSES, (n,))},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


JOBS = (perceptron, convolutions, encoder, recurrent)


# Answers


def estimated(make: Callable[[], bf.Job], precision: str = "fp16") -> tuple[Any, ...]:
    """What an estimate says."""
    made = bf.estimate(make(), GPU, micro_batch_size=8, precision=precision)
    return made.predicted_peak_allocated_bytes, made.predicted_peak_reserved_bytes, made.predicted_step_seconds


def planned(make: Callable[[], bf.Job], **asked: Any) -> tuple[Any, ...]:
    """What a plan says."""
    budget = None if make is perceptron else "90%"  # most of what it takes is the context
    options = {"global_batch_size": 512, "budget": budget, "split_batch_norm": True} | asked
    made = bf.plan(make(), GPU, **options)
    return made.settings.describe(), made.predicted_peak_reserved_bytes, made.predicted_step_seconds


def checked(found: object, wanted: object, what: str = "the answer") -> Verdict:
    """Right, if both are equal."""
    if found != wanted:
        raise WrongError(f"{what} is {found}, and alone {wanted}")
    return Verdict.RIGHT


_WATCHED = (
    *((torch, name) for name in ("save", "from_numpy", "get_rng_state", "Generator")),
    *((F, name) for name in ("dropout", "scaled_dot_product_attention")),
    *((nn.Module, name) for name in ("to", "cuda", "_apply", "register_parameter")),
    *((torch.Tensor, name) for name in ("normal_", "uniform_", "__format__", "record_stream")),
    *((torch.cuda, name) for name in ("synchronize", "memory_allocated", "Stream", "Event", "is_available")),
    *((GradScaler, name) for name in ("__init__", "_maybe_opt_step")),
    (torch.autocast, "__init__"),
)


def state_of_process() -> dict[str, Any]:
    """What calls could leave changed."""
    from torch._dynamo import eval_frame
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return {
        **{f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in _WATCHED},
        "compiler stance": eval_frame._stance.stance,
        "garbage collection": gc.isenabled(),
        "process group": dist.group.WORLD if dist.is_initialized() else None,
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "types of foreach": len(optimizer._foreach_supported_types),
        "warning filters": list(warnings.filters),
        "grad": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
        "default device": torch.get_default_device(),
        "default type": torch.get_default_dtype(),
    }


@contextmanager
def nothing_left() -> Iterator[None]:
    """Within, calls are made; afterwards the process is as before."""
    estimated(perceptron)  # imports what stays imported
    before = state_of_process()
    yield
    after = state_of_process()
    changed = [name for name in before if before[name] is not after[name] and before[name] != after[name]]
    if changed:
        raise WrongError(f"left changed: {', '.join(changed)}")


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Calls in threads that begin together."""
    barrier = threading.Barrier(len(calls))

    def begun(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(begun, call) for call in calls]]


# Two threads that plan


def all_in_threads(ask: Callable[[Callable[[], bf.Job]], Any], rounds: int = 2) -> Verdict:
    with nothing_left():
        alone = [ask(make) for make in JOBS]
        for _ in range(rounds):
            checked(at_once(*(partial(ask, make) for make in JOBS)), alone)
    return Verdict.RIGHT


def ranks_in_threads() -> Verdict:
    """FSDP2 is captured over a fake process group, of which a process has one."""
    asks = [partial(planned, perceptron, world_size=size, parallelism="fsdp2") for size in (2, 4)]
    with nothing_left():
        alone = [ask() for ask in asks]
        return checked(at_once(*asks), alone)


def estimate_beside_measurement() -> Verdict:
    settings = bf.Settings(micro_batch_size=8)
    with nothing_left():
        alone = estimated(encoder), bf.measure(perceptron(), settings, "cpu").measured_peak_allocated_bytes
        found = at_once(
            partial(estimated, encoder),
            lambda: bf.measure(perceptron(), settings, "cpu").measured_peak_allocated_bytes,
        )
        return checked(tuple(found), alone)


def two_measurements() -> Verdict:
    """Torch has one profiler."""
    settings = bf.Settings(micro_batch_size=8)

    def measured(make: Callable[[], bf.Job]) -> object:
        try:
            return bf.measure(make(), settings, "cpu").measured_peak_allocated_bytes
        except bf.BrimfulError:
            return "refused"

    alone = [measured(make) for make in JOBS]
    for _ in range(2):
        for found, wanted in zip(at_once(*(partial(measured, make) for make in JOBS)), alone, strict=True):
            if found not in ("refused", wanted):
                raise WrongError(f"{found} bytes are measured, and alone {wanted}")
    return Verdict.RIGHT


# A thread that plans beside others that do something else


def beside_plans(work: Callable[[], Any], wanted: object = None) -> Verdict:
    """Work in a loop while another thread plans, equal to the same without."""
    with nothing_left():
        alone = work() if wanted is None else wanted
        is_over = threading.Event()

        def plans() -> None:
            try:
                for make in JOBS:
                    planned(make)
            finally:
                is_over.set()

        def works() -> int:
            rounds = 0
            while not is_over.is_set():
                checked(work(), alone, "what another thread does")
                rounds += 1
            return rounds

        _, rounds = at_once(plans, works)
    if rounds < 2:
        raise RuntimeError("the other thread did nothing")
    return Verdict.RIGHT


def saving() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"weights": torch.ones(3)}, f"{folder}/checkpoint.pt")
        return torch.load(f"{folder}/checkpoint.pt")["weights"].tolist()


def building() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 4))
    nn.init.constant_(model[0].weight, 1.0)
    return {str(parameter.device) for parameter in model.parameters()}, model[0].weight.sum().item()


def drawing() -> Any:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(3, generator=generator).tolist(), isinstance(generator, torch.Generator)


def training() -> Any:
    """Mixed precision, with everything that a capture stands in for."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Linear(4, 2).to(torch.float32)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 4, generator=generator)), model.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    scaler = GradScaler("cpu", init_scale=2.0**30)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.scaled_dot_product_attention(*[model(torch.ones(1, 1, 3, 4))] * 3).sum()
        scaler.scale(loss * 1e30).backward()  # overflows at first: the scaler must see it
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
    return f"{loss:.6f}", model.weight.tolist(), scaler.get_scale()


def asking_for_gpus() -> Any:
    return torch.cuda.is_available(), torch.accelerator.is_available(), torch.cuda.memory_allocated()


def planned_step() -> Any:
    """A loop of one's own, under settings."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = bf.Job(model=model, loss=cross_entropy, batch={"x": torch.ones(4, 4), "y": torch.zeros(4).long()})
    step = bf.apply(bf.Settings(micro_batch_size=4), job, model, optimizer)
    x = torch.randn(4, 4, generator=generator)
    return [float(step({"x": x, "y": torch.arange(4) % 2}).loss) for _ in range(2)]


def compiled_stays_compiled() -> Verdict:
    """The compiler is put aside while a step is captured, and is there afterwards, whichever ends first."""
    with nothing_left():
        calls = []

        def backend(graph: Any, _inputs: Any) -> Any:
            def run(*arguments: Any) -> Any:
                calls.append(1)
                return graph.forward(*arguments)

            return run

        function = torch.compile(lambda x: x.sin() + 1, backend=backend)
        function(torch.ones(3))
        at_once(*(partial(estimated, make) for make in JOBS))
        calls.clear()
        function(torch.ones(3))
    return checked(len(calls), 1, "the number of compiled calls")


# Event loops


def in_a_loop(ask: Callable[[], Any]) -> Verdict:
    async def main() -> Any:
        ticks = asyncio.create_task(asyncio.sleep(0))
        found = ask()
        await ticks
        return found

    with nothing_left():
        return checked(asyncio.run(main()), ask())


def gathered() -> Verdict:
    async def main() -> Any:
        return await asyncio.gather(*(asyncio.to_thread(planned, make) for make in JOBS))

    with nothing_left():
        alone = [planned(make) for make in JOBS]
        return checked(list(asyncio.run(main())), alone)


def given_up() -> Verdict:
    """A plan that is not waited for any more goes on in its thread; the next one is right."""

    async def main() -> Any:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(planned, encoder), 0.2)
        return await asyncio.to_thread(planned, perceptron)

    with nothing_left():
        return checked(asyncio.run(main()), planned(perceptron))


def fitted_in_a_loop() -> Verdict:
    def losses() -> Any:
        generator = torch.Generator().manual_seed(0)
        data = {"x": torch.randn(32, WIDTH, generator=generator), "y": torch.arange(32) % CLASSES}
        job = bf.Job(
            model=perceptron().model, loss=cross_entropy, batch=data, data=lambda: bf.Data(train=data), name="p"
        )
        settings = bf.Settings(micro_batch_size=8)
        result = bf.trainer.Trainer(job, settings, device="cpu", epochs=2, show_progress=False).fit()
        return result.losses

    async def main() -> Any:
        here = losses()
        return here, await asyncio.to_thread(losses)

    here, there = asyncio.run(main())
    wanted = losses()
    return checked((here, there), (wanted, wanted))


# Workers


def _forked(ask: Callable[[], Any]) -> Any:
    """What a call returns in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: Any = ask()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(found)


def in_a_fork(ask: Callable[[], Any]) -> Verdict:
    with nothing_left():
        return checked(_forked(ask), ask())


def fork_while_planning() -> Verdict:
    """The fork has whatever a thread that is not in it was about to change back."""

    def works() -> Any:
        return saving(), building(), drawing(), training(), estimated(perceptron), gc.isenabled()

    with nothing_left():
        alone = works()
        is_over = threading.Event()

        def plans() -> None:
            for make in JOBS:
                planned(make)
            is_over.set()

        def forks() -> None:
            while not is_over.is_set():
                checked(_forked(works), alone, "what a fork does")

        at_once(plans, forks)
    return Verdict.RIGHT


def in_a_pool(method: str) -> Verdict:
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        found = pool.map(estimated, JOBS)
    return checked(found, [estimated(make) for make in JOBS])


class Estimates(Dataset):
    """Samples that are estimates."""

    def __len__(self) -> int:
        return len(JOBS)

    def __getitem__(self, index: int) -> Any:
        return estimated(JOBS[index])


def in_data_workers() -> Verdict:
    loader = DataLoader(Estimates(), batch_size=None, num_workers=2)
    with nothing_left():
        return checked([tuple(each) for each in loader], [estimated(make) for make in JOBS])


# Process groups


def in_a_group(ask: Callable[[], Any], *, world_size: int = 1, ranks: Sequence[int] = (0,)) -> Verdict:
    """The right answer or a refusal on each rank that asks; the group still works afterwards."""
    context = multiprocessing.get_context("fork")
    alone = _forked(ask)
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        processes = [
            context.Process(target=_rank, args=(ask, rank, world_size, ranks, f"{folder}/store", answers))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    refused = [answer for answer in found if isinstance(answer, str)]
    if any(not answer.startswith("refused") for answer in refused):
        raise WrongError(refused[0])
    for answer in found:
        if answer is not None and not isinstance(answer, str):
            checked(answer, alone)
    return Verdict.REFUSED if refused else Verdict.RIGHT


def _rank(
    ask: Callable[[], Any], rank: int, world_size: int, ranks: Sequence[int], store: str, answers: Any
) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        answer: Any = None
        with nothing_left():
            if rank in ranks:
                try:
                    answer = ask()
                except bf.BrimfulError as error:
                    answer = f"refused: {error}"
        total = torch.ones(1)
        dist.all_reduce(total)
        if total.item() != world_size:
            raise WrongError(f"the group sums up {total.item()} of {world_size} ranks")
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    answers.put(answer)


def _measured() -> int:
    return bf.measure(perceptron(), bf.Settings(micro_batch_size=8), "cpu").measured_peak_allocated_bytes


def _case(kind: str, name: str, run: Callable[..., Verdict], *arguments: Any, **named: Any) -> Case:
    return Case(kind, name, partial(run, *arguments, **named))


def _cases() -> Iterator[Case]:
    kind = "threads that plan"
    yield _case(kind, "four estimates", all_in_threads, estimated)
    yield _case(kind, "four plans", all_in_threads, planned, rounds=1)
    yield _case(kind, "FSDP2 of two and four ranks", ranks_in_threads)
    yield _case(kind, "an estimate beside a measurement", estimate_beside_measurement)
    yield _case(kind, "four measurements", two_measurements)
    yield _case(kind, "compiled code afterwards", compiled_stays_compiled)
    kind = "threads beside a plan"
    for work in (saving, building, drawing, training, asking_for_gpus, planned_step):
        yield _case(kind, work.__name__.replace("_", " "), beside_plans, work)
    kind = "event loops"
    yield _case(kind, "an estimate", in_a_loop, partial(estimated, encoder))
    yield _case(kind, "a plan", in_a_loop, partial(planned, convolutions))
    yield _case(kind, "four plans gathered", gathered)
    yield _case(kind, "a plan given up", given_up)
    yield _case(kind, "training", fitted_in_a_loop)
    kind = "forked workers"
    yield _case(kind, "an estimate after os.fork", in_a_fork, partial(estimated, encoder))
    yield _case(kind, "a plan after os.fork", in_a_fork, partial(planned, recurrent))
    yield _case(kind, "a measurement after os.fork", in_a_fork, _measured)
    yield _case(kind, "forks while a thread plans", fork_while_planning)
    yield _case(kind, "a pool of forks", in_a_pool, "fork")
    yield _case(kind, "a pool of new processes", in_a_pool, "spawn")
    yield _case(kind, "workers of a DataLoader", in_data_workers)
    kind = "process groups"
    sharded = partial(planned, perceptron, world_size=2, parallelism="fsdp2")
    yield _case(kind, "an estimate, one rank", in_a_group, partial(estimated, encoder))
    yield _case(kind, "a plan, one rank", in_a_group, partial(planned, encoder))
    yield _case(kind, "DDP planned, one rank", in_a_group, partial(planned, encoder, world_size=2))
    yield _case(kind, "FSDP2 planned, one rank", in_a_group, sharded)
    yield _case(
        kind,
        "an estimate on the second of two",
        in_a_group,
        partial(estimated, recurrent),
        world_size=2,
        ranks=(1,),
    )
    yield _case(
        kind, "plans on both of two", in_a_group, partial(planned, convolutions), world_size=2, ranks=(0, 1)
    )
    yield _case(kind, "FSDP2 planned on the first of two", in_a_group, sharded, world_size=2)
    yield _case(kind, "measured, one rank", in_a_group, _measured)


CASES = tuple(_cases())
