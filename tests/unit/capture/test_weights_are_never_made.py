"""A capture takes memory for ops and names, not for weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

SCRIPT = """
import json, resource
import torch, transformers.models.llama.modeling_llama
from brimful.models.resolve import find_architecture
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.settings import Settings
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = capture_step(find_architecture("llama-3-8b"), Settings(micro_batch_size=1), find_device("H100 SXM"))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"parameters": trace.parameter_count, "grown_kib": peak - before}))
"""


@pytest.mark.slow
def test_capturing_8_billion_parameters_takes_less_than_a_gibibyte() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["parameters"] == 8_030_261_248
    assert result["grown_kib"] < 2**20


LIMITED = """
import resource
from torch import nn
import torch, brimful as bf
job = bf.Job(
    model=lambda: nn.Sequential(nn.Linear(32_000, 128_000), nn.Linear(128_000, 32_000)),
    loss=lambda model, x: model(x).square().mean(),
    batch=lambda n: torch.randn(n, 32_000),
    optimizer="sgd",
)
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
print(bf.estimate(job, "T4", micro_batch_size=1, suggest=False).parameter_count)
"""


def test_weights_larger_than_the_address_space_are_predicted() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 32_000 * 128_000 + 32_000 + 128_000
