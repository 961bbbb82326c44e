"""Images, tables and texts that are broken, odd or large."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from attacks.case import Case, FailedError, Kind, Place, check_done, check_done_or_refused, control
from attacks.mutations import KINDS, mutate_bytes, put
from attacks.process import Ran, call

PER_CLASS = 4
CLASSES = ("dark", "light")


def input_cases(seed: int) -> Iterator[Case]:
    """One file of each kind changed, given with bad samples refused and skipped."""
    random = Random(f"inputs {seed}")
    for ending in _SAVED:
        yield control(ending, partial(_image, _undamaged(ending), must_succeed=True))
    for name in TABLES:
        yield control(name, partial(_text_file, name, lambda _path: None, must_succeed=True))
    for ending in _SAVED:
        for number in range(4):
            yield Case(f"{ending} bytes {seed}.{number}", partial(_image, _damaged(ending, random.random())))
    for kind in KINDS:
        yield Case(f"image, {kind}", partial(_image, partial(_other_kind, kind)))
        yield Case(f"class folder, {kind}", partial(_image, partial(_other_folder, kind)))
        for name in TABLES:
            yield Case(f"{name}, {kind}", partial(_text_file, name, partial(put, kind)))
    for name, change in _IMAGES.items():
        yield Case(f"image, {name}", partial(_image, change))
    for name, content in _CONTENTS.items():
        yield Case(f"{name[0]}: {name[1]}", partial(_text_file, name[0], partial(_written, content)))
    for name in TABLES:
        for number in range(5):
            yield Case(
                f"{name} bytes {seed}.{number}", partial(_text_file, name, partial(_mutated, random.random()))
            )


# Images

_SAVED = ("png", "jpg", "gif", "bmp", "webp", "tiff")


def _photos(folder: Path) -> None:
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(PER_CLASS):
            Image.new("RGB", (12, 10), (200 * number, 20 * index, 0)).save(folder / name / f"{index}.png")


def _image(change: Callable[[Path], object], place: Place, *, must_succeed: bool = False) -> None:
    for bad_samples in ("refuse", "skip"):
        folder = place.folder / bad_samples
        _photos(folder)
        change(folder)
        ran = _read_images(place, folder, bad_samples)
        (check_done if must_succeed else check_done_or_refused)(ran)
        _check_none_ignored(folder, ran)


def _read_images(place: Place, folder: Path, bad_samples: str) -> Ran:

    def read() -> None:
        from brimful.job import Samples
        from brimful.recipes import image_classification

        options = {"image_size": 33, "workers": 0, "bad_samples": bad_samples}
        job = image_classification(folder, model="resnet18", validation_fraction=0.25, **options)
        assert job.data is not None
        data = job.data()
        assert isinstance(data.train, Samples)
        batches = [*data.train.batches(4, seed=0, epoch=1), *(data.validation or ())]
        print(sum(len(batch["labels"]) for batch in batches))

    return place.run(action=call(read))


def _check_none_ignored(folder: Path, ran: Ran) -> None:
    """All images were read, or those that cannot be are named."""
    named = [path for path in folder.rglob("*") if path.suffix and (path.is_symlink() or not path.is_dir())]
    if ran.status == 0 and int(ran.out.split()[-1]) < len(named) and not ran.err:
        raise FailedError(Kind.WRONG, f"{ran.out.strip()} of {len(named)} images read, and nothing said")


def _undamaged(ending: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "dark" / "0.png").unlink()
        path = folder / "dark" / f"0.{ending}"
        Image.fromarray((np.arange(300) % 256).astype(np.uint8).reshape(10, 10, 3)).save(path)

    return change


def _damaged(ending: str, draw: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _undamaged(ending)(folder)
        path = folder / "dark" / f"0.{ending}"
        path.write_bytes(mutate_bytes(path.read_bytes(), Random(draw))[0])

    return change


def _other_kind(kind: str, folder: Path) -> None:
    put(kind, folder / "dark" / "0.png")


def _other_folder(kind: str, folder: Path) -> None:
    put(kind, folder / "dark")


def _png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG with sizes as its header says, whatever its rows hold."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends


def _content(content: bytes, name: str = "0.png") -> Callable[[Path], object]:
    return lambda folder: (folder / "dark" / name).write_bytes(content)


def _saved(mode: str, size: tuple[int, int] = (12, 10), name: str = "0.png") -> Callable[[Path], object]:
    return lambda folder: Image.new(mode, size).save(folder / "dark" / name)


def _named(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "dark" / "0.png").rename(folder / "dark" / name)


def _many_classes(folder: Path) -> None:
    for index in range(300):
        (folder / f"c{index}").mkdir()
        Image.new("L", (2, 2), index % 256).save(folder / f"c{index}" / "0.png")


_IMAGES: dict[str, Callable[[Path], object]] = {
    "a bomb of 50,000 × 50,000": _content(_png(50_000, 50_000, bytes(1000))),
    "a bomb of 10,000 × 10,000": _content(_png(10_000, 10_000, bytes(10_001 * 10_000))),
    "a size of 0": _content(_png(0, 0, b"")),
    "a size of 2**31": _content(_png(2**31 - 1, 1, b"")),
    "text": _content(b"no image"),
    "one byte": _content(b"\x89"),
    "a pickle": _content(b"\x80\x04N."),
    "1 × 1": _saved("RGB", (1, 1)),
    "1 × 4000": _saved("RGB", (1, 4000)),
    **{f"mode {mode}": _saved(mode) for mode in ("1", "L", "LA", "P", "RGBA", "I;16")},
    "mode I": _saved("I", name="1.tiff"),
    "mode CMYK": _saved("CMYK", name="1.jpg"),
    "mode F": _saved("F", name="1.tiff"),
    "300 classes": _many_classes,
    "a name with a space": _named("a b.png"),
    "an undecodable name": _named("\udcff.png"),
    "a name with a new line": _named("a\nb.png"),
    "an ending in capitals": _named("0.PNG"),
    "an ending of no image": _named("0.heic"),
}


# Tables and texts

TABLES = {
    "texts.csv": "text,label\n" + "".join(f"good film {i},{'ab'[i % 2]}\n" for i in range(24)),
    "texts.jsonl": "".join(
        json.dumps({"text": f"good film {i}", "label": "ab"[i % 2]}) + "\n" for i in range(24)
    ),
    "book.txt": "It was the best of films, it was the worst of films. " * 40,
}
_ROWS = TABLES["texts.csv"]
_LINES = TABLES["texts.jsonl"]
_CONTENTS: dict[tuple[str, str], bytes] = (
    {
        ("texts.csv", name): content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        for name, content in {
            "a mark of byte order": "\ufeff" + _ROWS,
            "UTF-16": _ROWS.encode("utf-16"),
            "latin-1": ("é," + _ROWS).encode("latin-1"),
            "only a header": "text,label\n",
            "no header": "a,b\nc,d\n",
            "no columns": "\n\n",
            "the same column twice": _ROWS.replace("text,label", "text,text"),
            "a NUL": _ROWS + "a\0b,a\n",
            "an open quote": _ROWS + '"open,a\n',
            "a quote inside": _ROWS + 'a"b"c,a\n',
            "too many fields": _ROWS + "a,b,c,d\n",
            "too few fields": _ROWS + "a\n",
            "a field of 5 MB": _ROWS + "x" * 5_000_000 + ",a\n",
            "an empty label": _ROWS + "text,\n",
            "one class": "text,label\n" + "a,a\n" * 9,
            "every class once": "text,label\n" + "".join(f"a,{i}\n" for i in range(9)),
            "a lone surrogate": _ROWS + "\ud800,a\n",
            "carriage returns": _ROWS.replace("\n", "\r"),
            "mixed line ends": _ROWS.replace("\n", "\r\n", 5),
            "100,000 columns": ",".join(map(str, range(100_000))) + "\n" + _ROWS,
            "labels of numbers": _ROWS.replace(",a\n", ",1\n").replace(",b\n", ",-0\n"),
        }.items()
    }
    | {
        ("texts.jsonl", name): content
        if isinstance(content, bytes)
        else content.encode("utf-8", "surrogatepass")
        for name, content in {
            "deep lists": _LINES + "[" * 100_000 + "\n",
            "deep objects": _LINES + '{"text": ' * 100_000 + "\n",
            "NaN as text": _LINES + '{"text": NaN, "label": "a"}\n',
            "NaN as label": _LINES + '{"text": "a", "label": NaN}\n' * 3,
            "infinity as label": _LINES + '{"text": "a", "label": Infinity}\n' * 3,
            "null": _LINES + "null\n",
            "a list": _LINES + "[1]\n",
            "a number of 5000 digits": _LINES + '{"text": ' + "9" * 5000 + ', "label": "a"}\n',
            "half of a surrogate pair": _LINES + '{"text": "\\ud800", "label": "a"}\n',
            "a key twice": _LINES + '{"text": "a", "text": "b", "label": "a"}\n',
            "an object as text": _LINES + '{"text": {"a": 1}, "label": "a"}\n',
            "truth as label": _LINES + '{"text": "a", "label": true}\n' * 3,
            "no columns": "{}\n" * 5,
            "a mark of byte order": "\ufeff" + _LINES,
            "UTF-16": _LINES.encode("utf-16"),
            "an undecodable byte": _LINES.encode() + b'{"text": "\xff", "label": "a"}\n',
            "no new line at the end": _LINES.rstrip(),
            "two objects in a line": _LINES + '{"text": "a", "label": "a"} {"text": "b", "label": "b"}\n',
        }.items()
    }
    | {
        ("book.txt", name): content
        for name, content in {
            "an undecodable byte": b"film \xff " * 200,
            "UTF-16": ("film " * 400).encode("utf-16"),
            "NULs": b"\0" * 4000,
            "one letter": b"a",
            "blanks": b" \n" * 2000,
            "emoji": "\U0001f525 ".encode() * 500,
            "a word of 2 MB": b"x" * 2_000_000,
            "a gzip": b"\x1f\x8b" + bytes(range(256)) * 8,
        }.items()
    }
)


def _written(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _mutated(draw: float, path: Path) -> None:
    path.write_bytes(mutate_bytes(path.read_bytes(), Random(draw))[0])


def _text_file(
    name: str, change: Callable[[Path], object], place: Place, *, must_succeed: bool = False
) -> None:
    for bad_samples in ("refuse", "skip"):
        path = place.folder / name
        put("missing", path)
        path.write_text(TABLES[name])
        change(path)
        ran = _read_texts(place, name, bad_samples)
        (check_done if must_succeed else check_done_or_refused)(ran)


def _read_texts(place: Place, name: str, bad_samples: str) -> Ran:
    def read() -> None:
        from brimful.recipes import language_model, text_classification

        if name == "book.txt":
            job = language_model(name, model="gpt2", sequence_length=16, bad_samples=bad_samples)
        else:
            job = text_classification(name, model="bert-base", sequence_length=16, bad_samples=bad_samples)
        assert job.data is not None
        job.data()
        if "nan" in (job.about or {}).get("classes", ()):
            print("a class called nan", flush=True)

    ran = place.run(action=call(read))
    if ran.out:
        raise FailedError(Kind.WRONG, ran.out.strip())
    return ran
