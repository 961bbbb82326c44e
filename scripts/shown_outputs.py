"""The outputs that the pages of the documentation show, as the code above them prints them now.

python scripts/shown_outputs.py docs/tutorial.md
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Write the outputs of each page given."""
    for page in map(Path, sys.argv[1:]):
        where = page.resolve()
        where.write_text(with_outputs(where.read_text(encoding="utf-8")), encoding="utf-8")


def with_outputs(text: str) -> str:
    """The page with each block of text as the code before it prints it; the first block of code is job.py."""
    names: dict[str, Any] = {}
    printed = ""

    def run(found: re.Match[str]) -> str:
        nonlocal printed
        language, block = found.groups()
        if language == "text":
            return f"```text\n{printed}```"
        if not names:
            Path("job.py").write_text(block, encoding="utf-8")
            names["job"] = None
            return found[0]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block, "page", "exec"), names)
        printed = output.getvalue()
        return found[0]

    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        sys.path.insert(0, os.curdir)
        return FENCE.sub(run, text)


if __name__ == "__main__":
    main()
