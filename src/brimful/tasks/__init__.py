"""Ready tasks: jobs made from files of one's own."""

from brimful.tasks.images import image_classification

__all__ = ["image_classification"]
