"""Standard terms in what people read: messages, help, docstrings and comments of the code, and the pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "src" / "brimful").rglob("*.py"))
AVOIDED = re.compile(
    r"\b(?:told|tell|tells|let go|taken back|take back|goes on|go on with|gone on|left out|anew|so many|said"
    r"|heed|(?<!there )(?:is|are) no(?! longer))\b",
    re.IGNORECASE,
)
"""Household verbs for technical events, and "is no X" for "is not an X"."""


def messages(source: Path) -> Iterator[tuple[int, str]]:
    """Every text but docstrings, of which those of options are shown as help."""
    tree = ast.parse(source.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_text(node.value)
    }
    are_shown = source.name == "options.py"
    for node in ast.walk(tree):
        if is_text(node) and (are_shown or id(node) not in docstrings):
            yield node.lineno, node.value  # type: ignore[attr-defined]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstrings_and_comments(source: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, and comments with those of adjacent lines joined; each with its first line."""
    text = source.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and is_text(node.value):
            yield node.lineno, " ".join(node.value.value.split())  # type: ignore[attr-defined]
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string.lstrip("# ")))
    while comments:
        first, words = comments.pop(0)
        last = first
        while comments and comments[0][0] == last + 1:
            last, more = comments.pop(0)
            words += f" {more}"
        yield first, words


def test_sources_use_the_words_that_people_search_for() -> None:
    found = [
        f"{source}:{line}: {text}"
        for source in SOURCES
        for line, text in (*messages(source), *docstrings_and_comments(source))
        if AVOIDED.search(text)
    ]
    assert found == []


ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
]
GENERATED = re.compile(
    r"<!-- (?:benchmarks|scripts)/\w+\.py.*?<!-- end -->|^```.*?^```$", re.DOTALL | re.MULTILINE
)
"""What has its words from elsewhere: tables of results and of the command line, and blocks of code."""
LONGEST_LINE = 112


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_that_people_search_for(page: Path) -> None:
    lines = GENERATED.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert [line for line in lines if AVOIDED.search(line)] == []
    assert [line for line in lines if len(line) > LONGEST_LINE and " | " not in line and "](" not in line] == []
