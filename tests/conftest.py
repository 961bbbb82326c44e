"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")

SWEEP = 4
"""Of the cases of a sweep, one in this many runs without `--all-cases`: the first, and others by their names.
So every dimension of a product varies, and a new case changes no other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sweeps over many alike cases run whole only if that is asked for."""
    parser.addoption("--all-cases", action="store_true", help="run every case of tests marked sweep")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Sentences of results are compared whole; `tests/unit/report/test_layout.py` tests how they wrap."""
    if session.config.pluginmanager.has_plugin("terminalreporter"):
        writer = session.config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth  # pytest's own lines keep it
    os.environ["COLUMNS"] = "10000"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some cases of each sweep. Files with slow tests come first, those with most of them before others.

    A process takes a file at a time (`scripts/check.py`): with a long one at the end the other waits for it.
    """
    if not config.getoption("all_cases"):
        _keep_some_cases(config, items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def _keep_some_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases of sweeps, unless cases were chosen otherwise: by name, or those that failed."""
    if config.option.keyword or config.option.lf or any("[" in argument for argument in config.args):
        return
    cases: Counter[str] = Counter()
    left_out = []
    for item in items:
        if item.get_closest_marker("sweep"):
            function = item.nodeid.partition("[")[0]
            if cases[function] and crc32(item.nodeid.encode()) % SWEEP:
                left_out.append(item)
            cases[function] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="module", autouse=True)
def _heap_of_others_left_alone() -> None:
    """Capturing and measuring collect garbage first, which goes through all that earlier tests have imported.

    Without this a test with many short runs took five times as long after others as alone.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_disk_is_waited_for() -> Iterator[None]:
    """What is written can be read without; runs that save after each step wait for a slow disk half the time.

    Commands and ranks, which are other processes, wait as ever.
    """
    with patch("os.fsync", lambda _descriptor: None):
        yield


@pytest.fixture(scope="session", autouse=True)
def _file_of_factors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Predictions are not multiplied by what the user's runs have measured, and tests do not change that.

    Commands, which are other processes, have a cache of their own.
    """
    file = tmp_path_factory.mktemp("job_calibrations") / "job_calibrations.json"
    with patch("brimful.profiling.job_calibrations.FILE", str(file)):
        yield file


@pytest.fixture(autouse=True)
def _no_factors_of_other_tests(_file_of_factors: Path) -> None:
    _file_of_factors.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _bitsandbytes_makes_no_exceptions() -> None:
    """It keeps exceptions from 8 bits by a parameter's place in its group, for all optimizers to come."""
    if (module := sys.modules.get("bitsandbytes.optim.optimizer")) is not None:
        module.GlobalOptimManager._instance = None
