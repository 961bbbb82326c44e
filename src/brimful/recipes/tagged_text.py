"""Sentences of words with a tag each: files of one word a line, and lists in tables."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from brimful.recipes.bad_samples import BadSample
from brimful.recipes.rows import NO_COLUMNS, TABLES, Columns, Row, read_rows, read_text, undecoded

_DOCUMENT_START = "-DOCSTART-"
"""First word of a line that begins a document. Source: Tjong Kim Sang & De Meulder 2003, CoNLL-2003."""

_HASH = re.compile("#[ \t]")
_MOST_SHOWN = 60
"""Characters of a line in a message."""


def read_tagged(path: Path, columns: Columns, encoding: str) -> Iterator[Row | BadSample]:
    """Read sentences, in order: rows with the lists of words and tags, or why one cannot be used.

    A .jsonl, .csv or .tsv file has columns of words and of tags, which `columns` has in this order, as lists in
    JSON or separated by spaces. Any other file has one word a line, its tag in the last column, and an empty
    line after each sentence, as in CoNLL-2003. Its columns are separated by tabs in a line that has one, else
    by spaces; other white space is part of a word. Comments in it cannot be used.

    Raises `UsageError` if the file or a column does not exist, and `DataError` if the file is not in that
    encoding.
    """
    if path.suffix.lower() in TABLES:
        _, tags = columns.values()
        rows = read_rows(path, NO_COLUMNS, encoding, lists=columns, labels=tags, separator=" ")
        yield from (row if isinstance(row, BadSample) else _checked(row) for row in rows)
        return
    sentences = list(_sentences(read_text(path, encoding)))
    kinds = _kinds_of_lines(sentences)
    for first, lines in sentences:
        comments = _comments(lines, kinds)
        for number, line in enumerate(lines[:comments], first):
            why = f"a comment, {line[:_MOST_SHOWN]!r}, has no word with a tag; remove such lines"
            yield BadSample(where=f"{path}:{number}", why=why)
        if lines[comments:]:
            yield _sentence(path, first + comments, lines[comments:])


def _sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each sentence, and the number of its first line."""
    lines: list[str] = []
    number = 0
    for number, line in enumerate(text.split("\n"), 1):
        fields = _fields(line)
        if fields and fields[0] != _DOCUMENT_START:
            lines.append(line)
        elif lines:
            yield number - len(lines), lines
            lines = []
    if lines:
        yield number - len(lines) + 1, lines


def _fields(line: str) -> list[str]:
    """The columns of a line; none for a blank line."""
    line = line.rstrip(" \t\r")
    if not line.strip():
        return []
    if "\t" in line:
        return [field.strip(" ") for field in line.split("\t")]
    return [field for field in line.split(" ") if field]


_Kind = tuple[int, str]
"""The number of columns of a line, and its tag."""


def _kind(line: str) -> _Kind:
    fields = _fields(line)
    return len(fields), fields[-1]


def _kinds_of_lines(sentences: Iterable[tuple[int, Sequence[str]]]) -> set[_Kind]:
    """The kinds of all lines that are certainly not comments."""
    return {_kind(line) for _, lines in sentences for line in lines[_leading_hashes(lines) :]}


def _leading_hashes(lines: Sequence[str]) -> int:
    """How many of a sentence's first lines begin as comments do, which "#" as a word does too."""
    return next((place for place, line in enumerate(lines) if not _HASH.match(line)), len(lines))


def _comments(lines: Sequence[str], kinds: Container[_Kind]) -> int:
    """How many of a sentence's first lines are comments, as in MultiCoNER: `# id 12 domain=en`.

    A line with the columns and a tag of another line is the word "#".
    """
    leading = lines[: _leading_hashes(lines)]
    return next((place for place, line in enumerate(leading) if _kind(line) in kinds), len(leading))


def _sentence(path: Path, first: int, lines: Sequence[str]) -> Row | BadSample:
    words, tags = [], []
    for number, line in enumerate(lines, first):
        fields = _fields(line)
        why = undecoded(line) or _why_not(fields)
        if why is not None:
            return BadSample(where=f"{path}:{number}", why=why)
        words.append(fields[0])
        tags.append(fields[-1])
    return Row(where=f"{path}:{first}", values=(), lists=(tuple(words), tuple(tags)))


def _why_not(fields: Sequence[str]) -> str | None:
    """Why columns are not those of a word with a tag; None if they are."""
    if len(fields) < 2:
        return "one column; a word has a tag in the last"
    if not fields[0].strip():
        return "no word in the first column"
    return None if fields[-1].strip() else "no tag in the last column"


def _checked(row: Row) -> Row | BadSample:
    words, tags = row.lists
    if len(words) != len(tags):
        return BadSample(where=row.where, why=f"{len(words)} words and {len(tags)} tags")
    if not words:
        return BadSample(where=row.where, why="no words")
    return row
