"""Sentences of words with a tag each: files of one word a line, and lists in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from brimful.recipes.bad_samples import BadSample
from brimful.recipes.rows import TABLES, Row, read_rows, read_text, undecoded

_DOCUMENT_START = "-DOCSTART-"
"""First word of a line that begins a document. Source: Tjong Kim Sang & De Meulder 2003, CoNLL-2003."""


def read_tagged(path: Path, columns: Sequence[str], encoding: str) -> Iterator[Row | BadSample]:
    """Read sentences, in order.

    Args:
        path: A .jsonl, .csv or .tsv file with columns of words and of tags, as lists in JSON or separated by
            spaces; or any other file with one word a line, its tag in the last column, and an empty line after
            each sentence, as in CoNLL-2003.
        columns: Names of the columns of words and of tags in a table.
        encoding: Encoding of the file.

    Yields:
        A row with the lists of its words and tags, or why a sentence cannot be used.

    Raises:
        UsageError: The file or a column does not exist.
        DataError: The file is not in that encoding.
    """
    if path.suffix.lower() in TABLES:
        rows = read_rows(path, (), encoding, lists=columns, separator=None)
        yield from (row if isinstance(row, BadSample) else _checked(row) for row in rows)
        return
    for first, lines in _sentences(read_text(path, encoding)):
        yield _sentence(path, first, lines)


def _sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each sentence, and the number of its first line."""
    lines: list[str] = []
    number = 0
    for number, line in enumerate(text.split("\n"), 1):
        fields = line.split()
        if fields and fields[0] != _DOCUMENT_START:
            lines.append(line)
        elif lines:
            yield number - len(lines), lines
            lines = []
    if lines:
        yield number - len(lines) + 1, lines


def _sentence(path: Path, first: int, lines: Sequence[str]) -> Row | BadSample:
    words, tags = [], []
    for number, line in enumerate(lines, first):
        fields = line.split()
        why = undecoded(line) or (None if len(fields) > 1 else "one column; a word has a tag in the last")
        if why is not None:
            return BadSample(where=f"{path}:{number}", why=why)
        words.append(fields[0])
        tags.append(fields[-1])
    return Row(where=f"{path}:{first}", values=(), lists=(tuple(words), tuple(tags)))


def _checked(row: Row) -> Row | BadSample:
    words, tags = row.lists
    if len(words) != len(tags):
        return BadSample(where=row.where, why=f"{len(words)} words and {len(tags)} tags")
    if not words:
        return BadSample(where=row.where, why="no words")
    return row
