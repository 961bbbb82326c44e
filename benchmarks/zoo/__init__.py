"""Small versions of many architectures, to be captured and measured."""

import torchvision_on_cpu  # noqa: F401  # before transformers, which looks for torchvision

# isort: split
from zoo.audio import AUDIO
from zoo.convolutional import CONVOLUTIONAL
from zoo.model import ZooModel
from zoo.others import OTHERS
from zoo.packages import PACKAGES, missing
from zoo.sequences import SEQUENCES
from zoo.text import TEXT
from zoo.vision import VISION

ZOO: tuple[ZooModel, ...] = (*TEXT, *VISION, *AUDIO, *CONVOLUTIONAL, *SEQUENCES, *OTHERS, *PACKAGES)

__all__ = ["ZOO", "ZooModel", "missing"]
