"""The list of corrections: their names, and leaving some out."""

from __future__ import annotations

import pytest

from brimful.capture import capture_step
from brimful.capture.corrections import RULES, rules_for
from brimful.errors import UnknownNameError
from brimful.settings import Settings
from helpers.captured_jobs import A100, CPU, H100, job

SETTINGS = Settings(micro_batch_size=1)
ON_CUDA = [rule.name for rule in rules_for(A100, SETTINGS)]


def test_each_rule_has_its_own_name_and_says_where_it_is_from() -> None:
    assert len({make.name for make in RULES}) == len(RULES)
    assert all(make.source and make.__doc__ for make in RULES)


def test_a_rule_its_class_and_its_file_have_one_name_and_lie_with_the_rules_of_its_devices() -> None:
    for make in RULES:
        *_package, folder, module = make.__module__.split(".")
        assert module == make.name
        assert make.__name__ == make.name.title().replace("_", "")
        assert folder == ("common" if len(make.device_kinds) > 1 else make.device_kinds[0])


def test_rules_are_those_of_the_device_in_the_order_of_the_list() -> None:
    order = [make.name for make in RULES]
    on_cpu = [rule.name for rule in rules_for(CPU, SETTINGS)]
    assert sorted(ON_CUDA, key=order.index) == ON_CUDA
    assert "cudnn_rnn" in ON_CUDA
    assert "cudnn_rnn" not in on_cpu
    assert "lstm_memory" in on_cpu
    assert "lstm_memory" not in ON_CUDA


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_step_can_be_captured_without_any_one_of_them(name: str) -> None:
    assert name not in {rule.name for rule in rules_for(A100, SETTINGS, without=[name])}
    trace = capture_step(job(), Settings(micro_batch_size=2), A100, steps=1, without=[name])
    assert name not in {correction.name for correction in trace.corrections}


def test_what_is_left_out_changes_the_prediction() -> None:
    def workspaces(without: list[str]) -> list[int]:
        trace = capture_step(job(), Settings(micro_batch_size=2), H100, steps=1, without=without)
        return [s.size_bytes for s in trace.storages if s.label == "cuBLAS workspace"]

    assert workspaces([]) == [32 << 20, 32 << 20]
    assert workspaces(["cublas_workspace"]) == []


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="cudnn_rnn"):
        rules_for(A100, SETTINGS, without=["cudnn_rn"])
