"""Throughput over budget for each model of the comparison of plans, from the JSON in benchmarks/results/.

    pip install matplotlib
    python benchmarks/plan/plots.py

Writes benchmarks/results/plan_simulated.png; with plan_measured.json also plan_measured.png. A way is drawn at
each budget that it keeps. `sac_milp` (plan_torch_planners.json) rarely keeps one, so it is drawn at what it
takes in truth.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from brimful.utils.quantities import format_bytes
from machine import RESULTS

COLUMNS = 3
LEAST = 0.56
"""Of the baseline's throughput, at the bottom of all panels; a plan below it is told in words."""
INK, FAINT = "#22262b", "#8a9099"
OURS = "ours"
WITH_HOST = "ours_with_host"
STYLES: dict[str, tuple[str, str]] = {
    OURS: ("plan", "#0b57d0"),
    WITH_HOST: ("plan with the host's memory", "#74a7f5"),
    "recompute everything": ("recompute everything", "#9aa0a8"),
    "every second block": ("every second block", "#c08a2d"),
    "torchtitan selective": ("torchtitan selective", "#b3573f"),
    "attention only": ("attention only", "#8a6bb0"),
    "sac_milp, largest micro-batch": ("sac_milp", "#16877a"),
    "compiled, activation_memory_budget": ("activation_memory_budget", "#5b7c2a"),
}
"""By a way's name in the JSON: what the reader is told, and its colour. The order is that of the key."""
AT_ITS_PEAK = "sac_milp, largest micro-batch"

Points = list[tuple[float, float]]
"""Of one way: (budget as a part of the baseline's peak, throughput as a part of the baseline's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One model."""

    title: str
    subtitle: str
    ways: dict[str, Points]
    is_predicted: bool = True


def main() -> None:
    simulated = _load("plan_simulated.json")
    planners = _load("plan_torch_planners.json")
    if simulated is None:
        raise SystemExit("there is no plan_simulated.json; run benchmarks/plan/simulated.py first.")
    title = f"What a memory budget costs: throughput on {simulated['device']}, predicted"
    panels = list(_simulated_panels(simulated, planners))
    _draw(panels, title, "of plain throughput").savefig(RESULTS / "plan_simulated.png", dpi=150)
    measured = _load("plan_measured.json")
    if measured is not None:
        title = "What a memory budget costs: throughput on a CPU, measured"
        panels = list(_measured_panels(measured))
        _draw(panels, title, "of the fastest").savefig(RESULTS / "plan_measured.png", dpi=150)


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _by_model(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return models


def _simulated_panels(simulated: dict[str, Any], planners: dict[str, Any] | None) -> Iterator[Panel]:
    theirs = _by_model(planners["rows"]) if planners else {}
    for model, rows in _by_model(simulated["rows"]).items():
        first = rows[0]
        plain_seconds = first["plain_step_seconds"]
        ways: dict[str, Points] = {}
        for row in rows:
            for name, way in {OURS: row["ours"], WITH_HOST: row["ours_with_host"], **row["peers"]}.items():
                if way is not None and way["within_budget"]:
                    point = row["budget_fraction"], plain_seconds / way["step_seconds"]
                    ways.setdefault(name, []).append(point)
        for row in theirs.get(model, ()):
            way = row["peers"].get(AT_ITS_PEAK)
            if way is not None and "failed" not in way:
                point = way["peak_device_bytes"] / row["plain_peak_device_bytes"], 1 / (1 + way["overhead"])
                ways.setdefault(AT_ITS_PEAK, []).append(point)
        samples = first["global_batch_size"] / plain_seconds
        yield Panel(
            title=f"{model}, batch {first['global_batch_size']}",
            subtitle=f"plain: {format_bytes(first['plain_peak_device_bytes'])}, {samples:,.0f} samples/s",
            ways=ways,
        )


def _measured_panels(measured: dict[str, Any]) -> Iterator[Panel]:
    """Throughput relative to the fastest that was measured, as the baseline is not among the ways."""
    for model, rows in _by_model(measured["rows"]).items():
        within = [
            (row["budget_fraction"], name, way["measured_step_seconds"])
            for row in rows
            for name, way in row["ways"].items()
            if way is not None and way.get("measured_within_budget")
        ]
        if not within:  # nothing fits any of the budgets
            continue
        fastest = min(seconds for _fraction, _name, seconds in within)
        ways: dict[str, Points] = {}
        for fraction, name, seconds in within:
            if name in STYLES:
                ways.setdefault(name, []).append((fraction, fastest / seconds))
        batch = rows[0]["global_batch_size"]
        subtitle = f"100 % is {batch / fastest:,.0f} samples/s"
        yield Panel(title=f"{model}, batch {batch}", subtitle=subtitle, ways=ways, is_predicted=False)


def _draw(panels: Sequence[Panel], title: str, of_what: str) -> Figure:
    lines = -(-len(panels) // COLUMNS)
    figure, grid = plt.subplots(
        lines, COLUMNS, figsize=(10.5, 2.6 * lines + 1.25), sharex=True, sharey=True, squeeze=False
    )
    flat = list(grid.flat)
    for axes, panel in zip(flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in flat[len(panels) :]:
        axes.set_visible(False)
    for axes in flat[max(len(panels) - COLUMNS, 0) : len(panels)]:  # the lowest of each column
        axes.xaxis.set_tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel(of_what, color=FAINT, fontsize=8.5)
    for axes in grid[-1]:
        axes.set_xlabel("budget, of the baseline's peak", color=FAINT, fontsize=8.5)
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.07, right=0.985, bottom=0.5 / height, top=1 - 1.3 / height, hspace=0.42, wspace=0.08
    )
    figure.text(0.07, 1 - 0.32 / height, title, fontsize=13.5, fontweight="bold", color=INK)
    _draw_key(figure, panels, 1 - 0.63 / height, 0.17 / height)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for name in sorted(panel.ways, key=lambda name: name == OURS):  # ours on top of the others
        _label, colour = STYLES[name]
        budgets, throughputs = zip(*sorted(panel.ways[name]), strict=True)
        if name == OURS:
            axes.plot(budgets, throughputs, color=colour, linewidth=2.6, marker="o", markersize=6, zorder=5)
        elif name == AT_ITS_PEAK:
            axes.plot(
                budgets,
                throughputs,
                color=colour,
                linestyle="none",
                marker="D",
                markersize=5,
                fillstyle="none",
                zorder=4,
            )
        else:
            axes.plot(budgets, throughputs, color=colour, linewidth=1.2, marker="o", markersize=3)
    if OURS in panel.ways:
        budget, throughput = max(panel.ways[OURS])
        axes.annotate(
            "plan", (budget, throughput), xytext=(8, -3), textcoords="offset points", color=STYLES[OURS][1],
            fontsize=9, fontweight="bold",
        )  # fmt: skip
        for below, slow in panel.ways[OURS]:
            if slow < LEAST:
                axes.text(
                    below, LEAST + 0.015, f"{slow:.0%}".replace("%", " % ↓"), color=STYLES[OURS][1], fontsize=8,
                    ha="center", fontweight="bold", backgroundcolor="white",
                )  # fmt: skip
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=17)
    axes.text(0, 1.035, panel.subtitle, transform=axes.transAxes, fontsize=8, color=FAINT)
    axes.set_xlim(0.25, 0.93)
    axes.set_ylim(LEAST, 1.04)
    axes.set_xticks([0.3, 0.45, 0.6, 0.8])
    axes.set_yticks([0.6, 0.7, 0.8, 0.9, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.tick_params(length=0, labelsize=8, labelcolor=FAINT)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.axhline(1, color="#b9bec5", linewidth=0.8)


def _draw_key(figure: Figure, panels: Sequence[Panel], height: float, line: float) -> None:
    """The names of all ways in their colours, in lines."""
    used = {name for panel in panels for name in panel.ways}
    left = 0.07
    for name, (label, colour) in STYLES.items():
        if name in used:
            mark = "◇" if name == AT_ITS_PEAK else "●"
            is_predicted = any(panel.is_predicted for panel in panels)
            label += ", at its true peak" if name == AT_ITS_PEAK and is_predicted else ""
            text = figure.text(
                left,
                height,
                f"{mark} {label}",
                color=colour,
                fontsize=9,
                fontweight="bold" if name == OURS else None,
            )
            figure.canvas.draw()
            width = text.get_window_extent().width / figure.bbox.width
            if left + width > 0.985:
                left, height = 0.07, height - line
                text.set_position((left, height))
            left += width + 0.02


if __name__ == "__main__":
    main()
