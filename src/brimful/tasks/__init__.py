"""Ready tasks: jobs made from files of one's own."""

from brimful.tasks.images import image_classification
from brimful.tasks.language_model import language_model
from brimful.tasks.text_classification import text_classification

__all__ = ["image_classification", "language_model", "text_classification"]
