"""A folder with one folder of images per class → files and labels, for training and validation."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from brimful.distributed.ranks import processors_here
from brimful.errors import UsageError
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.samples import split_by_class
from brimful.utils.files import is_directory

_VALIDATION_FOLDERS = ("val", "valid", "validation", "test")

_MOST_ENDINGS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """Image files, and the class of each as a number."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def some(self, indices: Sequence[int]) -> LabelledImages:
        """The images at some indices."""
        return LabelledImages(
            paths=tuple(self.paths[index] for index in indices),
            labels=tuple(self.labels[index] for index in indices),
        )


def find_images(
    directory: Path, validation_fraction: float, seed: int, *, bad: BadSamples, decodes: bool
) -> tuple[tuple[str, ...], LabelledImages, LabelledImages]:
    """Find the classes, and the images for training and validation."""
    if not is_directory(directory):
        raise UsageError(
            f"there is no folder {directory}. Images lie in a folder with a folder for each class."
        )
    by_name = {folder.name.lower(): folder for folder in _folders(directory)}
    training_folder = by_name.get("train")
    apart = [by_name[name] for name in _VALIDATION_FOLDERS if name in by_name]
    is_alone = len(by_name) == 1
    if training_folder is not None and (apart or is_alone):
        lost = _lost_links(directory)
        check_bad_samples(lost, of=len(by_name) + len(lost), asked=bad)
    if training_folder is not None and apart:
        classes, found = _images_of(training_folder, None, bad=bad, decodes=decodes)
        _, validation_found = _images_of(apart[0], classes, bad=bad, decodes=decodes)
        return classes, found, validation_found
    within = training_folder if is_alone and training_folder is not None else directory
    _check_classes_are_no_parts(within)
    classes, found = _images_of(within, None, bad=bad, decodes=decodes)
    training, validation = split_by_class(found.labels, validation_fraction, seed)
    return classes, found.some(training), found.some(validation)


def _check_classes_are_no_parts(directory: Path) -> None:
    """Refuse a folder whose folders are splits, such as training and testing, instead of classes."""
    within = [{inner.name for inner in _folders(folder)} for folder in _folders(directory)]
    if len(within) > 1 and len(within[0]) > 1 and all(names == within[0] for names in within):
        raise UsageError(
            f"the folders in {directory} all have the same folders in them "
            f"({', '.join(sorted(within[0])[:4])}), so they are not classes. Call the one to train on "
            "train, that to validate with val."
        )


def _folders(directory: Path) -> list[Path]:
    return [entry for entry in _entries(directory) if is_directory(entry)]


def _entries(directory: Path) -> list[Path]:
    """All entries of a directory that are not hidden, sorted."""
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UsageError(f"the folder {directory} cannot be read: {error.strerror or error}.") from error


def _lost_links(directory: Path) -> list[BadSample]:
    """Broken symbolic links in the place of folders, for example to a disk that is not mounted."""
    entries = ((entry, _why_lost(entry)) for entry in _entries(directory) if entry.is_symlink())
    return [BadSample(where=str(entry), why=why) for entry, why in entries if why is not None]


def _images_of(
    directory: Path, classes: tuple[str, ...] | None, *, bad: BadSamples, decodes: bool
) -> tuple[tuple[str, ...], LabelledImages]:
    """The classes, unless they are given, and the images of one folder of class folders."""
    folders = _folders(directory)
    broken = _lost_links(directory)
    files: list[tuple[Path, str]] = []
    for folder in folders:
        files += [(path, folder.name) for path in _files(folder, broken)]
    files = _images_by_name(directory, files)
    broken += _broken([path for path, _ in files], decodes=decodes)
    skipped = {sample.where for sample in broken}
    files = [(path, name) for path, name in files if str(path) not in skipped]
    present = {name for _, name in files}
    empty = [folder for folder in folders if folder.name not in present]
    broken += [
        BadSample(where=str(folder), why="a class without an image that can be used") for folder in empty
    ]
    if classes is not None:
        unknown = sorted(present - set(classes))
        broken += [
            BadSample(where=str(directory / name), why="no class of the training data") for name in unknown
        ]
        files = [(path, name) for path, name in files if name in classes]
    check_bad_samples(broken, of=len(files) + len(broken), asked=bad)
    classes = classes or tuple(sorted(present))
    if len(classes) < 2:
        raise UsageError(
            f"{directory} has images of {len(classes)} classes ({', '.join(classes) or 'none'}); at least 2 "
            "are needed. Each class is a folder there, with its images in it."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, LabelledImages(
        paths=tuple(path for path, _ in files), labels=tuple(numbers[name] for _, name in files)
    )


def _files(folder: Path, unreadable: list[BadSample]) -> list[Path]:
    """All files in a folder that are not hidden, at any depth, also behind links.

    Folders that cannot be read are added to `unreadable`.
    """

    def add(error: OSError) -> None:
        why = f"a folder that cannot be read: {error.strerror or error}"
        unreadable.append(BadSample(where=str(error.filename), why=why))

    found: list[Path] = []
    seen = {_identity(parent) for parent in folder.resolve().parents}  # a link may lead to a folder above it
    for root, folders, names in os.walk(folder, onerror=add, followlinks=True):
        identity = _identity(Path(root))
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _images_by_name(directory: Path, files: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """The files that Pillow may read; a warning counts the others by the suffixes of their names."""
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    others = Counter(path.suffix.lower() for path, _ in files if path.suffix.lower() not in endings)
    if others:
        suffixes = ", ".join(
            f"{count} × {ending or 'no ending'}" for ending, count in others.most_common(_MOST_ENDINGS)
        )
        warnings.warn(
            f"{others.total()} files in {directory} are not images by their names and are skipped: {suffixes}.",
            stacklevel=4,
        )
    return [(path, name) for path, name in files if path.suffix.lower() in endings]


def identities(directory: Path, *parts: LabelledImages) -> Iterator[str]:
    """Text for each image that identifies it in another run."""
    for part in parts:
        for path, label in zip(part.paths, part.labels, strict=True):
            yield f"{path.relative_to(directory)} {label} {path.stat().st_size}"


def _broken(paths: Sequence[Path], *, decodes: bool) -> Iterator[BadSample]:
    """Paths that are not files, and, if `decodes`, files that cannot be decoded to their end."""
    why_broken = _why_broken if decodes else _why_no_file
    with ThreadPoolExecutor(processors_here()) as threads:  # Pillow decodes without holding the interpreter
        for path, why in zip(paths, threads.map(why_broken, paths), strict=True):
            if why is not None:
                yield BadSample(where=str(path), why=why)


def _why_no_file(path: Path) -> str | None:
    """Why there is not a regular file at a path; None if there is one."""
    why = _why_lost(path)
    return "not a regular file" if why is None and not path.is_file() else why


def _why_lost(path: Path) -> str | None:
    """Why there is nothing at a path that a folder names; None if there is something."""
    try:
        path.stat()
    except OSError as error:
        reason = error.strerror or error
        return f"a link to {path.readlink()}: {reason}" if path.is_symlink() else f"cannot be read: {reason}"
    return None


def _why_broken(path: Path) -> str | None:
    from PIL import Image

    why = _why_no_file(path)
    if why is not None:
        return why
    if path.stat().st_size == 0:
        return "an empty file"
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))  # a JPEG is then decoded to an eighth, though read to its end
            image.load()
            if image.mode == "F":
                return "pixels in floating point, of which no one says what is white"
    except Exception as error:  # Pillow's readers raise whatever the bytes lead to
        message = str(error).replace(repr(str(path)), "its content")
        return f"{type(error).__name__}: {message}"
    return None


def check_pillow() -> None:
    """Check that Pillow, which reads images, is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError("images are read with Pillow, which is not installed: pip install pillow.") from error
