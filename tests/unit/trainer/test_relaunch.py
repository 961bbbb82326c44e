"""What a rank leaves for the next launch is read as any file is: checked, and never waited for."""

import json
import os
from pathlib import Path

import pytest

from brimful.errors import FileFormatError
from brimful.results import Recovery
from brimful.settings import Settings
from brimful.trainer import resume
from brimful.trainer.resume import Fallback, read_fallback, write_fallback
from brimful.trainer.storage.run_directory import FALLBACK

BEFORE = Settings(micro_batch_size=4)
RECOVERY = Recovery(step=3, during="step on rank 1", message="out", before="a", after="b", seconds=0.5)
LEFT = Fallback(before=BEFORE, after=Settings(micro_batch_size=2), recovery=RECOVERY)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    write_fallback(tmp_path, LEFT)
    return tmp_path / FALLBACK


def test_what_is_left_is_found_for_the_settings_it_was_left_for(left):
    assert read_fallback(left.parent, BEFORE) == LEFT
    assert read_fallback(left.parent, LEFT.after) is None
    left.unlink()
    assert read_fallback(left.parent, BEFORE) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        "null",
        '{"before": 3}',
        '{"before": {}, "after": {}, "recovery": {"step": "x"}}',
    ],
)
def test_a_damaged_one_is_refused(left, content):
    left.write_text(content)
    with pytest.raises(FileFormatError, match=FALLBACK):
        read_fallback(left.parent, BEFORE)


def test_an_unknown_field_is_refused(left):
    left.write_text(json.dumps(json.loads(left.read_text()) | {"more": 1}))
    with pytest.raises(FileFormatError, match="more"):
        read_fallback(left.parent, BEFORE)


def test_a_fifo_is_refused_without_waiting(left):
    left.unlink()
    os.mkfifo(left)
    with pytest.raises(FileFormatError, match="not a regular file"):
        read_fallback(left.parent, BEFORE)


def test_a_relaunch_says_that_it_goes_on_from_the_last_save(job_with, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resume, "_fallback", lambda config, settings, ranks: (settings, RECOVERY))
    options = {"run_dir": tmp_path / "run", "resume": True, "show_progress": True}
    trained(job_with(), steps=1, **options)
    assert "step on rank 1, step 3  out: on with b; started from the beginning" in capsys.readouterr().err
    trained(job_with(), steps=2, **options)
    assert "step on rank 1, step 3  out: on with b; resumed from the last save" in capsys.readouterr().err
