"""Files → a `Job` that trains on them: classifiers of images and texts, and language models."""

from brimful.recipes.images import image_classification
from brimful.recipes.language_model import language_model
from brimful.recipes.pretrained import save_pretrained
from brimful.recipes.text_classification import text_classification

__all__ = ["image_classification", "language_model", "save_pretrained", "text_classification"]
