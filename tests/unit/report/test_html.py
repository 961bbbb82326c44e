"""Notebooks show what `print` shows: all words and numbers, escaped, in small HTML without scripts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.report.html import as_html
from brimful.report.layout import Bar, Gauge, Listing, Remark, Report, Row, Share, Tone, as_text
from brimful.utils.display import PrintedResult

HOSTILE = '<script>alert("1")</script>&amp;\'$x$'
MOST_BYTES = 30_000
ALLOWED = {"div", "table", "tr", "td", "details", "summary", "pre"}
"""Elements that JupyterLab keeps in notebooks that are not trusted."""


class Page(HTMLParser):
    """Text, elements and attributes of HTML; fails where an element is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def words_of(text: str) -> list[str]:
    """Words and numbers, without the marks between cells and the bars."""
    return [word for each in text.replace("█", "").split() if (word := each.strip(",:;"))]


class Hostile(nn.Module):
    """A module whose path in the model is not a name."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE.replace(".", ""), nn.Sequential(nn.Linear(64, 64), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (inner,) = self.children()
        return inner(x)


def job(name: str = "layers") -> bf.Job:
    return bf.Job(
        name=name,
        model=lambda: nn.Sequential(*(Hostile() for _ in range(2)), *(nn.Linear(64, 64) for _ in range(4))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 256, 64),
        data=lambda: bf.Data(train=torch.randn(32, 256, 64)),
        optimizer="sgd",
    )


@cache
def results() -> dict[str, PrintedResult]:
    hostile = job(HOSTILE)
    plan = bf.plan(hostile, "cpu", global_batch_size=8, budget="70%")
    on_gpu = bf.plan(hostile, "RTX 3090", global_batch_size=4096, budget="60%")
    measured = bf.measure(hostile, plan, "cpu")
    peak = 2 * measured.measured_peak_allocated_bytes
    return {
        "estimate": bf.estimate(hostile, "RTX 3090", micro_batch_size=8, compare_allocators=True),
        "does not fit": bf.estimate(hostile, "RTX 3090", micro_batch_size=512, budget="400MiB"),
        "plan": on_gpu,
        "plan for a CPU": plan,
        "measurement": measured,
        "measurement on a GPU": replace(
            measured, measured_peak_device_bytes=peak, predicted_peak_device_bytes=peak + 12345
        ),
        "measured settings": bf.measure(hostile, bf.Settings(micro_batch_size=8), "cpu"),
        "gpus": bf.gpus(hostile, global_batch_size=8, devices=["T4", "A100-40GB"]),
        "training": bf.fit(hostile, plan, steps=4, show_progress=False)[0],
        "one step": bf.fit(hostile, plan, steps=1, show_progress=False)[0],
        "check": plan.check(hostile),
        "equivalence": bf.verify(hostile, plan),
        "export": plan.export(hostile, "accelerate"),
    }


NAMES = [
    *("estimate", "does not fit", "plan", "plan for a CPU", "measurement", "measurement on a GPU"),
    *("measured settings", "gpus", "training", "one step", "check", "equivalence", "export"),
]


@pytest.mark.parametrize("name", NAMES)
def test_html_has_every_word_and_number_of_the_text_in_order(name: str) -> None:
    result = results()[name]
    shown = iter(words_of(Page(result._repr_html_()).text))
    assert [word for word in words_of(str(result)) if word not in shown] == []


@pytest.mark.parametrize("name", NAMES)
def test_html_is_small_and_has_neither_scripts_nor_styles_of_the_page(name: str) -> None:
    html = results()[name]._repr_html_()
    page = Page(html)
    assert len(html.encode()) < MOST_BYTES
    assert page.elements <= ALLOWED
    assert page.attributes <= {"class", "style"}
    assert not any("url(" in style or "position" in style for style in page.styles)
    assert not any(re.search(r"[:,]\.\d", style) for style in page.styles)  # JupyterLab drops .8 and keeps 0.8


@pytest.mark.parametrize("name", NAMES)
def test_every_result_is_a_json_object_of_its_own_numbers(name: str) -> None:
    result = results()[name]
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    numbers = {key: value for key, value in document.items() if isinstance(value, int | float | str)}
    assert numbers
    for key in numbers.keys() - {"brimful_plan", "brimful_training"}:
        assert numbers[key] == getattr(result, key)


@pytest.mark.parametrize("name", ["estimate", "plan", "check", "equivalence", "gpus"])
def test_names_of_jobs_and_modules_are_escaped(name: str) -> None:
    html = results()[name]._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert HOSTILE in Page(html).text


def test_module_names_are_escaped() -> None:
    estimate = bf.estimate(job("plain"), "RTX 3090", micro_batch_size=8)
    assert "script" in str(estimate)
    assert "<script" not in estimate._repr_html_()


def test_a_step_beyond_the_budget_is_drawn_red() -> None:
    estimate = results()["does not fit"]
    assert "does not fit" in str(estimate)
    assert "#d64545" in estimate._repr_html_()
    assert "#d64545" not in results()["estimate"]._repr_html_()


def report(*bars: Bar, limit: float | None = None) -> Report:
    return Report(heading="h", parts=(Gauge(bars=bars, limit=limit),))


def widths(html: str) -> list[float]:
    return [float(width) for width in re.findall(r"width:([\d.]+)%", html)]


def test_a_bar_ends_at_its_share_of_the_limit_and_what_is_beyond_it_is_red() -> None:
    within = as_html(report(Bar(label="peak", text="1 B", size=25, tone=Tone.FITS), limit=100))
    assert widths(within) == [25.0, 75.0]
    assert "#d64545" not in within
    beyond = as_html(report(Bar(label="peak", text="1 B", size=200), limit=100))
    assert widths(beyond)[:2] == [50.0, 50.0]
    assert "#d64545" in beyond


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_quantity_that_has_no_length_is_not_drawn(size: float) -> None:
    html = as_html(report(Bar(label="step", text="?", size=size), Bar(label="other", text="1 s", size=1)))
    assert all(0 <= width <= 100 for width in widths(html))
    assert "nan" not in html
    assert "inf" not in html


def test_every_part_is_in_the_text_and_in_html() -> None:
    whole = Report(
        heading="heading",
        parts=(
            Row("label", "fact"),
            Remark("note", "a remark"),
            Row("other", "\udcff is not UTF-8"),
            Listing(
                title="t", line="    {:<4}{:>4}  {}", heading=("a", "b", ""), rows=(("x", "1", Share(0.5)),)
            ),
        ),
    )
    assert as_text(whole).splitlines() == [
        "heading",
        "  label           fact",
        "  note: a remark",
        "  other           \udcff is not UTF-8",
        "  t",
        "    a      b",
        "    x      1  ████████████",
    ]
    page = Page(as_html(whole))
    assert " ".join(
        page.words
    ) == r"heading label fact note: a remark other \udcff is not UTF-8 t a b  x 1".replace("b  x", "b x")
