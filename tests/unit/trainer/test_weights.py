"""Weights in safetensors files: the same bytes for the same weights, and nothing but weights is read."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from brimful.errors import UsageError
from brimful.trainer.storage.weights import TIED, load_weights, read_tensors, write_tensors

WRITES = """
    import sys
    from pathlib import Path
    import torch
    from brimful.trainer.storage.weights import write_tensors

    metadata = {name: name.upper() for name in "abcdefghijkl"} | {"tied": '{"b": "a"}', "step": "3"}
    tensors = {name: torch.arange(5.0) for name in ("weight", "bias", "\\u00fc \\n")}
    write_tensors(tensors, Path(sys.argv[1]), metadata)
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    paths = [tmp_path / "one", tmp_path / "other"]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITES), str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for path, seed in zip(paths, "12", strict=True)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_what_is_written_is_a_safetensors_file_that_others_read(tmp_path):
    tensors = {"b": torch.rand(3, 2), 'a "quoted"\n\x01': torch.arange(4, dtype=torch.bfloat16)}
    metadata = {"z": "1", "ü": "\u2028", TIED: "{}"}
    write_tensors(tensors, tmp_path / "weights", metadata)
    torch.testing.assert_close(load_file(tmp_path / "weights"), tensors, rtol=0, atol=0)
    header = (tmp_path / "weights").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"] == {"format": "pt", **metadata}
    assert length % 8 == 0


@pytest.mark.parametrize(
    "tied",
    [
        "not JSON",
        "null",
        "[]",
        "3",
        '{"bias": 3}',
        '{"bias": "nowhere"}',
        '{"weight": "weight"}',
        "[" * 100_000,
    ],
)
def test_names_of_tied_weights_that_are_not_names_are_refused(tmp_path, tied):
    save_file({"weight": torch.rand(2, 2)}, tmp_path / "weights", metadata={TIED: tied})
    with pytest.raises(UsageError, match="tied"):
        load_weights(nn.Linear(2, 2), tmp_path / "weights")


def test_a_file_that_is_not_a_regular_one_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "weights")
    for path in (tmp_path / "weights", Path(os.devnull), Path("/dev/zero")):
        with pytest.raises(UsageError, match="is not a regular file"):
            load_weights(nn.Linear(2, 2), path)


def test_memory_that_runs_out_while_weights_are_read_is_not_said_to_be_another_model(tmp_path):
    class Full(nn.Linear):
        def load_state_dict(self, *arguments, **options):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
            )

    write_tensors(nn.Linear(2, 2).state_dict(), tmp_path / "weights", {})
    assert read_tensors(tmp_path / "weights").keys() == {"weight", "bias"}
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_weights(Full(2, 2), tmp_path / "weights")


def test_a_run_directory_gives_its_best_weights_else_the_average_else_the_last(tmp_path):
    for value, name in enumerate(("weights.safetensors", "average.safetensors", "best.safetensors")):
        write_tensors({"weight": torch.full((2, 2), float(value))}, tmp_path / name, {})
        model = nn.Linear(2, 2, bias=False)
        assert load_weights(model, tmp_path) == tmp_path / name
        assert torch.equal(model.weight, torch.full((2, 2), float(value)))


def test_a_directory_without_weights_is_refused_by_what_it_lacks(tmp_path):
    with pytest.raises(UsageError, match=r"has no weights: none of best\.safetensors, average"):
        load_weights(nn.Linear(2, 2), tmp_path)
