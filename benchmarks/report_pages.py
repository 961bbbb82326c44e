"""Pages of `brimful report` in a real Chromium: size, time, errors, requests, axe-core's violations.

    python benchmarks/report_pages.py [--screenshots FOLDER]

A page each of ten models of `zoo`, one of every family in turn, and of three large ones, predicted for an RTX
3090; of five runs of jobs of `job_zoo` on the CPU, each trained by its plan for eight steps. Each is opened as
a file in a window of a desk, of a phone and in dark mode, and axe-core looks at it. In the first window, and
everywhere for the first page, all that can be opened is open then: 20 seconds each. A quarter of an hour.
Needs Chromium, playwright and axe-core-python, which brimful itself does not.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

import brimful as bf
from brimful.api import capture_trace
from brimful.api.plans import captured_plan
from brimful.devices import find_device
from brimful.job import Job
from brimful.models import resolve_job
from brimful.prediction import estimate_trace
from brimful.report.page import Page, page_html, run_page, trace_page
from job_zoo import JOBS
from machine import Rows
from zoo import ZOO, ZooModel, missing

DEVICE = "RTX 3090"
LARGE = {"gpt2-xl": 1, "resnet152": 32, "llama-3-8b": 1}
"""Micro-batch sizes of built-in models of a real size."""
MODELS, RUNS, STEPS = 10, 5, 8
WINDOWS: dict[str, dict[str, Any]] = {
    "desk": {"viewport": {"width": 1200, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
}


def zoo_models() -> Iterator[ZooModel]:
    """The first model of each family whose package is there."""
    families = set()
    for model in ZOO:
        if model.family not in families and not (model.needs and missing(model.needs)):
            families.add(model.family)
            yield model


def page_of_model(job: Job, micro_batch_size: int) -> Page:
    device = find_device(DEVICE)
    trace = capture_trace(job, bf.Settings(micro_batch_size=micro_batch_size), device)
    return trace_page(trace, estimate_trace(trace, device), device)


def page_of_run(job: Job, samples: int) -> Page:
    plan = bf.plan(job, "cpu", global_batch_size=samples, budget="80%")
    whole = job.batch(samples) if callable(job.batch) else job.batch
    result = bf.fit(job, plan, device="cpu", data=bf.Data(train=whole), steps=STEPS, show_progress=False)
    result = result[0] if isinstance(result, tuple) else result
    return run_page(result, plan, *captured_plan(job, plan))


def pages() -> Iterator[tuple[str, str, Page]]:
    """Name, kind and page."""
    for model in islice(zoo_models(), MODELS):
        yield model.name, f"zoo, {model.family}", page_of_model(model.job(), model.micro_batch_size)
    for name, micro_batch_size in LARGE.items():
        yield name, "built in", page_of_model(resolve_job(name), micro_batch_size)
    made = 0
    for case in JOBS:
        if made == RUNS or case.missing or case.refused or case.gpu:
            continue
        try:
            page = page_of_run(case.job(), case.samples)
        except bf.BrimfulError as error:
            print(f"{case.name}: not a run: {str(error).splitlines()[0]}", flush=True)
            continue
        made += 1
        yield case.name, f"run, {case.kind}", page


def opened(
    browser: Browser, file: Path, window: str, screenshots: Path | None, *, opens_all: bool
) -> dict[str, Any]:
    """What a browser says of a page in one window."""
    context = browser.new_context(**WINDOWS[window])
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    start = time.perf_counter()
    page.goto(file.as_uri(), wait_until="load")
    seconds = time.perf_counter() - start
    canvases = page.locator("canvas").count()
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if screenshots is not None:
        page.screenshot(path=screenshots / f"{file.stem}-{window}.png", full_page=True)
    if opens_all:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = Axe().run(page)
    context.close()
    return {
        "window": window,
        "seconds": round(seconds, 3),
        "console": errors,
        "requests": len(requests) - 1,
        "charts": canvases,
        "overflow_pixels": overflow,
        "axe_violations": sorted(each["id"] for each in found["violations"]),
        "axe_passes": len(found["passes"]),
    }


def row(
    name: str,
    kind: str,
    page: Page,
    browser: Browser,
    folder: Path,
    screenshots: Path | None,
    *,
    opens_all: bool,
) -> dict[str, Any]:
    start = time.perf_counter()
    text = page_html(page)
    file = folder / f"{name.replace('/', '-')}.html"
    file.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - start
    windows = [
        opened(browser, file, window, screenshots, opens_all=window == "desk" or opens_all)
        for window in WINDOWS
    ]
    return {
        "name": name,
        "kind": kind,
        "bytes": len(text.encode()),
        "write_seconds": round(seconds, 3),
        "windows": windows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path)
    screenshots = parser.parse_args().screenshots
    if screenshots is not None:
        screenshots.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    rows = Rows("report_pages.json", "python benchmarks/report_pages.py", "playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, kind, page in pages():
            if rows.has(name=name):
                continue
            rows.add(row(name, kind, page, browser, Path(folder), screenshots, opens_all=not rows.rows))
            found = rows.rows[-1]
            slowest = max(each["seconds"] for each in found["windows"])
            bad = [each for each in found["windows"] if each["console"] or each["axe_violations"]]
            print(
                f"{name:<32}{kind:<28}{found['bytes']:>9} bytes  opened in {slowest:.2f} s  {bad}", flush=True
            )
        version = browser.version
    windows = [each for found in rows.rows for each in found["windows"]]
    summary = {
        "chromium": version,
        "pages": len(rows.rows),
        "most_bytes": max(found["bytes"] for found in rows.rows),
        "most_write_seconds": max(found["write_seconds"] for found in rows.rows),
        "most_open_seconds": max(each["seconds"] for each in windows),
        "console_messages": sum(len(each["console"]) for each in windows),
        "requests": sum(each["requests"] for each in windows),
        "axe_violations": sum(len(each["axe_violations"]) for each in windows),
        "most_overflow_pixels": max(each["overflow_pixels"] for each in windows),
    }
    print(summary)
    rows.keep(summary)


if __name__ == "__main__":
    main()
