"""Job files that print, exit, raise, or return what no job should, given to `estimate --json` and `train`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from attacks.case import Case, FailedError, Kind, Place, check_done, check_done_or_refused, control, metrics
from attacks.process import Ran

TEMPLATE = """
<top>
import torch
from torch import nn
import brimful as bf

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
SAMPLES = {"x": X, "y": (X.sum(1) > 0).long()}

def network():
    <network>
    return <model>

def loss(model, batch):
    <loss>
    value = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return <value>

def job(<parameters>):
    <job>
    return <returned>

<end>
"""
_DEFAULTS = {
    "model": "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))",
    "value": "value",
    "returned": "bf.Job(model=network, loss=loss, batch=SAMPLES, data=lambda: bf.Data(train=SAMPLES))",
}
STEPS = 4


def _job(**fields: str) -> dict[str, str]:
    """A job with other fields."""
    given = {"model": "network", "loss": "loss", "batch": "SAMPLES", "data": "lambda: bf.Data(train=SAMPLES)"}
    listed = ", ".join(f"{name}={value}" for name, value in (given | fields).items())
    return {"returned": f"bf.Job({listed})"}


def _data(train: str, top: str = "") -> dict[str, str]:
    return _job(data=f"lambda: bf.Data(train={train})") | {"end": top}


_SET = """
class Few(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        <item>
        return {"x": X[i], "y": SAMPLES["y"][i]}
"""
_LOADER = "torch.utils.data.DataLoader(Few(), batch_size=16)"


def _loader(item: str, loader: str = _LOADER) -> dict[str, str]:
    return _data(loader, _SET.replace("<item>", item))


_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __len__(self): return 64
    def __iter__(self):
        for i in range(20):
            yield {"x": X[i], "y": SAMPLES["y"][i]}
"""

JOBS: dict[str, dict[str, str]] = {
    # what prints, exits or changes the process
    "prints at import": {"top": "print('hello')"},
    "prints in model": {"network": "print('building')"},
    "prints in loss": {"loss": "print('loss')"},
    "prints everywhere": {
        "top": "print('a')",
        "network": "print('b')",
        "loss": "print('c')",
        "job": "print('d')",
    },
    "writes to the stdout descriptor": {"network": "import os; os.write(1, b'raw\\n')"},
    "prints half a line": {"top": "print('half', end='')"},
    "prints undecodable text": {"top": "print('\\udcff'.encode('utf-8', 'surrogateescape'))"},
    "warns": {"network": "import warnings; warnings.warn('mine')"},
    "logs": {"top": "import logging; logging.basicConfig(level=0); logging.info('x')"},
    "exits at import": {"top": "import sys; sys.exit(0)"},
    "exits in the factory": {"job": "raise SystemExit(0)"},
    "exits in model": {"network": "import sys; sys.exit()"},
    "exits in loss": {"loss": "import sys; sys.exit(0)"},
    "exits with text": {"job": "import sys; sys.exit('bye')"},
    "closes stdout": {"top": "import sys; sys.stdout.close()"},
    "replaces stdout": {"top": "import sys; sys.stdout = None"},
    "changes the directory": {"top": "import os; os.chdir('/')"},
    "removes its own file": {"top": "import os; os.remove(__file__)"},
    "makes warnings errors": {"top": "import warnings; warnings.simplefilter('error')"},
    "lowers the recursion limit": {"top": "import sys; sys.setrecursionlimit(150)"},
    "ignores SIGINT": {"top": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"},
    "float64 by default": {"end": "torch.set_default_dtype(torch.float64)"},
    "the meta device by default": {"end": "torch.set_default_device('meta')"},
    "no gradients": {"end": "torch.set_grad_enabled(False)"},
    "deterministic algorithms": {"end": "torch.use_deterministic_algorithms(True)"},
    "seeds in each loss": {"loss": "torch.manual_seed(0)"},
    "a thread that runs on": {
        "top": "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()"
    },
    # what raises
    "a syntax error": {"top": "def ("},
    "an indentation error": {"top": "  x = 1\n y = 2"},
    "a NUL": {"top": "\0"},
    "raises at import": {"top": "raise ValueError('of the user')"},
    "raises in the factory": {"job": "raise RuntimeError('of the user')"},
    "raises in model": {"network": "raise KeyError('of the user')"},
    "raises in loss": {"loss": "raise IndexError('of the user')"},
    "raises an error without text": {"loss": "raise Exception"},
    "raises an error whose text raises": {
        "top": "class Bad(Exception):\n    def __str__(self): raise ValueError('str')",
        "loss": "raise Bad()",
    },
    "imports what is not there": {"top": "import not_there_at_all"},
    "recurses without end": {"network": "return network()"},
    # what the factory gives
    "returns nothing": {"returned": "None"},
    "returns a model": {"returned": "network()"},
    "returns a tuple": {"returned": "(network, loss)"},
    "returns the class": {"returned": "bf.Job"},
    "needs an argument": {"parameters": "size"},
    "is a generator": {"job": "yield 1"},
    "is a coroutine": {"end": "async def job(): return None"},
    "is a number": {"end": "job = 5"},
    "is a Job": {"end": "job = job()"},
    "is a module": {"end": "job = network()"},
    # models
    "no parameters": {"model": "nn.Identity()"},
    "frozen parameters": {"model": "nn.Linear(8, 2).requires_grad_(False)"},
    "returns no module": {"model": "5"},
    "a class for a model": _job(model="nn.Linear"),
    "a built module": _job(model="network()"),
    "400 modules deep": {
        "network": "m = nn.Linear(8, 2)\n    for _ in range(400): m = nn.Sequential(m)",
        "model": "m",
    },
    "parameters that are NaN": {
        "network": "m = nn.Linear(8, 2); nn.init.constant_(m.weight, float('nan'))",
        "model": "m",
    },
    "a lazy layer": {"model": "nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 2))"},
    "an empty parameter": {
        "network": "m = nn.Linear(8, 2); m.empty = nn.Parameter(torch.empty(0))",
        "model": "m",
    },
    "unused parameters": {"network": "m = nn.Linear(8, 2); m.unused = nn.Linear(9, 9)", "model": "m"},
    # losses
    **{
        f"a loss of {value}": {"value": value}
        for value in (
            *("None", "5", "1.5", "'text'", "value.item()", "value.detach()", "torch.stack([value, value])"),
            *(
                "value * float('nan')",
                "value * float('inf')",
                "value.to(torch.complex64)",
                "[value]",
                "value.long()",
            ),
        )
    },
    # batches
    **{
        f"a batch of {batch}": _job(batch=batch)
        for batch in (
            *(
                "None",
                "5",
                "'text'",
                "{}",
                "[]",
                "lambda n: None",
                "lambda: SAMPLES",
                "lambda n: 1 / 0",
                "X.numpy()",
            ),
            *(
                "{'x': X, 'y': 5}",
                "{'x': X, 'y': SAMPLES['y'][:3]}",
                "{'x': torch.tensor(1.0)}",
                "{'x': X[:0], 'y': X[:0]}",
            ),
            *(
                "lambda n: {'x': X[:1], 'y': SAMPLES['y'][:1]}",
                "lambda n: {'x': X[:n].to_sparse(), 'y': SAMPLES['y'][:n]}",
            ),
            *("lambda n: {'x': X[:n].to('meta'), 'y': SAMPLES['y'][:n].to('meta')}",),
        )
    },
    # optimizers
    **{
        f"an optimizer {optimizer}": _job(optimizer=optimizer)
        for optimizer in (
            *(
                "5",
                "'x'",
                "lambda p: None",
                "lambda p: torch.optim.SGD([], lr=1)",
                "lambda p: torch.optim.LBFGS(p)",
            ),
            *(
                "lambda p: torch.optim.SGD(p, lr=float('nan'))",
                "lambda p: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)",
            ),
        )
    },
    # data
    **{
        f"data {data}": _data(data)
        for data in (
            *(
                "None",
                "5",
                "[]",
                "{}",
                "'text'",
                "iter([SAMPLES])",
                "(SAMPLES for _ in range(1))",
                "[None]",
                "X[:0]",
            ),
        )
    },
    "no data": _job(data="None"),
    "data that raise": _job(data="lambda: 1 / 0"),
    "data that are no Data": _job(data="lambda: 5"),
    "a sample that raises": _loader("if i == 40: raise OSError('of the disk')"),
    "a sample that stops": _loader("if i == 40: raise StopIteration"),
    "a sample of None": _loader("if i == 40: return None"),
    "a sample that exits": _loader("if i == 40: raise SystemExit(0)"),
    "a len that raises": _loader(
        "pass", "type('L', (), {'__len__': lambda s: 1 / 0, '__iter__': lambda s: iter([SAMPLES])})()"
    ),
    "a stream shorter than its len": _data("torch.utils.data.DataLoader(Stream(), batch_size=16)", _STREAM),
    # the rest
    **{
        f"count {count}": _job(count=f"lambda batch: {count}")
        for count in ("'text'", "0", "-1", "None", "float('nan')", "1 / 0")
    },
    **{
        f"metrics {found}": _job(
            metrics=f"lambda model, batch: {found}", data="lambda: bf.Data(train=SAMPLES, validation=SAMPLES)"
        )
        for found in ("None", "5", "{'a': 'text'}", "{5: 1.0}", "1 / 0")
    },
    **{f"a name {name}": _job(name=name) for name in ("5", "None", "''", "'a\\nb'", "'x' * 5000", "'../../x'")},
    **{
        f"about {about}": _job(about=about)
        for about in ("5", "{'a': object()}", "{'a': float('nan')}", "{1: {2: 3}}")
    },
}


def job_cases(_seed: int) -> Iterator[Case]:
    """Each job is estimated, with JSON as output, and trained."""
    yield control("estimated", partial(_estimated, {}, must_succeed=True))
    yield control("trained", partial(_trained, {}, must_succeed=True))
    for name, pieces in JOBS.items():
        yield Case(f"estimate, {name}", partial(_estimated, pieces))
        yield Case(f"train, {name}", partial(_trained, pieces))


def _write(pieces: dict[str, str], place: Place) -> None:
    text = TEMPLATE
    for name in ("top", "network", "model", "loss", "value", "parameters", "job", "returned", "end"):
        piece = pieces.get(name, _DEFAULTS.get(name, "" if name in ("top", "parameters", "end") else "pass"))
        text = text.replace(f"<{name}>", piece)
    (place.folder / "hostile.py").write_text(text)


def _estimated(pieces: dict[str, str], place: Place, *, must_succeed: bool = False) -> None:
    _write(pieces, place)
    arguments = ("--micro-batch-size", "4", "--device", "T4", "--json")
    ran = place.run("estimate", "hostile.py:job", *arguments)
    _check_end(ran, must_succeed)
    if ran.out or ran.status == 0:
        try:
            json.loads(ran.out)
        except ValueError:
            raise FailedError(Kind.WRONG, f"exit status {ran.status}, and no JSON: {ran.out[:60]!r}") from None


def _trained(pieces: dict[str, str], place: Place, *, must_succeed: bool = False) -> None:
    _write(pieces, place)
    arguments = ("--global-batch-size", "16", "--epochs", "1", "--run-dir", "run", "--device", "cpu")
    ran = place.run("train", "hostile.py:job", *arguments)
    _check_end(ran, must_succeed)
    if ran.status == 0:
        run = place.folder / "run"
        steps = (
            [entry for entry in metrics(run) if entry["kind"] == "step"]
            if (run / "metrics.jsonl").exists()
            else []
        )
        explained = "warning" in ran.err or f"after {len(steps)} of {STEPS} batches" in ran.out + ran.err
        if len(steps) < STEPS and not explained:
            raise FailedError(Kind.WRONG, f"exit status 0 after {len(steps)} of {STEPS} steps, without a word")


def _check_end(ran: Ran, must_succeed: bool) -> None:
    """A job's own error may show its traceback; any other is a message of brimful's."""
    if must_succeed:
        check_done(ran)
    if ran.status != 0 and "hostile.py" in ran.err and ("Traceback" in ran.err or "SyntaxError" in ran.err):
        return
    check_done_or_refused(ran, own="hostile.py")
