"""A page is one file that loads nothing: sound HTML, every text escaped, a table behind each chart."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from msgspec import structs

import brimful as bf
from brimful.planner import Plan
from brimful.planner.plan import BudgetPoint
from brimful.prediction import Estimate, estimate_trace
from brimful.report.at_peak import peak_place
from brimful.report.page import page_html, plan_page, run_page, trace_page
from brimful.report.page.charts import POINTS, Unit, curve
from brimful.settings import Action, UnitAction
from brimful.trace import Phase, Trace
from helpers.captured_jobs import A100, capture, job
from helpers.tiny_jobs import make_job, train

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"
VOID = {"meta", "br", "img", "link"}
MOST_BYTES = 2_000_000


class Page(HTMLParser):
    """Elements, texts and scripts of a page; fails where an element is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] == "style":
            self.styles.append(data)
        elif self._open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]


@cache
def captured() -> Trace:
    return capture(job(), A100, samples=8)


@cache
def planned() -> Plan:
    plan = bf.plan(job(), A100, global_batch_size=8)
    units = (UnitAction(fqn="0", action=Action.RECOMPUTE), UnitAction(fqn="2", action=Action.KEEP))
    points = tuple(BudgetPoint(budget_bytes=size << 30, predicted_step_seconds=9 / size) for size in (1, 2, 3))
    return replace(plan, settings=replace(plan.settings, units=units), budget_curve=points)


def estimated(trace: Trace) -> Estimate:
    return estimate_trace(trace, A100)


def pages() -> dict[str, str]:
    trace = captured()
    return {
        "trace": page_html(trace_page(trace)),
        "estimate": page_html(trace_page(trace, estimated(trace), A100)),
        "plan": page_html(plan_page(planned(), trace, A100)),
        "plan alone": page_html(plan_page(planned(), note="no model")),
    }


@pytest.mark.parametrize("name", ["trace", "estimate", "plan", "plan alone"])
def test_a_page_is_sound_and_loads_nothing(name: str) -> None:
    text = pages()[name]
    page = Page(text)
    assert len(text.encode()) < MOST_BYTES
    assert not any({"src", "href", "action", "srcset", "data"} & each.keys() for _, each in page.elements)
    assert not any(attribute.startswith("on") for _, each in page.elements for attribute in each)
    assert "@import" not in text
    assert "url(" not in text
    (policy,) = (each["content"] for each in page.all("meta") if "http-equiv" in each)
    code = (*page.scripts[1:], *page.styles)
    digests = {base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in code}
    assert set(re.findall(r"sha256-([^']+)", policy or "")) == digests
    assert (policy or "").startswith("default-src 'none'; script-src ")


@pytest.mark.parametrize("name", ["trace", "estimate", "plan"])
def test_each_chart_has_a_label_and_a_table_of_what_it_draws(name: str) -> None:
    page = Page(pages()[name])
    charts = json.loads(page.scripts[0])
    plots = [each for each in page.all("div") if each.get("class") == "plot"]
    assert len(charts) == len(plots) == len(page.all("figure")) > 0
    for chart, plot in zip(charts, plots, strict=True):
        assert plot["role"] == "img"
        assert plot["tabindex"] == "0"
        assert len(plot["aria-label"] or "") > 40
        assert all(len(each["values"]) == len(chart["x"]) for each in chart["series"])
    rows = sum(len(chart["x"]) + 1 for chart in charts)
    assert len([1 for each in page.all("th") if each.get("scope") == "col"]) >= 2 * len(charts)
    assert len(page.all("tr")) >= rows


def test_the_memory_that_is_drawn_adds_up_to_the_predicted_peak_which_is_marked() -> None:
    trace = captured()
    (chart,) = json.loads(Page(pages()["trace"]).scripts[0])
    sums = [sum(values) for values in zip(*(each["values"] for each in chart["series"]), strict=True)]
    peak = bf.memory.predict_memory(trace).peak_allocated_bytes
    assert max(sums) == peak == sums[chart["mark"]]


def test_units_budgets_and_seconds_of_a_plan_are_shown() -> None:
    page = Page(pages()["plan"])
    classes = [each.get("class") for each in page.all("li")]
    assert classes.count("recomputed") == 1
    assert classes.count("kept") == 1
    budgets = json.loads(page.scripts[0])[0]
    assert budgets["unit"] == "rate"
    assert len(budgets["x"]) == 4
    assert budgets["x"][budgets["mark"]] == planned().budget_bytes
    assert any(re.search(r"B · \S+ (µs|ms|s)", words) for words in page.words)


def test_hostile_names_are_text() -> None:
    trace = captured()
    ops = tuple(structs.replace(op, module=HOSTILE, name=HOSTILE, line=HOSTILE) for op in trace.ops)
    storages = tuple(structs.replace(storage, label=HOSTILE) for storage in trace.storages)
    classes = tuple((fqn, HOSTILE) for fqn, _ in trace.module_classes)
    hostile = replace(trace, job=HOSTILE, ops=ops, storages=storages, module_classes=classes)
    plan = replace(planned(), job=HOSTILE, peak_at=HOSTILE, notes=(HOSTILE,))
    for made in (trace_page(hostile), plan_page(plan, hostile, A100, HOSTILE)):
        text = page_html(made)
        page = Page(text)
        assert not page.all("img")
        assert len(page.scripts) == 3
        assert json.loads(page.scripts[0])
        assert HOSTILE in "".join(page.words)
        assert HOSTILE not in text


def test_what_is_outside_of_the_model_has_words_and_no_path() -> None:
    assert peak_place(Phase.BACKWARD, "<loss>", "mul") == "backward, the loss, mul"
    assert peak_place(Phase.OPTIMIZER, "<optimizer>", None) == "optimizer"
    assert peak_place(Phase.BACKWARD, "<optimizer>", "mul", "a.py:3") == "backward, the optimizer, mul, a.py:3"
    assert peak_place(Phase.SETUP, "<optimizer>", "mul") == "before the first step, mul"
    trace = captured()
    assert "<loss>" in {op.module for op in trace.ops}
    page = Page(page_html(trace_page(trace)))
    shown = page.scripts[0] + "".join(page.words)
    assert ", the loss, " in shown
    assert "loss>" not in shown
    assert "optimizer>" not in shown


def test_a_run_has_curves_and_what_was_predicted_beside_what_was_measured() -> None:
    _, result = train(make_job(), steps=4)
    page = Page(page_html(run_page(result, None)))
    charts = json.loads(page.scripts[0])
    assert charts[0]["series"] == [{"label": "loss", "values": list(result.losses), "colour": 0}]
    assert [each["label"] for each in charts[-1]["series"]] == ["step", "waiting for data"]
    assert "measured" in page.words


def test_long_curves_are_thinned_to_means_and_what_is_not_finite_is_a_gap() -> None:
    values = [float(step) for step in range(10 * POINTS)]
    chart = curve("Loss", "step", values, Unit.NUMBER, {"loss": values})
    assert len(chart.x) == POINTS
    assert chart.series[0].values[:2] == (4.5, 14.5)
    assert "mean of 10 steps" in chart.summary
    gaps = curve("Loss", "step", [1.0, 2.0], Unit.NUMBER, {"loss": [float("nan"), 2.0]})
    assert gaps.drawn()["series"][0]["values"] == [None, 2.0]
    assert gaps.rows[0] == ("1", "-")


def test_a_trace_with_deep_and_long_names_makes_a_small_page() -> None:
    trace = captured()
    deep = ".".join(["m"] * 2000)
    ops = tuple(structs.replace(op, module=deep) for op in trace.ops)
    text = page_html(trace_page(replace(trace, ops=ops)))
    Page(text)
    assert len(text) < MOST_BYTES
