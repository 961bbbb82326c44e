"""Which of transformers' classes a text recipe trains, and what is on top of the encoder or decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The kind of a text model."""

    what: str
    """Its name in messages."""
    auto_class: str
    """The class of transformers that loads it from a directory."""
    class_suffix: str
    """What the name of its class ends in, after that of the architecture."""
    peft_task: str
    """What peft calls the task in the configuration of adapters."""
    num_labels: int | None = None
    """Number of classes; None if there are none."""
    is_language_model: bool = False
    """Whether it predicts the next token."""
    has_pooler: bool = False
    """Whether the pooler of some encoders, such as BERT's, is part of it."""

    @property
    def is_classifier(self) -> bool:
        """Whether it has a new head, which is trained beside adapters too."""
        return self.num_labels is not None

    @property
    def is_encoder(self) -> bool:
        """Whether it has no head: its output is the hidden states of tokens."""
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
    """A head that classifies texts.

    Args:
        num_labels: Number of classes.

    Returns:
        The head.
    """
    return Head(
        what="text classifier",
        auto_class="AutoModelForSequenceClassification",
        class_suffix="ForSequenceClassification",
        peft_task="SEQ_CLS",
        num_labels=num_labels,
        has_pooler=True,
    )


def token_classifier(num_labels: int) -> Head:
    """A head that classifies each token.

    Args:
        num_labels: Number of classes.

    Returns:
        The head.
    """
    return Head(
        what="token classifier",
        auto_class="AutoModelForTokenClassification",
        class_suffix="ForTokenClassification",
        peft_task="TOKEN_CLS",
        num_labels=num_labels,
    )


def head_of(task: str, num_labels: int) -> Head:
    """The head that a recipe trains.

    Args:
        task: Name of the recipe, as in `Job.about`.
        num_labels: Number of classes; not used by recipes without.

    Returns:
        The head.
    """
    if task == "text-classification":
        return text_classifier(num_labels)
    if task == "token-classification":
        return token_classifier(num_labels)
    return ENCODER if task == "sentence-pairs" else LANGUAGE_MODEL


def without_pooler(head: Head, model: nn.Module) -> nn.Module:
    """Remove the layer of the first token, as in BERT, from a model that uses the states of all tokens.

    It would have no gradients.

    Args:
        head: What the model is for.
        model: A model of transformers; changed.

    Returns:
        The model.
    """
    if not head.has_pooler and isinstance(getattr(model, "pooler", None), nn.Module):
        model.register_module("pooler", None)
    return model
