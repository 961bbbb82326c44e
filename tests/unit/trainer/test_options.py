"""How long a run goes on, by what was asked and what its data say."""

import pytest

from brimful.trainer.options import Length


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
    assert Length(epochs=epochs, steps=steps, patience=None).total_steps(steps_per_epoch) == total
