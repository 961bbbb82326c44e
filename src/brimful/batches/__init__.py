"""A batch and its samples: find, count, split, resize, select and move them.

Start reading at `layout.BatchLayout`. `tensors` walks the tensors of a nested batch; `find_samples` finds in
which dimension the samples are; `input_mover` brings a micro-batch to the model's device.
"""

from brimful.batches.input_mover import InputMover
from brimful.batches.layout import BatchLayout, is_real, layout_of, make_batch, make_micro_batch, why_not_split
from brimful.batches.one_batch import are_samples, is_one_batch
from brimful.batches.sizes import sample_sizes
from brimful.batches.smaller import with_smaller_samples
from brimful.batches.tensors import (
    SampleList,
    is_applicable,
    is_record,
    map_leaves,
    map_tensors,
    named_tensors,
    own_part,
    tensors_in,
    to_device,
)

__all__ = [
    "BatchLayout",
    "InputMover",
    "SampleList",
    "are_samples",
    "is_applicable",
    "is_one_batch",
    "is_real",
    "is_record",
    "layout_of",
    "make_batch",
    "make_micro_batch",
    "map_leaves",
    "map_tensors",
    "named_tensors",
    "own_part",
    "sample_sizes",
    "tensors_in",
    "to_device",
    "why_not_split",
    "with_smaller_samples",
]
