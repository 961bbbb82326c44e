"""Files → a `Job` that trains on them: classifiers of texts, words and images, language models, encoders."""

from brimful.recipes.images import image_classification
from brimful.recipes.language_model import language_model
from brimful.recipes.pretrained import save_pretrained
from brimful.recipes.sentence_pairs import sentence_pairs
from brimful.recipes.text_classification import text_classification
from brimful.recipes.token_classification import token_classification

__all__ = [
    "image_classification",
    "language_model",
    "save_pretrained",
    "sentence_pairs",
    "text_classification",
    "token_classification",
]
