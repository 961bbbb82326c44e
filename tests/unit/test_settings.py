"""Settings: names of ops, actions that contradict themselves, what a reader is told, JSON both ways."""

import gc
import weakref
from typing import Any

import pytest
import torch

from brimful.codec import to_json_document
from brimful.errors import UsageError
from brimful.settings import (
    Action,
    MemoryFormat,
    OptimizerImplementation,
    Precision,
    Settings,
    UnitAction,
    op_kind,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm.default", "addmm"),
        ("aten.add_.Tensor", "add_"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        (
            "aten._scaled_dot_product_efficient_attention_backward.default",
            "_scaled_dot_product_efficient_attention_backward",
        ),
        ("torchvision.nms.default", "torchvision.nms"),
    ],
)
def test_an_op_is_called_by_its_name_without_overload(name: str, kind: str) -> None:
    assert op_kind(name) == kind


@pytest.mark.parametrize(
    ("action", "saved", "message"),
    [
        (Action.SAVE, (), "'save' names at least one"),
        (Action.RECOMPUTE, ("mm#0",), "every other action none"),
        (Action.SAVE, ("mm",), "names no op"),
        (Action.SAVE, ("mm#x",), "names no op"),
    ],
)
def test_an_action_that_contradicts_itself_is_refused(
    action: Action, saved: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        UnitAction(fqn="a", action=action, saved=saved)


SETTINGS = Settings(
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    precision=Precision.BF16,
    optimizer="adamw",
    optimizer_implementation=OptimizerImplementation.FUSED,
    units=(
        UnitAction(fqn="a", action=Action.KEEP),
        UnitAction(fqn="b", action=Action.SAVE, saved=("mm#0", "attention#1")),
        UnitAction(fqn="c[0..2]", action=Action.RECOMPUTE),
        UnitAction(fqn="c[3..5]", action=Action.NEST),
        UnitAction(fqn="d", action=Action.OFFLOAD, most_offloaded_bytes=2**20),
        UnitAction(fqn="e", action=Action.KEEP),
    ),
)


@pytest.mark.parametrize(("action", "limit"), [(Action.KEEP, 1), (Action.RECOMPUTE, 1), (Action.OFFLOAD, 0)])
def test_a_limit_of_what_is_offloaded_is_of_an_offloaded_unit_and_positive(action: Action, limit: int) -> None:
    with pytest.raises(UsageError, match="most_offloaded_bytes"):
        UnitAction(fqn="a", action=action, most_offloaded_bytes=limit)


def test_a_reader_is_told_what_becomes_of_the_units() -> None:
    assert SETTINGS.describe() == (
        "bf16, micro-batch 4 × 2, adamw, fused optimizer, 1 of 6 units recomputed, "
        "1 of 6 units recomputed in part, 1 of 6 units nested, 1 of 6 units offloaded in part"
    )
    assert SETTINGS.recomputed == ("b", "c[0..2]", "c[3..5]")
    assert SETTINGS.offloaded == ("d",)
    assert SETTINGS.changed == ("b", "c[0..2]", "c[3..5]", "d")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ((), "there is none"),
        ((UnitAction(fqn="a", action=Action.KEEP),), "'a' has action 'keep'"),
        ((UnitAction(fqn="a", action=Action.SAVE, saved=("mm#0",)),), "'a' has action 'save'"),
        ((UnitAction(fqn="a", action=Action.OFFLOAD),), "'a' has action 'offload'"),
    ],
)
def test_a_nested_unit_follows_one_that_runs_again(before: tuple[UnitAction, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(micro_batch_size=1, units=(*before, UnitAction(fqn="b", action=Action.NEST)))


@pytest.mark.parametrize("precision", ["bf16", "bfloat16", torch.bfloat16, Precision.BF16])
def test_a_precision_is_understood_by_its_names(precision: Any) -> None:
    assert Settings(micro_batch_size=1, precision=precision).precision is Precision.BF16


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("channels_last", MemoryFormat.CHANNELS_LAST),
        (torch.channels_last, MemoryFormat.CHANNELS_LAST),
        (torch.channels_last_3d, MemoryFormat.CHANNELS_LAST),
        (torch.contiguous_format, MemoryFormat.CONTIGUOUS),
        (None, None),
    ],
)
def test_a_memory_format_is_understood_by_its_names(named: Any, meant: MemoryFormat | None) -> None:
    settings = Settings(micro_batch_size=1, memory_format=named)
    assert settings.memory_format is meant
    assert ("memory_format" in to_json_document(settings)) is (meant is not None)
    assert (str(meant) in settings.describe()) is (meant is not None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"micro_batch_size": 1, "memory_format": "nhwc"},
            "memory_format is 'nhwc'; it must be one of contiguous, channels_last",
        ),
        ({"micro_batch_size": "8"}, r"micro_batch_size is '8', of type str; it must be a whole number"),
        ({"micro_batch_size": 2.0}, "micro_batch_size is 2.0, of type float"),
        ({"micro_batch_size": True}, "micro_batch_size is True, of type bool"),
        (
            {"micro_batch_size": 1, "precision": "fp8"},
            "precision is 'fp8'; it must be one of fp32, tf32, fp16, bf16",
        ),
        ({"micro_batch_size": 1, "parallelism": "tp"}, "parallelism is 'tp'; it must be one of"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**fields)


def test_a_record_that_is_checked_leaves_its_callers_to_be_freed() -> None:
    class Large:
        """Stands for a model."""

    def call() -> weakref.ref[Large]:
        large = Large()
        Settings(micro_batch_size=1)
        return weakref.ref(large)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
