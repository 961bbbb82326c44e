"""`brimful report`: each kind of source makes a page that a browser draws; all else is refused in words."""

from __future__ import annotations

import html
import json
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from brimful.doctor.allocations import device_uses
from brimful.doctor.snapshot import read_snapshot
from brimful.memory import predict_memory
from brimful.trace import Trace
from helpers.chromium import CHROMIUM, Chromium
from helpers.command_line import brimful

JOB = """
import torch
from torch import nn
import brimful as bf

open("IMPORTED", "w").close()

def job(width=8):
    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, width), "y": torch.randint(0, 2, (n,))},
        optimizer="sgd",
        data=lambda: bf.Data(train={"x": torch.randn(8, width), "y": torch.randint(0, 2, (8,))}),
        name="tiny",
    )
"""
SCRIPT = """
import torch
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
total = 0
for _ in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    total = total + loss
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, an estimate, a plan, a run and a watched run."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    estimate = ("estimate", "job.py:job", "--device", "RTX 3090", "--micro-batch-size", "4", "--json")
    made = done(brimful(folder, *estimate, "--save-trace", "trace.json.gz"))
    (folder / "estimate.json").write_text(made.stdout, encoding="utf-8")
    done(brimful(folder, "plan", "job.py:job", "--device=cpu", "--global-batch-size=4", "--output=plan.json"))
    done(brimful(folder, "train", "job.py:job", "--plan=plan.json", "--epochs=3", "--run-dir=run"))
    done(brimful(folder, "run", "--output=watched.json", "script.py"))
    return folder


def done(made: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert made.returncode == 0, made.stderr
    return made


def page(folder: Path, *arguments: str) -> str:
    (folder / "report.html").unlink(missing_ok=True)
    (folder / "IMPORTED").unlink(missing_ok=True)
    made = done(brimful(folder, "report", *arguments))
    assert made.stdout == ""
    return (folder / "report.html").read_text(encoding="utf-8")


def charts(text: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<h3>(.*?)</h3>", text)]


MEMORY = "Memory in tensors by category"


@pytest.mark.parametrize(
    ("arguments", "heading", "drawn"),
    [
        (("trace.json.gz",), "tiny: ", [MEMORY]),
        (("trace.json.gz", "--device", "RTX 3090"), "tiny on RTX 3090: fits", [MEMORY]),
        (("estimate.json",), "tiny on RTX 3090: fits", []),
        (("plan.json",), "tiny on cpu", []),
        (("plan.json", "--model", "job.py:job"), "tiny on cpu", [MEMORY]),
        (("run",), "tiny on cpu: 6 steps", ["Loss", "Step time"]),
        (("run", "--model", "job.py:job"), "tiny on cpu: 6 steps", ["Loss", "Step time", MEMORY]),
        (("watched.json",), "script.py: watched 3 optimizer steps on cpu", [MEMORY]),
    ],
)
def test_each_kind_of_source_makes_a_page(
    folder: Path, arguments: tuple[str, ...], heading: str, drawn: list[str]
) -> None:
    text = page(folder, *arguments)
    assert f"<h1>{heading}" in text
    assert [each for each in charts(text) if each not in ("Predicted throughput by budget",)] == drawn
    assert (folder / "IMPORTED").exists() == ("--model" in arguments)


def test_a_plan_of_a_built_in_model_shows_its_memory_without_naming_it(folder: Path) -> None:
    asked = ("plan", "resnet18", "--image-size=33", "--device", "T4", "--global-batch-size=2")
    done(brimful(folder, *asked, "--output=built_in.json"))
    assert MEMORY in charts(page(folder, "built_in.json"))


def test_a_run_that_has_not_ended_shows_its_steps_so_far(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "training", dirs_exist_ok=True)
    (folder / "training" / "result.json").unlink()
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "training" / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    text = page(folder, "training")
    assert "<h1>training: 3 steps so far</h1>" in text
    assert [each for each in charts(text) if each != "Predicted throughput by budget"] == ["Loss", "Step time"]


def test_the_findings_of_a_watched_run_are_on_its_page(folder: Path) -> None:
    found = json.loads((folder / "watched.json").read_text())["findings"]
    text = html.unescape(page(folder, "watched.json"))
    assert any("total keeps the graphs" in each["what"] for each in found)
    for each in found:
        assert each["what"] in text
        assert each["change"] in text
        assert each["line"] in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.json",), "the file none.json cannot be read: No such file or directory. Give a run directory"),
        (("job.py",), "is not valid JSON: "),
        (("prices.json",), "is none of what a page is made of: a run directory (brimful train), a plan"),
        (
            (".",),
            "it has neither result.json nor metrics.jsonl. Give a run directory (brimful train)",
        ),
        (("plan.json", "--output", "job.py"), "job.py is there already. Name another --output, or replace it"),
        (("plan.json", "--output", "no/report.html"), "no/report.html could not be written: No such file"),
        (("plan.json", "--model", "job.py:none"), "none"),
        (("trace.json.gz", "--device", "cpu"), "follows a cuda device and says nothing of"),
        (("trace.json.gz", "--device", "RTX 9999"), "RTX 9999"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_words(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    (folder / "prices.json").write_text('{"L4": 0.8}')
    (folder / "report.html").unlink(missing_ok=True)
    made = brimful(folder, "report", *arguments)
    assert made.returncode in (1, 2)
    assert words in made.stderr
    assert "Traceback" not in made.stderr
    assert not (folder / "report.html").exists()
    assert (folder / "job.py").read_text() == JOB


@pytest.mark.parametrize("source", [("trace.json.gz",), ("plan.json", "--model", "job.py:job")])
def test_other_viewers_get_memory_over_the_step_by_the_end_of_the_name(
    folder: Path, source: tuple[str, ...]
) -> None:
    done(brimful(folder, "report", *source, "--output", "step.json", "--force"))
    done(brimful(folder, "report", *source, "--output", "step.pickle", "--force"))
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    assert pickle.loads((folder / "step.pickle").read_bytes())["device_traces"][0]


def test_a_snapshot_of_a_trace_has_its_peak(folder: Path) -> None:
    """`brimful doctor` reads what is written for memory_viz, and its page draws the history."""
    done(brimful(folder, "report", "trace.json.gz", "--output", "predicted.pickle", "--force"))
    (use,) = device_uses(read_snapshot(str(folder / "predicted.pickle")))
    assert use.peak is not None
    rounding = predict_memory(Trace.load(folder / "trace.json.gz")).peak_allocated_bytes - use.peak.size_bytes
    assert 0 <= rounding < 512 * sum(line.blocks for line in use.peak.lines)
    text = page(folder, "predicted.pickle")
    assert charts(text) == ["Memory in tensors on GPU 0 over its history"]
    assert "at the peak, by line of code" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [("estimate.json", "is not a brimful trace"), ("plan.json", "the plan's model is not built in")],
)
def test_without_a_trace_other_viewers_get_nothing(folder: Path, source: str, words: str) -> None:
    made = brimful(folder, "report", source, "--output", "none.pickle")
    assert made.returncode in (1, 2)
    assert words in made.stderr
    assert not (folder / "none.pickle").exists()


def test_force_replaces_a_page(folder: Path) -> None:
    page(folder, "plan.json")
    assert brimful(folder, "report", "estimate.json").returncode == 1
    done(brimful(folder, "report", "estimate.json", "--force"))
    assert "RTX 3090" in (folder / "report.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("source", ["trace.json.gz", "run", "watched.json", "estimate.json"])
def test_a_real_browser_draws_every_chart_and_reports_no_error(folder: Path, source: str) -> None:
    count = len(charts(page(folder, source)))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    opened = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={folder / 'browser'}", (folder / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in opened.stderr
    assert opened.stdout.count("<canvas") == count
    assert len(re.findall(r'role="status">[^<]+</div>', opened.stdout)) == count


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_keyboard_reads_all_that_the_mouse_does(folder: Path) -> None:
    """Tab reaches all that can be opened or read, with its focus shown; arrows read what hovering shows."""
    page(folder, "watched.json")
    readout = "document.querySelector('.readout').textContent"
    with Chromium(folder / "keyboard", (folder / "report.html").as_uri()) as browser:
        browser.evaluate("document.querySelector('.plot').scrollIntoView()")
        box = browser.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
        at_peak = browser.evaluate(readout)
        assert "temporaries" in at_peak
        assert "script.py:" in at_peak
        assert "<" not in at_peak
        browser.point(box["right"] - 1, box["top"] + 5)
        hovered = browser.evaluate(readout)
        assert hovered != at_peak

        reached = []
        while True:
            browser.press("Tab")
            if browser.evaluate("document.activeElement === document.body"):
                break
            assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            reached.append(
                browser.evaluate("document.activeElement.className || document.activeElement.nodeName")
            )
            if reached[-1] == "plot":
                browser.press("Home")
                assert browser.evaluate(readout) not in (hovered, at_peak)
                browser.press("End")
                assert browser.evaluate(readout) == hovered
            elif browser.evaluate("document.activeElement.textContent").endswith("as a table"):
                browser.press("Enter")  # its numbers are then reached next, and can be scrolled
        assert browser.evaluate("document.querySelector('figure details').open")
        assert {"plot", "scroll", "SUMMARY"} == set(reached)
        assert reached.index("scroll") == reached.index("plot") + 2
        shown = "[...document.querySelectorAll('summary')].filter((each) => each.checkVisibility()).length"
        assert reached.count("SUMMARY") == browser.evaluate(shown)
        assert not browser.errors


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_phases_have_short_names_where_the_window_is_narrow(folder: Path) -> None:
    page(folder, "trace.json.gz")
    with Chromium(folder / "narrow", (folder / "report.html").as_uri()) as browser:
        browser.evaluate(
            "drawn = []; CanvasRenderingContext2D.prototype.fillText = (text) => { drawn.push(text); }"
        )
        browser.resize(1200, 900)
        browser.until("drawn.includes('backward')")
        assert not browser.evaluate("drawn.includes('bwd')")
        browser.resize(300, 900)
        browser.until("drawn.includes('bwd')")
        browser.until("(({scrollWidth, clientWidth}) => scrollWidth === clientWidth)(document.documentElement)")
