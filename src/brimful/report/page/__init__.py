"""Results → one self-contained HTML file each.

`pages` and `files` say what a page shows, `document` writes it, `page.js` draws its charts with uPlot
(`uplot/`, version 1.6.32 as published on npm, MIT). Start reading at `document.page_html`.
"""

from brimful.report.page.charts import Chart, Unit, curve
from brimful.report.page.document import Page, Section, page_html
from brimful.report.page.files import estimate_file_page, watched_file_page
from brimful.report.page.pages import plan_page, run_page, trace_page, unfinished_run_page

__all__ = [
    "Chart",
    "Page",
    "Section",
    "Unit",
    "curve",
    "estimate_file_page",
    "page_html",
    "plan_page",
    "run_page",
    "trace_page",
    "unfinished_run_page",
    "watched_file_page",
]
