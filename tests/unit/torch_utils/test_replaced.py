"""What is replaced for a while is another one in its own thread alone."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brimful.errors import SaveError
from brimful.torch_utils.replaced import replaced
from brimful.utils import one_at_a_time
from brimful.utils.files import write_file
from brimful.utils.gc_pause import without_garbage_collection


class Original:
    """A class with a method, and an argument of `isinstance`."""

    def name(self) -> str:
        return "original"


def elsewhere(ask: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_a_method_and_a_function_are_replaced_here_and_not_elsewhere() -> None:
    library = SimpleNamespace(ask=lambda: "original")
    with (
        replaced(Original, "name", lambda _: "stand-in"),
        replaced(library, "ask", lambda: "stand-in"),
    ):
        assert (Original().name(), library.ask()) == ("stand-in", "stand-in")
        assert elsewhere(lambda: (Original().name(), library.ask())) == ("original", "original")
    assert (Original().name(), library.ask()) == ("original", "original")
    assert type(vars(Original)["name"]).__name__ == "function"


def test_a_class_is_replaced_in_isinstance_and_in_annotations_too() -> None:
    class StandIn:
        pass

    library = SimpleNamespace(Kind=Original)
    with replaced(library, "Kind", StandIn):
        imported = library.Kind
        assert isinstance(StandIn(), library.Kind)
        assert not isinstance(Original(), library.Kind)
        assert library.Kind | None == StandIn | None
        assert elsewhere(lambda: isinstance(Original(), library.Kind))
    assert type(imported()) is Original  # whoever imported it meanwhile has the original


def test_a_function_of_a_module_is_copied_pickled_and_named_as_itself() -> None:
    with replaced(os.path, "join", lambda *_: "stand-in"):
        imported = os.path.join
        assert copy.deepcopy([imported]) == [imported]
        assert pickle.loads(pickle.dumps(imported))() == "stand-in"
        assert imported.__name__ == "join"
    assert copy.copy(imported) is pickle.loads(pickle.dumps(imported)) is os.path.join


def test_a_thread_replaces_while_another_one_has_replaced_and_may_end_before_or_after_it() -> None:
    library = SimpleNamespace(ask=lambda: "original")
    original = library.ask
    first, second = (replaced(library, "ask", lambda name=name: name) for name in ("first", "second"))
    with ThreadPoolExecutor(1) as pool:
        with first:
            pool.submit(second.__enter__).result(timeout=20)
            assert library.ask() == "first"
            assert pool.submit(lambda: library.ask()).result() == "second"
            assert elsewhere(lambda: library.ask()) == "original"
        assert library.ask() == "original"
        assert pool.submit(lambda: library.ask()).result() == "second"
        pool.submit(second.__exit__, None, None, None).result()
    assert library.ask is original


def test_replacements_of_two_threads_are_each_its_own() -> None:
    library = SimpleNamespace(ask=lambda: "original")
    original, barrier = library.ask, threading.Barrier(2)

    def replace(name: str) -> set[str]:
        barrier.wait()
        found = set()
        for _ in range(200):
            with replaced(library, "ask", lambda: name):
                found.add(library.ask())
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replace, ["a", "b"])) == [{"a"}, {"b"}]
    assert library.ask is original


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_beside_a_pause_collects_garbage_and_may_pause_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_at_a_time, "PATIENCE_SECONDS", 0.1)
    with without_garbage_collection():
        status = elsewhere(_collects_in_a_fork)
    assert status == 0
    assert gc.isenabled()


def _collects_in_a_fork() -> int:
    child = os.fork()
    if child == 0:
        enabled = gc.isenabled()
        with without_garbage_collection():
            paused = not gc.isenabled()
        os._exit(0 if enabled and paused else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_waits_for_the_end_of_a_pause_and_the_parent_goes_on() -> None:
    with ThreadPoolExecutor(1) as pool:
        with without_garbage_collection():
            status = pool.submit(_collects_in_a_fork)
            with pytest.raises(TimeoutError):
                status.result(timeout=0.2)
        assert status.result() == 0
    with without_garbage_collection():
        assert _forks_within() == 0
        assert not gc.isenabled()
    assert elsewhere(_collects_in_a_fork) == 0


def _forks_within() -> int:
    """A fork by the thread that is within stays within."""
    child = os.fork()
    if child == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_INTERRUPTED = """
import os, signal, threading, time
from brimful.utils.gc_pause import without_garbage_collection

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let its children ignore it
within = threading.Event()

def holds():
    with without_garbage_collection():
        within.set()
        time.sleep(1)

def interrupts():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=holds).start()
within.wait()
threading.Thread(target=interrupts).start()
try:
    child = os.fork()
    if child == 0:
        with without_garbage_collection():
            os._exit(3)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted", os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_an_interrupt_while_a_fork_waits_is_not_lost() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "interrupted 3\n", ran.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SaveError, match="a pipe that no process reads"):
        write_file(tmp_path / "pipe", "text")
