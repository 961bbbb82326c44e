"""From texts to tokens: a local tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from brimful.errors import UsageError

_AT_ONCE = 1000
"""Texts; so many are in memory in every form at once."""

Encoded = dict[str, list[int]]
"""Of one text: `input_ids`, and `token_type_ids` where two texts are told apart."""


class Tokenizer(Protocol):
    """Makes tokens of texts."""

    vocab_size: int

    @property
    def end(self) -> int:
        """The token after a text."""

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Encoded]:
        """Whole texts, with the special tokens that a classifier expects.

        Args:
            texts: Any.
            pairs: A second text to each, or None.

        Returns:
            Tokens of each.
        """

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Whole texts without special tokens."""


class Bytes:
    """Each byte of UTF-8 is a token, behind three special ones.

    Source: Xue et al. 2021, "ByT5", section 3.1: padding 0, end 1, unknown 2. 264 is the next multiple of 8.
    """

    vocab_size = 264
    end = 1
    _FIRST_BYTE = 3

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Encoded]:
        """Texts, each with an end; see `Tokenizer`."""
        encoded = [[*tokens, self.end] for tokens in self.encode_plain(texts)]
        if pairs is not None:
            second = self.encode_plain(pairs)
            encoded = [[*one, *other, self.end] for one, other in zip(encoded, second, strict=True)]
        return [{"input_ids": tokens} for tokens in encoded]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of texts."""
        return [[byte + self._FIRST_BYTE for byte in text.encode()] for text in texts]


class Pretrained:
    """A tokenizer of transformers, read from files.

    Args:
        path: A directory that transformers saved, or a `tokenizer.json`.

    Raises:
        UsageError: There is none, or transformers is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UsageError(
                f"the tokenizer {path} is read with transformers, which is not installed: "
                'pip install "brimful[hf]".'
            ) from error
        self._tokenizer: Any
        try:
            if path.is_file():
                self._tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
            else:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(path), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # transformers raises whatever its files lead to
            raise UsageError(f"{path} has no tokenizer that transformers can read: {error}") from error
        self.vocab_size = len(self._tokenizer)
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        self._end = next((token for token in ends if token is not None), None)
        self._path = path

    @property
    def end(self) -> int:
        """The token after a text."""
        if self._end is None:
            raise UsageError(
                f"the tokenizer {self._path} names no end-of-text token; set eos_token in its directory's "
                "tokenizer_config.json."
            )
        return self._end

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Encoded]:
        """Texts with special tokens; see `Tokenizer`."""
        names = ("input_ids",) if pairs is None else ("input_ids", "token_type_ids")
        encoded: list[Encoded] = []
        for start in range(0, len(texts), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found = self._tokenizer(
                list(texts[some]), None if pairs is None else list(pairs[some]), verbose=False
            )
            columns = {name: found[name] for name in names if name in found}
            encoded += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return encoded

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts without special tokens; see `Tokenizer`."""
        found = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        tokens: list[list[int]] = found["input_ids"]
        return tokens


def find_tokenizer(name: Path | str | None) -> Tokenizer:
    """The tokenizer that is meant.

    Args:
        name: A directory or a `tokenizer.json`; "bytes" or None for bytes.

    Returns:
        The tokenizer.

    Raises:
        UsageError: There is none.
    """
    if name is None or str(name) == "bytes":
        return Bytes()
    if not Path(name).exists():
        raise UsageError(f'there is no tokenizer {name}: neither a directory nor a file, nor "bytes".')
    return Pretrained(Path(name))
