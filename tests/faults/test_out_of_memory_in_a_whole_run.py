"""Memory runs out anywhere in a run: building, reading, stepping, averaging, validating, saving, writing.

Where it runs out once, the run ends as if it had not, bit for bit. Where it stays short, the run ends with
brimful's own error, which says truly what is saved, and what is resumed ends as the undisturbed run.

The places are not listed here: every place that runs an op in an undisturbed run is one, also of code that is
written later.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from brimful.errors import OutOfMemoryError, PartialUpdateError
from brimful.settings import Settings
from brimful.trainer import Callback, Trainer
from helpers.faults import OutOfMemoryAt, Site, is_within
from helpers.whole_runs import fit, make_job, quick

PARTS = 8
"""In which the exhaustive test is divided."""


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict[str, Any], dict[Site, list[int]]]:
    """What the run comes to, and the numbers of the ops of each place."""
    counted = OutOfMemoryAt(keeps_sites=True)
    expected = fit(tmp_path_factory.mktemp("undisturbed") / "run", around=counted)
    gc.freeze()  # what the first run imports, too
    numbers: dict[Site, list[int]] = {}
    for number, site in enumerate(counted.sites):
        numbers.setdefault(site, []).append(number)
    return expected, numbers


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    assert all(
        torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1] for pair in pairs
    )


def test_the_undisturbed_run_is_the_same_each_time(undisturbed, tmp_path):
    assert_same(fit(tmp_path / "run"), undisturbed[0])


ONCE = {
    "building the model": "built",
    "making its average": "MovingAverage.__init__",
    "opening the data": "opened",
    "reading a sample": "__getitem__",
    "forward": "forward",
    "the optimizer's update": "_call_update",
    "folding into the average": "update",
    "checking weights for NaN": "has_finite_parameters",
    "copying for a save": "_copied",
    "the average in place of the weights": "in_place",
    "validating": "_parts",
    "writing weights": "_save_weights",
}


def numbers_within(sites: dict[Site, list[int]], function: str) -> list[int]:
    """Of the ops of a function, the last of each place."""
    name = function.split(".")[-1]
    file = "ema.py" if function.startswith("MovingAverage") else ""
    return sorted(
        numbers[-1]
        for site, numbers in sites.items()
        if any(each.endswith(f":{name}") and each.startswith(file) for each in site[1:])
    )


@pytest.mark.parametrize("function", ONCE.values(), ids=ONCE)
def test_memory_that_runs_out_once_changes_nothing(undisturbed, tmp_path, function):
    expected, sites = undisturbed
    numbers = numbers_within(sites, function)
    fault = OutOfMemoryAt(numbers[len(numbers) // 2])
    assert_same(fit(tmp_path / "run", around=fault), expected)
    assert fault.raised == 1


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_memory_that_runs_out_once_at_any_place_changes_nothing(undisturbed, tmp_path, part):
    expected, sites = undisturbed
    of_each = sorted({number for numbers in sites.values() for number in (numbers[0], numbers[-1])})
    for number in of_each[part::PARTS]:
        fault = OutOfMemoryAt(number)
        assert_same(fit(tmp_path / str(number), around=fault), expected)
        assert fault.raised == 1


def short_in(*functions: str, from_number: int = 0) -> OutOfMemoryAt:
    """Memory that is short in some functions from an op of theirs on."""
    count = iter(range(10**9))
    return OutOfMemoryAt(fails=lambda _name, _args: is_within(*functions) and next(count) >= from_number)


SHORT = {
    "the model is built": ("built", 0),
    "the training data were read": ("__getitem__", 20),
    "weights are checked": ("has_finite_parameters", 20),
    "is copied to the host": ("_copied", 90),
    "takes the place of the weights": ("in_place", 8),
    "in the validation": ("_parts", 40),
    "safetensors is written": ("_save_weights", 40),
}


@pytest.mark.sweep
@pytest.mark.parametrize("said", SHORT)
def test_memory_that_stays_short_ends_the_run_with_what_is_saved(undisturbed, tmp_path, said):
    function, from_number = SHORT[said]
    with pytest.raises(OutOfMemoryError, match=said) as error:
        fit(tmp_path / "run", around=short_in(function, from_number=from_number))
    saves = tmp_path / "run" / "saves"
    newest = max((int(path.name[5:]) for path in saves.glob("step-*")), default=None)
    notes = "\n".join(getattr(error.value, "__notes__", ()))
    assert (f"The run is saved after step {newest};" in notes) is (newest is not None)
    assert_same(fit(tmp_path / "run", resume=True), undisturbed[0])


def test_a_model_that_cannot_be_built_leaves_nothing(tmp_path):
    with pytest.raises(OutOfMemoryError, match="while the model is built, twice in a row: CUDA out of memory"):
        fit(tmp_path / "run", around=short_in("built"))
    assert not (tmp_path / "run").exists()


def test_a_step_that_cannot_be_taken_back_is_not_saved_as_if_it_were(undisturbed, tmp_path):
    """Buffers are restored in part: neither before the step nor after it."""
    raised = []

    def fails(name: str, _args: Any) -> bool:
        is_normalising = "native_batch_norm" in name and is_within("forward") and is_within("_attempt")
        if is_normalising and len(raised) < 3:  # the third is in the second step
            raised.append(name)
            return len(raised) == 3
        return len(raised) == 3 and is_within("_undo")

    with pytest.raises(PartialUpdateError, match="undoing it raised") as error:
        fit(tmp_path / "run", around=OutOfMemoryAt(fails=fails))
    assert error.value.__notes__[-1].startswith("The run is saved after step 1;")
    assert_same(fit(tmp_path / "run", resume=True), undisturbed[0])


def test_an_average_that_cannot_follow_an_update_is_not_saved_as_if_it_had(undisturbed, tmp_path):
    fault = OutOfMemoryAt(fails=lambda name, _args: "_foreach_lerp_" in name and is_within("_complete"))
    with pytest.raises(PartialUpdateError, match="average of the weights could not follow"):
        fit(tmp_path / "run", around=fault)
    assert_same(fit(tmp_path / "run", resume=True), undisturbed[0])


class Hungry(Callback):
    """Needs more than there is, after a step."""

    def on_step(self, trainer, record):
        if record.step == 3:
            raise MemoryError("Unable to allocate 512 TiB")


def test_memory_that_runs_out_in_a_callback_is_said_to_be_there(undisturbed, tmp_path):
    with pytest.raises(
        OutOfMemoryError, match=r"outside of a step \(.*\): Unable to allocate 512 TiB"
    ) as error:
        fit(tmp_path / "run", callbacks=[Hungry()])
    explained, saved = error.value.__notes__
    assert explained.startswith("out of memory\n")
    assert saved == f"The run is saved after step 3; resuming {tmp_path / 'run'} continues there."
    assert_same(fit(tmp_path / "run", resume=True), undisturbed[0])


def test_memory_that_runs_out_before_the_first_step_says_where():
    def data():
        return torch.empty(2**58)

    job = make_job()
    trainer = Trainer(
        type(job)(model=job.model, loss=job.loss, batch=job.batch, data=data),
        Settings(micro_batch_size=2),
        show_progress=False,
        device="cpu",
    )
    with pytest.raises(OutOfMemoryError, match=r"before the first step .*\): .*DefaultCPUAllocator"):
        trainer.fit()


def test_reading_that_ran_out_of_memory_is_recorded(tmp_path):
    found: list[Any] = []

    class Keep(Callback):
        def on_end(self, trainer, result):
            found.append(result)

    fault = short_in("__getitem__", from_number=12)
    fault._fails = lambda _name, _args: not fault.raised and len(fault.ops) > 900 and is_within("__getitem__")
    fit(tmp_path / "run", around=fault, callbacks=[Keep()])
    assert [(each.during, each.step) for each in found[0].recoveries] == [("reading", 2)]
