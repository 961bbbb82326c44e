"""Training and validation samples of a text recipe: of two files, or of one that is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from brimful.job import Batch, Data
from brimful.recipes.choices import sample
from brimful.recipes.rows import Row
from brimful.recipes.tokenized import TokenizedTexts, rounded_up

Encode = Callable[[Sequence[Row]], TokenizedTexts]
"""Tokenizes rows, perhaps without some that have no tokens."""
Choose = Callable[[TokenizedTexts], tuple[Sequence[int], Sequence[int]]]
"""Chooses the indices of training and of validation samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Tokenized samples for training and for validation, of which there may be none."""

    training: TokenizedTexts
    validation: TokenizedTexts

    def padded_length(self, name: str = "input_ids") -> int:
        """Tokens of the longest entry of a name, rounded up as batches are padded."""
        return rounded_up(max(self.training.most_tokens(name), self.validation.most_tokens(name)))

    def data(
        self,
        *,
        training_metrics: bool,
        seed: int,
        longest: Callable[[int], Batch] | None = None,
    ) -> Data:
        """The data of the job.

        With `training_metrics`, as many training samples as there are validation samples are evaluated too;
        `seed` chooses them. `longest` makes the batch that takes the most memory; None takes the longest
        samples.
        """
        training, validated = self.training, len(self.validation)
        chosen = sample(len(training), validated, seed) if training_metrics and validated else None
        return Data(
            train=training,
            validation=self.validation if validated else None,
            training_sample=None if chosen is None else training.some(chosen),
            longest=training.longest if longest is None else longest,
        )


def split_or_both(
    rows: Sequence[Row], of_validation: Sequence[Row] | None, *, encode: Encode, choose: Choose
) -> Split:
    """Tokenize the rows of the training file, and those of the validation file if there is one.

    `of_validation` is None without a validation file: then `choose` splits the samples of the training file.
    """
    training = encode(rows)
    if of_validation is not None:
        return Split(training=training, validation=encode(of_validation))
    for_training, for_validation = choose(training)
    return Split(training=training.some(for_training), validation=training.some(for_validation))
