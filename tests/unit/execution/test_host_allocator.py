"""A CPU's malloc keeps freed memory, unless the user configured it."""

import os
import platform
import subprocess
import sys

import pytest

LOOP = """
import resource
import torch
from brimful.execution.host_allocator import keep_freed_memory
print(keep_freed_memory())
def step():
    blocks = [torch.ones(12 << 20) for _ in range(3)]  # of 48 MiB
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 3 * 48 * 256
"""Of 4 KiB, in the blocks of a step."""


def run(**environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    configured, faults = done.stdout.split()
    return configured, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library is configured")
def test_a_steady_step_touches_no_memory_for_the_first_time() -> None:
    configured, faults = run()
    assert configured == "True"
    assert faults < PAGES / 100


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
)
def test_what_the_user_configured_stays(environment: dict[str, str]) -> None:
    configured, faults = run(**environment)
    assert configured == "False"
    assert faults > PAGES / 2  # transparent huge pages would take fewer faults: they are off for the heap
