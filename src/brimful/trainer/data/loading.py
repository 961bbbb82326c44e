"""How a DataLoader reads: its workers, what each reads ahead, and pinned memory, as the command line asks."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.options import LoadingOptions
from brimful.trainer.data.batches import find_data


def with_loading(job: Job, options: LoadingOptions) -> Job:
    """The job with training data that are read as the options ask; its own DataLoader stays as it is.

    UsageError if the training data are not a DataLoader, or if nothing reads ahead.
    """
    if options == LoadingOptions():
        return job

    def data() -> Data:
        found = find_data(job, None)
        return replace(found, train=_read_as_asked(job.name, found.train, options))

    return replace(job, data=data)


def _read_as_asked(name: str, loader: Any, options: LoadingOptions) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"--workers, --prefetch-factor and --pin-memory are for a DataLoader, and the data of {name} "
            f"are a {type(loader).__name__}. Give Data(train=DataLoader(…)), or omit them."
        )
    workers = loader.num_workers if options.workers is None else options.workers
    if options.prefetch_factor is not None and not workers:
        raise UsageError(
            f"--prefetch-factor {options.prefetch_factor} needs at least one worker, which reads ahead, and "
            f"{name} has none. Give --workers 1 or more."
        )
    ahead = options.prefetch_factor or loader.prefetch_factor or 2  # 2: torch's default, with workers
    read = copy.copy(loader)
    read.num_workers, read.prefetch_factor = workers, ahead if workers else None
    read.pin_memory = options.pin_memory or loader.pin_memory
    vars(read)["_iterator"] = None  # of workers that persist
    if not workers:
        read.timeout = 0
        vars(read)["persistent_workers"] = False  # a DataLoader refuses to have it set
    if workers > max(loader.num_workers, 1) and isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            f"each of {workers} workers reads all of a {type(loader.dataset).__name__}, unless it divides its "
            "samples by torch.utils.data.get_worker_info().",
            stacklevel=2,
        )
    return read
