"""Runs the scripts of docs/howto/own-loop.md as they are there, and watches their losses and their memory.

`own_loops_alone.py` has the same loops without brimful. `python -m helpers.own_loops FOLDER ddp fsdp2` runs
scripts in a rank that torchrun launched.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from brimful.planner import Plan
from brimful.profiling.cpu_memory import record_cpu_memory
from brimful.profiling.peak import peak_of_cpu
from brimful.torch_utils.replaced import replaced

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "own-loop.md"
SHARED = ("job", "gan")
"""Files that scripts import."""
WATCHED = 2
"""The step, from 0, whose peak is measured: memory is that of all later ones."""
_SCRIPT = re.compile(r"^```python\n(# (\w+)\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)
_LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "helpers.own_loops")


def scripts() -> dict[str, str]:
    """The scripts and files of the page, by the name in their first line."""
    return {name: code for code, name in _SCRIPT.findall(PAGE.read_text(encoding="utf-8"))}


def write_files(folder: Path) -> None:
    """Write the files that scripts import."""
    for name in SHARED:
        (folder / f"{name}.py").write_text(scripts()[name], encoding="utf-8")


@dataclass(slots=True)
class Ran:
    """What a script did on one rank."""

    losses: list[float] = field(default_factory=list)
    """Of each time that all samples of the rank were seen, their mean; of the GAN those of its last step."""
    peak_bytes: int = 0
    """Measured in step `WATCHED`."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the script, at its end."""

    @property
    def predicted_bytes(self) -> int:
        """The peak that the page says to expect of the script."""
        if "peaks" in self.variables:
            return max(self.variables["peaks"])
        plan: Plan = self.variables["plan"]
        return self.variables.get("predicted", plan.predicted_peak_allocated_bytes)


def run(folder: Path, name: str) -> Ran:
    """Run a script of the page in this process.

    Args:
        folder: Has the shared files; the script reads and writes plans there.
        name: Of the script.

    Returns:
        What it did.
    """
    ran = Ran(variables={"__name__": name})
    with in_folder(folder), ExitStack() as patches:
        watch = _Watch(ran)
        for shared in SHARED:
            module = importlib.import_module(shared)
            patches.enter_context(replaced(module, "batches", watch.watched(module.batches)))
        job = importlib.import_module("job")
        patches.enter_context(replaced(job, "loss_of", watch.recorded(job.loss_of)))
        exec(compile(scripts()[name], f"{name}.py", "exec"), ran.variables)
    ran.losses = ran.losses or [float(loss) for loss in ran.variables.get("losses", ())]
    return ran


def _once(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """Scripts that run one after another in a launch use the same process group."""

    def init(backend: str) -> None:
        if not dist.is_initialized():
            init_process_group(backend)

    return init


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Within, the working directory and the first place of imports is a folder; its files are loaded again."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for shared in SHARED:
            sys.modules.pop(shared, None)


class _Watch:
    """Records the losses of a script and the peak of one of its steps."""

    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self._batch_samples = 0
        self._seen_samples, self._sum = 0, 0.0

    def watched(self, batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same batches, and a record of the memory.

        It begins before the first step, so that what LBFGS frees of its history is seen. On ranks it begins
        with the watched one, as DDP frees buckets that it was made with.
        """

        def iterate(samples: int, *rank: int) -> Iterator[Any]:
            self._batch_samples = samples
            on_ranks = dist.is_initialized()
            with ExitStack() as recording:
                cpu = None if on_ranks else recording.enter_context(record_cpu_memory())
                for number, batch in enumerate(batches(samples, *rank)):
                    if number == WATCHED:
                        cpu = cpu or recording.enter_context(record_cpu_memory())
                        cpu.count_from_here()
                    yield batch
            assert cpu is not None
            self._ran.peak_bytes = peak_of_cpu(cpu, {}, None).allocated_bytes

        return iterate

    def recorded(self, loss_of: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
        """The same loss; its values on real samples are kept."""

        def compute(model: nn.Module, batch: Any) -> Tensor:
            value = loss_of(model, batch)
            if not isinstance(value, FakeTensor):
                self._seen_samples += len(batch[0])
                self._sum += value.item() * len(batch[0])
                if self._seen_samples == self._batch_samples:
                    self._ran.losses.append(self._sum / self._seen_samples)
                    self._seen_samples, self._sum = 0, 0.0
            return value

        return compute


@dataclass(frozen=True, slots=True)
class OnRank:
    """As `Ran`, of a script on one of several ranks."""

    losses: list[float]
    peak_bytes: int
    predicted_bytes: int
    settings: str


def run_on_two_ranks(folder: Path, names: list[str]) -> list[dict[str, OnRank]]:
    """Run scripts of the page one after another under torchrun, in one launch.

    Args:
        folder: Has the shared files and the plans.
        names: Of the scripts.

    Returns:
        By rank and script.
    """
    done = subprocess.run(
        [sys.executable, *_LAUNCH, str(folder), *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, map(Path.resolve, map(Path, sys.path))))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [{name: OnRank(**ran) for name, ran in each.items()} for each in found]


def main() -> None:
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    found = {}
    with (
        replaced(dist, "init_process_group", _once(dist.init_process_group)),
        replaced(dist, "destroy_process_group", lambda: None),
    ):
        for name in names:
            ran = run(Path(folder), name)
            found[name] = OnRank(
                losses=ran.losses,
                peak_bytes=ran.peak_bytes,
                predicted_bytes=ran.predicted_bytes,
                settings=ran.variables["plan"].settings.describe(),
            )
    text = json.dumps({name: asdict(ran) for name, ran in found.items()})
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(text, encoding="utf-8")
    dist.barrier()
    os._exit(0)  # threads of gloo may abort the interpreter at its end


if __name__ == "__main__":
    main()
