"""From texts to tokens: a local tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brimful.errors import UsageError

_AT_ONCE = 1000
"""Texts that are tokenized together; for that time their tokens are Python integers."""

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""End-of-text tokens of published tokenizers; a bare tokenizer.json does not name its own."""

Tokens = NDArray[np.int32]
Encoded = dict[str, Tokens]
"""One tokenized text: `input_ids`, and `token_type_ids` if the model distinguishes the texts of a pair."""


class Bytes:
    """Uses each UTF-8 byte as a token, after three special tokens.

    Source: Xue et al. 2021, "ByT5", section 3.1: padding 0, end 1, unknown 2. 264 is the next multiple of 8.
    """

    vocab_size = 264
    end = 1
    padding = 0
    _FIRST_BYTE = 3

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None, most_tokens: int
    ) -> tuple[list[Encoded], int]:
        """Tokenize texts, each with an end token, and truncate those too long.

        `pairs` has a second text for each, or is None. `most_tokens` is the maximum of a text, or of a pair.
        Returns the tokens of each text, and the number of truncated texts.
        """
        of_texts = [self.encode_plain(texts)] + ([] if pairs is None else [self.encode_plain(pairs)])
        encoded, cut = [], 0
        for parts in zip(*of_texts, strict=True):
            shares = _shares([len(part) for part in parts], most_tokens - len(parts))
            cut += sum(shares) < sum(map(len, parts))
            with_ends = [np.append(part[:share], self.end) for part, share in zip(parts, shares, strict=True)]
            encoded.append({"input_ids": np.concatenate(with_ends).astype(np.int32)})
        return encoded, cut

    def encode_plain(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of texts."""
        found = [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        return [part.astype(np.int32) + self._FIRST_BYTE for part in found]


def _shares(lengths: Sequence[int], most: int) -> list[int]:
    """Tokens to keep of each part; the longest is truncated first."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    first, second = lengths
    shorter = min(first, second, most // 2)
    return [min(first, most - shorter), shorter] if second <= first else [shorter, min(second, most - shorter)]


class Pretrained:
    """A tokenizer of transformers, read from a directory that it saved or from a `tokenizer.json`.

    Raises `UsageError` if the path has no tokenizer, or transformers is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UsageError(
                f"the tokenizer {path} is read with transformers, which is not installed: "
                "pip install transformers."
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
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary.keys() - set(self._tokenizer.all_special_tokens):
            raise UsageError(
                f"{path} has no tokenizer: transformers made one of {len(vocabulary)} special tokens and "
                "no words. Give the directory or file of the model's tokenizer by --tokenizer, or 'bytes'."
            )
        own = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        ends = (*own, *(vocabulary.get(name) for name in _ENDS))
        self.vocab_size = len(self._tokenizer)
        self.end: int | None = next((token for token in ends if token is not None), None)
        """The token that ends a text; None if not known."""
        self.padding: int | None = self._tokenizer.pad_token_id
        """The padding token; None if not known."""

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None, most_tokens: int
    ) -> tuple[list[Encoded], int]:
        """Tokenize texts with the special tokens that a classifier expects; see `Bytes.encode`."""
        encoded: list[Encoded] = []
        too_long: list[int] = []
        for start in range(0, len(texts), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found = self._encoded(texts[some], None if pairs is None else pairs[some])
            too_long += [
                start + place for place, entry in enumerate(found) if len(entry["input_ids"]) > most_tokens
            ]
            encoded += found
        for start in range(0, len(too_long), _AT_ONCE):
            some_long = too_long[start : start + _AT_ONCE]
            again = self._encoded(
                [texts[place] for place in some_long],
                None if pairs is None else [pairs[place] for place in some_long],
                truncation="longest_first",
                max_length=most_tokens,
            )
            for place, entry in zip(some_long, again, strict=True):
                encoded[place] = entry
        return encoded, len(too_long)

    def _encoded(self, texts: Sequence[str], pairs: Sequence[str] | None, **options: Any) -> list[Encoded]:
        names = ("input_ids",) if pairs is None else ("input_ids", "token_type_ids")
        found = self._tokenizer(list(texts), None if pairs is None else list(pairs), verbose=False, **options)
        columns = {name: found[name] for name in names if name in found}
        return [
            {name: np.asarray(part, dtype=np.int32) for name, part in zip(columns, row, strict=True)}
            for row in zip(*columns.values(), strict=True)
        ]

    def save(self, directory: Path) -> None:
        """Write the tokenizer for `from_pretrained`; files in the directory are overwritten."""
        self._tokenizer.save_pretrained(str(directory))

    def encode_plain(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize whole texts without special tokens."""
        encoded: list[Tokens] = []
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            found = self._tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            encoded += [np.asarray(part, dtype=np.int32) for part in found]
        return encoded


Tokenizer = Bytes | Pretrained


def find_tokenizer(name: Path | str | None) -> Tokenizer:
    """Find a tokenizer: a directory, a `tokenizer.json`, or bytes for "bytes" or None.

    Raises `UsageError` if there is no such tokenizer.
    """
    if name is None or str(name) == "bytes":
        return Bytes()
    if not Path(name).exists():
        raise UsageError(f'there is no tokenizer {name}: neither a directory nor a file, nor "bytes".')
    return Pretrained(Path(name))
