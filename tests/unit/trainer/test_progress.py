import io
import sys

import pytest
from rich.console import Console

from brimful.job import Data
from brimful.results import Recovery, StepRecord, ValidationRecord
from brimful.settings import Settings
from brimful.trainer import Trainer
from brimful.trainer.monitor import progress
from brimful.trainer.monitor.progress import make_progress, memory_text, recovery_text


def step(number, loss=1.234, seconds=0.5, **changes):
    values = {"step": number, "epoch": 1, "loss": loss, "gradient_norm": 1.0, "seconds": seconds}
    return StepRecord(**values | {"samples": 64, "updated": True} | changes)


VALIDATION = ValidationRecord(
    step=2, epoch=1, loss=0.5, metrics={"accuracy[top]": 0.9}, samples=10, seconds=0.1
)


def shown(total, show, *, terminal=False):
    output = io.StringIO()
    display = make_progress(total, show=True, console=Console(file=output, force_terminal=terminal, width=120))
    display.start()
    show(display)
    display.stop()
    display.stop()
    return output.getvalue()


def test_lines_say_step_loss_speed_memory_and_time_left():
    text = shown(60, lambda display: display.show_step(step(12), "312 MiB of 640 MiB"))
    assert text == "step 12/60  loss 1.234  128 samples/s  312 MiB of 640 MiB  24 s left\n"


def test_lines_come_now_and_then_and_the_last_step_always(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def show(display):
        for number in range(1, 31):
            now[0] += 1.0
            display.show_step(step(number), "")

    lines = shown(30, show).splitlines()
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 11", "step 21", "step 30"]
    assert "left" not in lines[-1]


def test_a_validation_is_a_line_after_that_of_its_step():
    def show(display):
        display.show_step(step(1), "")
        display.show_step(step(2), "")
        display.show_validation(VALIDATION)

    lines = shown(None, show).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2", "epoch 1, step 2"]
    assert lines[2] == "epoch 1, step 2  validation loss 0.5  accuracy[top] 0.9"


def test_a_terminal_gets_a_bar_and_validations_above_it():
    def show(display):
        display.show_step(step(12), "~312 MiB")
        display.show_validation(VALIDATION)

    text = shown(60, show, terminal=True)
    assert "step 12/60" in text
    assert "━" in text
    assert "loss 1.234  128 samples/s  ~312 MiB  24 s left" in text
    assert "accuracy[top] 0.9" in text


def test_the_step_that_measured_memory_does_not_count_for_the_speed():
    def show(display):
        display.show_step(step(1, seconds=9.0, memory_measured=True), "")

    assert shown(2, show) == "step 1/2  loss 1.234\n"


def test_tokens_per_second_are_shown_beside_samples_per_second_and_the_mfu():
    output = io.StringIO()
    display = make_progress(60, show=True, loss_unit="tokens", console=Console(file=output, width=120))
    display.show_step(step(12, seconds=0.4, data_seconds=0.1, terms=1000.0, mfu=0.38), "")
    display.show_step(step(13, seconds=0.5, terms=1000.0, mfu=0.42), "")
    display.stop()
    assert (
        output.getvalue().splitlines()[-1]
        == "step 13/60  loss 1.234  128 samples/s  2000 tokens/s  MFU 40%  23.5 s left"
    )


def test_the_rate_of_what_a_job_counts_is_not_shown_where_it_equals_that_of_samples():
    output = io.StringIO()
    display = make_progress(60, show=True, loss_unit="counted", console=Console(file=output, width=120))
    display.show_step(step(12, seconds=0.5, terms=64.0), "")
    display.stop()
    assert output.getvalue().splitlines()[-1] == "step 12/60  loss 1.234  128 samples/s  24 s left"


def test_waiting_for_data_is_part_of_the_speed_and_of_the_time_left():
    text = shown(60, lambda display: display.show_step(step(12, seconds=0.3, data_seconds=0.2), ""))
    assert text == "step 12/60  loss 1.234  128 samples/s  24 s left\n"


def test_silence_says_nothing(capsys):
    display = make_progress(10, show=False)
    display.start()
    display.show_step(step(1), "")
    display.show_validation(VALIDATION)
    display.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((312 << 20, 640 << 20), "312 MiB of 640 MiB"),
        ((312 << 20, None), "312 MiB"),
        ((None, 640 << 20), ""),
    ],
)
def test_memory_for_a_reader(arguments, text):
    assert memory_text(*arguments) == text
    assert memory_text(*arguments, predicted=True) == ("~" + text if text else "")


def test_standard_error_that_cannot_be_written_does_not_end_a_run(job_with, trained, tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Full())
    _, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", show_progress=True)
    assert len(result.steps) == 8
    assert (tmp_path / "run" / "result.json").exists()


def test_a_validation_that_takes_long_says_how_far_it_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def show(display):
        display.show_step(step(1), "")
        for samples in range(64, 25 * 64, 64):
            now[0] += 1.0
            display.show_validating(samples)

    lines = shown(None, show).splitlines()
    assert lines[1:] == ["validating, 640 samples so far", "validating, 1280 samples so far"]
    assert "validating, 1536 samples so far" in shown(None, show, terminal=True)


def test_training_reports_each_micro_batch_of_a_validation(job_with, samples, monkeypatch):
    seen = []
    monkeypatch.setattr(progress.ProgressDisplay, "show_validating", lambda _self, count: seen.append(count))
    part = {name: tensor[:20] for name, tensor in samples.items()}
    job = job_with(data=lambda: Data(train=samples, validation=part))
    Trainer(job, Settings(micro_batch_size=8), epochs=1, device="cpu", show_progress=False).fit()
    assert seen == [8, 16, 20]


def test_a_recovery_tells_what_is_lost():
    recovery = Recovery(step=3, during="step on rank 1", message="out", before="a", after="b", seconds=0.5)
    text = recovery_text(recovery, lost="resumed from the last save")
    assert text == "step on rank 1, step 3  out: on with b; resumed from the last save"
