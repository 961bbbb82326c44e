"""Execute the notebook of the documentation and store the outputs of its cells, without Jupyter.

python scripts/notebook.py                 # docs/notebook.ipynb
python scripts/notebook.py other.ipynb

The cells' sources are the notebook's own. Cells run in order in one process, in an empty directory. As in
IPython, the value of a last expression is shown, by its `_repr_html_`. A cell with the tag "varies" shows what
depends on the machine, such as times; the outputs of the others are the same everywhere, which a test compares.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def main() -> None:
    """Write the outputs of each notebook given."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # outputs are those of a machine that has measured nothing yet
        for path in map(Path, sys.argv[1:] or [NOTEBOOK]):
            where = path.resolve()
            notebook = executed(json.loads(where.read_text(encoding="utf-8")))
            where.write_text(written(notebook), encoding="utf-8")


def written(notebook: dict[str, Any]) -> str:
    """A notebook as Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells as they are now."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    cells = []
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                outputs = _outputs("".join(cell["source"]), number, names)
                cell = {**cell, "execution_count": number, "outputs": outputs}
            cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell: what it prints, then the value of its last expression."""
    file = f"cell-{number}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(str(value) if hasattr(value, "_repr_pretty_") else repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": _lines(value._repr_html_()), **data}
        outputs.append(
            {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
