"""What a calibration may find, for tests that need no real one."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from brimful.devices import Dispatch, RateCurve
from brimful.profiling import calibrate
from brimful.profiling.calibrate import THOROUGH_SWEEPS, Calibration

CALIBRATION = Calibration(
    fp32_flops_per_second=1e11,
    fp16_flops_per_second=1e9,
    bf16_flops_per_second=2e11,
    memory_bandwidth_bytes_per_second=8e9,
    launch_seconds=2e-6,
    to_device_bytes_per_second=None,
    to_host_bytes_per_second=None,
    dispatch=Dispatch(forward_seconds=5e-6, backward_seconds=6e-6, optimizer_seconds=3e-6),
    curves=(RateCurve(kind="elementwise", points=((8.0, 1e-6), (8e6, 1e-3))),),
    sweeps=3,
    disturbed_fraction=0.1,
    measured_at_seconds=1.7e9,
    took_seconds=5.0,
)


def calibrated(folder: Path, *, threads: int = 1) -> dict[str, str]:
    """The environment of a command that finds `CALIBRATION` kept in a folder.

    Args:
        folder: Of the command's cache.
        threads: On which the command is to compute.

    Returns:
        All of this process's environment, and what names the folder, the threads and the width of text.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    changes = {"COLUMNS": "90", "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": str(threads)}
    try:
        with (
            patch.dict(os.environ, changes),
            patch.object(calibrate, "measure_device", lambda *_args, **_options: CALIBRATION),
        ):
            calibrate.calibrate_cpu(sweeps=THOROUGH_SWEEPS)
            return dict(os.environ)
    finally:
        torch.set_num_threads(before)


def output_of(script: Path, folder: Path) -> str:
    """What a script prints that runs in a folder on one thread and finds `CALIBRATION` there."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        env=calibrated(folder),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
