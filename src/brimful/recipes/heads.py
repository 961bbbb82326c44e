"""Which of transformers' classes a text recipe trains, and what is on top of the encoder or decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The kind of a text model."""

    what: str
    """Name of the model in messages."""
    auto_class: str
    """The class of transformers that loads the model from a directory."""
    class_suffix: str
    """Suffix of the class name of the model, after the name of the architecture."""
    peft_task: str
    """peft's name of the task in the configuration of adapters."""
    num_labels: int | None = None
    """Number of classes; None if there are none."""
    is_language_model: bool = False
    """Whether the model predicts the next token."""
    has_pooler: bool = False
    """Whether the model uses the pooler of encoders that have one, such as BERT's."""

    @property
    def is_classifier(self) -> bool:
        """Whether the model has a new head, which is trained beside adapters too."""
        return self.num_labels is not None

    @property
    def is_encoder(self) -> bool:
        """Whether the model has no head: its output is the hidden states of tokens."""
        return not self.is_classifier and not self.is_language_model


LANGUAGE_MODEL = Head(
    what="language model",
    auto_class="AutoModelForCausalLM",
    class_suffix="LMHeadModel",
    peft_task="CAUSAL_LM",
    is_language_model=True,
)
ENCODER = Head(
    what="text encoder",
    auto_class="AutoModel",
    class_suffix="Model",
    peft_task="FEATURE_EXTRACTION",
)
"""Hidden states of tokens, without a head."""


def text_classifier(num_labels: int) -> Head:
    """A head that classifies texts."""
    return Head(
        what="text classifier",
        auto_class="AutoModelForSequenceClassification",
        class_suffix="ForSequenceClassification",
        peft_task="SEQ_CLS",
        num_labels=num_labels,
        has_pooler=True,
    )


def token_classifier(num_labels: int) -> Head:
    """A head that classifies each token."""
    return Head(
        what="token classifier",
        auto_class="AutoModelForTokenClassification",
        class_suffix="ForTokenClassification",
        peft_task="TOKEN_CLS",
        num_labels=num_labels,
    )


def head_of(task: str, num_labels: int) -> Head:
    """The head that a recipe trains, by the name of its task in `Job.about`.

    Recipes without classes do not use `num_labels`.
    """
    if task == "text-classification":
        return text_classifier(num_labels)
    if task == "token-classification":
        return token_classifier(num_labels)
    return ENCODER if task == "sentence-pairs" else LANGUAGE_MODEL


def without_pooler(head: Head, model: nn.Module) -> nn.Module:
    """Remove the pooler of a transformers model whose head does not use it; changes and returns the model.

    A pooler, as in BERT, reads the first token. In a model that uses the states of all tokens it would have no
    gradients.
    """
    if not head.has_pooler and isinstance(getattr(model, "pooler", None), nn.Module):
        model.register_module("pooler", None)
    return model
