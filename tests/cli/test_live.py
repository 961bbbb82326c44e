"""`--live`: a page on this machine while a script or a run goes on, for who has its address, until it ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from helpers.command_line import keep_rates

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
total = 0
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    total = total + loss
    if step in (1, 7):
        wait_for(f"go{step}")
print("trained", total.item().hex(), sys.argv[1:], flush=True)
if "fork" in sys.argv and os.fork() == 0:
    wait_for("never")
    os._exit(0)
if "signal" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("waiting", flush=True)
    print("got", signal.sigwait({signal.SIGUSR1}).name, flush=True)
sys.exit(3)
"""
JOB = """
import time
from pathlib import Path
import torch
from torch import nn
import brimful as bf

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        written = Path("run/metrics.jsonl")
        while written.exists() and written.read_text().count('"loss"') >= 3 and not Path("go").exists():
            time.sleep(0.02)
        return {"x": torch.randn(8), "y": torch.tensor(index % 2)}

job = bf.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
    batch=lambda n: {"x": torch.randn(n, 8), "y": torch.randint(0, 2, (n,))},
    optimizer="sgd",
    data=lambda: bf.Data(train=torch.utils.data.DataLoader(Rows(), batch_size=4)),
    name="tiny",
)
"""


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A script and a job, which wait until files are there; in the end all that they wait for is."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    keep_rates(tmp_path / "cache")
    yield tmp_path
    for name in ("go1", "go7", "go", "never"):
        (tmp_path / name).touch()
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def started(folder: Path, *arguments: str, **options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **options}
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    found = re.search(r"live page, until this ends: (http://127\.0\.0\.1:\d+/\S+/)$", process.stderr.readline())
    assert found is not None
    return found[1]


def status(url: str, method: str = "GET", **headers: str) -> int:
    try:
        with urlopen(Request(url, method=method, headers=headers), timeout=20) as answer:
            return int(answer.status)
    except HTTPError as error:
        refusal = error
    with refusal:
        assert refusal.headers["Cache-Control"] == "no-store"
        assert b"<" not in refusal.read()
        return refusal.code


def page_with(url: str, words: str) -> str:
    """The page, as soon as it has some words."""
    for _ in range(600):
        with urlopen(url, timeout=20) as answer:
            text: str = answer.read().decode()
        if words in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"{words!r} is not on the page: {text[-2000:]}")


def assert_gone(url: str) -> None:
    with pytest.raises((URLError, ConnectionError)):
        urlopen(url, timeout=2)


def test_a_script_is_followed_and_stays_as_it_is(folder: Path) -> None:
    process = started(folder, "run", "--live", "script.py", "--live")
    url = address(process)
    text = page_with(url, "<h1>watched 2 optimizer steps on cpu")
    assert "Memory in tensors by category" in text
    (folder / "go1").touch()
    text = page_with(url, "unwatched")
    assert "<h1>watched 3 optimizer steps on cpu" in text
    assert "total keeps the graphs of earlier steps" in text
    (folder / "go7").touch()
    out, err = process.communicate(timeout=120)
    alone = subprocess.run([sys.executable, "script.py", "--live"], cwd=folder, capture_output=True, text=True)
    assert process.returncode == alone.returncode == 3
    assert out == alone.stdout
    assert "['--live']" in out
    assert "watched 3 optimizer steps" in err
    assert "live page" not in err
    assert_gone(url)


def test_only_who_has_the_whole_address_sees_the_page(folder: Path) -> None:
    process = started(folder, "run", "--live", "script.py")
    url = address(process)
    parts = urlsplit(url)
    port, token = parts.port, parts.path.strip("/")
    root = f"http://127.0.0.1:{port}/"
    assert len(token) >= 32
    assert status(url) == 200
    assert status(url.replace("127.0.0.1", "localhost")) == 200
    assert status(url, Host="localhost:8080") == 200  # a tunnel
    for wrong in (root, root + token, root + token[::-1] + "/", url + "?a", url + "x", root + "%C3%A4%00"):
        assert status(wrong) == 404
    for host in ("example.com", f"example.com:{port}", "127.0.0.1.example.com", "localhost:80@example.com", ""):
        assert status(url, Host=host) == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        assert status(url, method) == 501
    with urlopen(url, timeout=20) as answer:
        headers = answer.headers
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(each.startswith("'sha256-") for each in f"{policy['script-src']} {policy['style-src']}".split())
    assert status(url, **{"If-None-Match": headers["ETag"]}) == 304
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port or 0), timeout=2)  # this machine too
    two_hosts = http.client.HTTPConnection("127.0.0.1", port or 0, timeout=20)
    two_hosts.putrequest("GET", parts.path)  # has the right one
    two_hosts.putheader("Host", "example.com")
    two_hosts.endheaders()
    assert two_hosts.getresponse().status == 403
    two_hosts.close()


def test_a_connection_that_asks_nothing_keeps_nobody_waiting(folder: Path) -> None:
    process = started(folder, "run", "--live", "script.py", "a")
    url = address(process)
    (folder / "go7").touch()
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)):
        page_with(url, "<h1>watched 2")
        (folder / "go1").touch()
        assert process.wait(timeout=120) == 3
    assert_gone(url)


@pytest.mark.skipif(sys.platform == "win32", reason="forks and signals")
def test_signals_are_the_scripts_and_a_forked_process_that_goes_on_keeps_no_port(folder: Path) -> None:
    process = started(folder, "run", "--live", "script.py", "fork", "signal")
    url = address(process)
    (folder / "go1").touch()
    (folder / "go7").touch()
    assert process.stdout is not None
    while process.stdout.readline() != "waiting\n":
        assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "got SIGUSR1\n"
    assert process.wait(timeout=120) == 3
    assert_gone(url)


def test_a_busy_port_is_an_error_before_the_script_starts(folder: Path) -> None:
    (folder / "go1").touch()
    (folder / "go7").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = started(folder, "run", "--live-port", str(port), "script.py")
        out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use. Name another" in err
    process = started(folder, "run", "--live-port", str(port), "script.py")
    assert urlsplit(address(process)).port == port
    process.communicate(timeout=120)
    assert process.returncode == 3


def test_one_of_several_ranks_serves(folder: Path) -> None:
    (folder / "go1").touch()
    (folder / "go7").touch()
    ranks = {"WORLD_SIZE": "2", "RANK": "1"}
    process = started(folder, "run", "--live", "script.py", **ranks)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "http" not in err


def test_a_run_is_followed(folder: Path) -> None:
    asked = ("job.py:job", "--global-batch-size=4", "--epochs=2", "--device=cpu", "--run-dir=run")
    process = started(folder, "train", *asked, "--live")
    url = address(process)
    assert "No step has ended yet" in page_with(url, "<h1>training tiny")
    text = page_with(url, "<h1>run: 3 steps so far</h1>")
    assert "predicted by the plan" in text
    assert re.search(r"median step</td><td[^>]*>[\d.]+ .?s</td><td[^>]*>[\d.]+ .?s</td>", text)
    (folder / "go").touch()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert_gone(url)
