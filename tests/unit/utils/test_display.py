"""Display is best effort: what cannot be written is discarded."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from pathlib import Path

import pytest

from brimful.utils.display import BestEffortText, make_console, open_best_effort


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_remembered_and_not_raised() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream, file = open_best_effort(descriptor, None)
    print("lost", file=stream, flush=True)
    assert file.failure is not None
    assert file.failure.errno == errno.ENOSPC
    stream.close()
    os.close(descriptor)  # which the stream left open


def test_a_pipe_whose_reader_is_gone_takes_everything() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream, file = open_best_effort(writer, None)
    print("lost" * 100_000, file=stream, flush=True)
    assert isinstance(file.failure, BrokenPipeError)
    os.close(writer)


def test_what_comes_after_a_failure_is_written_again(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        stream, file = open_best_effort(log.fileno(), None)
        read_only = os.open(tmp_path / "log", os.O_RDONLY)
        kept = os.dup(log.fileno())
        os.dup2(read_only, log.fileno())
        print("lost", file=stream, flush=True)
        os.dup2(kept, log.fileno())
        print("written", file=stream, flush=True)
        os.close(kept)
        os.close(read_only)
    assert file.failure is not None
    assert (tmp_path / "log").read_text() == "written\n"


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream, file = open_best_effort(writer, None)
    taken = bytearray()

    def read() -> None:
        with os.fdopen(reader, "rb") as pipe:
            taken.extend(pipe.read())

    thread = threading.Thread(target=read)
    thread.start()
    print("x" * 1_000_000, file=stream, flush=True)
    os.close(writer)
    thread.join()
    assert file.failure is None
    assert len(taken) == 1_000_001


def test_a_stream_keeps_its_encoding_and_escapes_what_it_lacks(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii", buffering=1) as log:
        stream, _ = open_best_effort(log.fileno(), log)
        print("3 µs → b\udcff", file=stream)  # a line, at once
        assert (tmp_path / "log").read_text() == "3 \\xb5s \\u2192 b\\udcff\n"


class Full(io.StringIO):
    """A user's own stream, such as one that also writes to a file."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "full")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "full")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Full(), closed(), None])
def test_any_stream_may_fail(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    print("lost", file=BestEffortText(stream), flush=True)
    monkeypatch.setattr(sys, "stderr", stream)
    console = make_console()
    console.print("lost")
    assert not console.is_terminal
