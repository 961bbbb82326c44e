"""Writing files, with errors that a user understands."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from brimful.errors import SaveError


def write_file(path: Path | str, content: str | bytes, *, follows_links: bool = True) -> None:
    """Write a whole file, which may exist; its directory must. A file that cannot be written raises SaveError.

    Text is written as UTF-8, in which bytes of a file's name that are not UTF-8 are escaped. `follows_links`
    writes to the file that a link points to; False replaces the link.
    """
    try:
        with open(path if follows_links else fresh(Path(path)), "wb", opener=_open_at_once) as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        is_unread = error.errno == errno.ENXIO
        reason = "it is a pipe that no process reads" if is_unread else error.strerror or error
        raise SaveError(f"{path} could not be written: {reason}.") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file for `open`; a pipe that nobody reads is an error, where it would be waited for."""
    if os.name != "posix":
        return os.open(path, flags, 0o666)
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def fresh(path: Path) -> Path:
    """A path for a new file, freed of a file or a link of this name.

    Writing to a link would change the file that it points to. A directory, or what cannot be deleted, raises
    OSError.
    """
    path.unlink(missing_ok=True)
    return path


def is_file(path: Path) -> bool:
    """Whether there is a file, or a link to one; a path that cannot exist is not an error."""
    return _is(path, stat.S_ISREG)


def is_directory(path: Path) -> bool:
    """Whether there is a directory, or a link to one; a path that cannot exist is not an error."""
    return _is(path, stat.S_ISDIR)


def _is(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a loss of power."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX lets a directory be opened
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, whose parent directories may no longer exist."""
    return shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.exists())).free
