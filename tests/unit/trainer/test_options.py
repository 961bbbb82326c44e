"""The options of a run: which are refused, and how long a run goes on by them and by its data."""

import pytest

from brimful.errors import UsageError
from brimful.trainer.options import TrainOptions


@pytest.mark.parametrize(
    ("epochs", "steps", "steps_per_epoch", "total"),
    [
        (2, None, 4, 8),
        (2, 100, 4, 8),
        (2, 5, 4, 5),
        (None, 5, 4, 5),
        (2, None, None, None),
        (2, 5, None, 5),  # at most: the epochs may end the run earlier
    ],
)
def test_the_steps_of_a_run_are_the_fewest_that_were_asked_for(epochs, steps, steps_per_epoch, total):
    assert TrainOptions(epochs=epochs, steps=steps).total_steps(steps_per_epoch) == total


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": 2.5}, "epochs is 2.5, of type float; it must be a whole number"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"save_every": "3", "run_dir": "run"}, "save_every is '3', of type str"),
        ({"patience": 1.0}, "patience is 1.0, of type float"),
        ({"keep_saves": True}, "keep_saves is True, of type bool"),
        ({"keep_saves": None}, "keep_saves is None"),
        ({"seed": "a"}, "seed is 'a', of type str"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be at most"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0; it must be at least 0 and less than 1"),
        ({"ema_decay": float("nan")}, "ema_decay is nan"),
        ({"ema_decay": "0.9"}, "ema_decay is '0.9'"),
    ],
)
def test_options_of_another_type_or_out_of_range_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        TrainOptions(**given)


def test_patience_without_validation_data_is_refused(job_with, trained):
    with pytest.raises(UsageError, match="patience needs validation data"):
        trained(job_with(), epochs=2, patience=1)
