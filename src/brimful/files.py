"""Writing files, with errors that a user understands."""

from __future__ import annotations

from pathlib import Path

from brimful.errors import SaveError


def write_file(path: Path | str, content: str | bytes) -> None:
    """Write a whole file.

    Args:
        path: Is overwritten; its directory must exist.
        content: Text is written as UTF-8.

    Raises:
        SaveError: It cannot be written.
    """
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error.strerror or error}.") from error
