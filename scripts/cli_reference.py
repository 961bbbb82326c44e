"""The commands and options of docs/reference/cli.md, from the command line itself.

python scripts/cli_reference.py            # writes them
python scripts/cli_reference.py --check    # exit status 1 if the page has others
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from brimful.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
BLOCK = re.compile(r"(<!-- scripts/cli_reference\.py -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write or check; the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    lines = "\n".join(_commands("brimful", get_command(app)))
    fresh = BLOCK.sub(lambda found: f"{found.group(1)}{lines}\n{found.group(2)}", text)
    if "--check" not in sys.argv:
        PAGE.write_text(fresh, encoding="utf-8")
    return int("--check" in sys.argv and fresh != text)


def _commands(name: str, command: Any) -> Iterator[str]:
    """A section for each command that has no further ones."""
    if hasattr(command, "commands"):
        for part, inner in command.commands.items():
            yield from _commands(f"{name} {part}", inner)
        return
    yield from (f"### {name}", "", *_paragraphs(command.help or ""))
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option" and each.name != "help"]
    if arguments:
        yield from ("| argument | |", "|---|---|")
        yield from (
            f"| `{(each.metavar or each.name).strip('[]').upper()}` | {_cell(each.help)} |"
            for each in arguments
        )
        yield ""
    if options:
        yield from ("| option | default | |", "|---|---|---|")
        yield from (f"| {_flags(each)} | {_default(each)} | {_cell(each.help)} |" for each in options)
        yield ""


def _paragraphs(help_text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", help_text.replace("\b", "").strip()):
        yield from (" ".join(paragraph.split()), "")


def _flags(option: Any) -> str:
    return ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if option.is_flag or value is None or callable(value) or not str(value) or not value:
        on = option.is_flag and value is True and option.secondary_opts
        return "on" if on else ""
    return f"`{value}`"


def _cell(help_text: str | None) -> str:
    """A help text as a table's cell; Markdown's own signs stay as they are written."""
    return re.sub(r"([|*_<>`])", r"\\\1", " ".join((help_text or "").split()))


if __name__ == "__main__":
    sys.exit(main())
