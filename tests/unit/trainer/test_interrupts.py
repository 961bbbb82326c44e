import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from safetensors.torch import load_file

from brimful.trainer.run.stop import stops_on_signals

SCRIPT = """
    import sys, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from brimful.job import Data, Job
    from brimful.settings import Settings
    from brimful.trainer import Trainer

    class Slow(nn.Linear):
        def forward(self, x):
            print("forward", flush=True)
            time.sleep(SECONDS)
            return super().forward(x)

    samples = torch.rand(64, 4), torch.zeros(64, dtype=torch.long)
    workers = int(sys.argv[2])
    job = Job(
        model=lambda: Slow(4, 3),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch=samples,
        optimizer="sgd",
        data=lambda: Data(
            train=DataLoader(TensorDataset(*samples), batch_size=8, num_workers=workers) if workers else samples
        ),
    )
    result = Trainer(
        job, Settings(micro_batch_size=4, gradient_accumulation_steps=2), run_dir=sys.argv[1], epochs=1000,
        verify=False,
    ).fit()
    print("returned", result.stopped_because, len(result.steps), flush=True)
"""


def start(run_dir, seconds, workers=0):
    script = textwrap.dedent(SCRIPT).replace("SECONDS", str(seconds))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_forwards(process, count):
    for _ in range(count):
        assert process.stdout.readline() == "forward\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_first_signal_finishes_the_step_saves_and_returns(tmp_path, number, workers):
    run_dir = tmp_path / "run"
    process = start(run_dir, 0.05, workers)
    read_forwards(process, 9)  # in the first half of the fifth step
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    result = json.loads((run_dir / "result.json").read_text())
    steps = len(result["steps"])
    reason = "terminated" if number == signal.SIGTERM else "interrupted"
    assert output.splitlines()[-1] == f"returned {reason} {steps}"
    assert steps in (4, 5, 6)
    assert result["stopped_because"] == reason
    assert "ending after this step" in errors
    assert set(load_file(run_dir / "weights.safetensors")) == {"weight", "bias"}
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == steps


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    process = start(tmp_path / "run", 20)
    read_forwards(process, 1)
    process.send_signal(signal.SIGINT)
    assert any("ending after this step" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors


def test_handlers_are_given_back_and_ignored_signals_stay_ignored():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stops = []
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with stops_on_signals(lambda _number: stops.append(1)):
            signal.raise_signal(signal.SIGTERM)
            assert stops == []
            signal.raise_signal(signal.SIGINT)
            assert stops == [1]
            assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
        with stops_on_signals(lambda _number: None):
            assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def run():
        with stops_on_signals(lambda _number: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_stop_drops_the_validation_under_way(job_with, trained, samples):
    from brimful.job import Data
    from brimful.results import StopReason

    trainers = []

    def metrics(model, batch):
        trainers[0].stop()
        return {}

    from brimful.trainer import Callback

    class Remember(Callback):
        def on_step(self, trainer, record):
            trainers.append(trainer)

    job = job_with(metrics=metrics, data=lambda: Data(train=samples, validation=samples))
    _, result = trained(job, 25, callbacks=[Remember()], epochs=2)
    assert result.validations == ()
    assert result.stopped_because is StopReason.INTERRUPTED
    assert len(result.steps) == 2
    assert torch.is_grad_enabled()
