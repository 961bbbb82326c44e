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
