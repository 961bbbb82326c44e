"""Results that are remembered are those that torch's fake tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brimful.capture.fakes.cache import FakeCache, results_shared
from brimful.capture.fakes.wrapper import Wrapper
from brimful.capture.recording.op_info import describe_op
from brimful.capture.recording.runner import FakeRunner

aten = torch.ops.aten

# N samples, C channels, H height, W width

Calls = Callable[[Tensor], list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]


def convolutions(x: Tensor) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    weight = torch.empty(6, 4, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    grad = torch.empty(2, 6, 8, 8)
    return [
        (aten.convolution.default, (x, weight, None, *how), {}),
        (aten.convolution.default, (x.to(memory_format=torch.channels_last), weight, None, *how), {}),
        (aten.convolution_backward.default, (grad, x, weight, [0], *how, [True, True, False]), {}),
        (aten.convolution_backward.default, (grad, x, weight, [0], *how, [False, True, False]), {}),
    ]


CALLS: dict[str, Calls] = {
    "strides": lambda x: [(aten.relu.default, (y,), {}) for y in (x, x.transpose(1, 2), x[:, ::2])],
    "types": lambda x: [(aten.mul.Scalar, (x.to(torch.int64), number), {}) for number in (2, 2.0, True, 2.5)],
    "named arguments": lambda x: [
        (aten.sum.dim_IntList, (x, [1]), {"dtype": dtype}) for dtype in (None, torch.float64, torch.int32)
    ],
    "dimensions": lambda x: [(aten.sum.dim_IntList, (x, dims, keep), {}) for dims in ([1], [2], [0, 1])
                             for keep in (True, False)],
    "lists": lambda x: [(aten._foreach_sqrt.default, (some,), {}) for some in ([x], [x, x[0]], [x[0]])],
    "several results": lambda x: [
        (aten.native_layer_norm.default, (x, [8], None, None, 1e-5), {}),
        (aten.native_dropout.default, (x, 0.1, True), {}),
        (aten.max.dim, (x, 1), {}),
    ],
    "results that are left out": convolutions,
    "no elements": lambda x: [(aten.relu.default, (x[:0],), {}), (aten.relu.default, (x[0, 0, 0, 0],), {})],
}  # fmt: skip


def described(out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out), [described(tensor) for tensor in out]
    if out is None:
        return None
    return out.shape, out.stride(), out.dtype, out.device, out.untyped_storage().nbytes(), type(out)


@pytest.mark.parametrize("name", CALLS)
def test_the_second_result_is_as_the_first_and_shares_nothing_with_it(name: str) -> None:
    results = FakeCache()
    with FakeTensorMode():
        calls = CALLS[name](torch.empty(2, 4, 8, 8))
        for func, args, kwargs in calls:
            expected = func(*args, **kwargs)
            found = [results.run(func, args, kwargs).out for _ in range(3)]
            assert [described(out) for out in found] == [described(expected)] * 3
            tensors = [t for out in found for t in (out if isinstance(out, (tuple, list)) else [out])]
            addresses = [t.untyped_storage()._cdata for t in tensors if t is not None]
            assert len(set(addresses)) == len(addresses)
    assert len(results._known) > 0


def test_what_is_written_over_is_returned_itself() -> None:
    results = FakeCache()
    with FakeTensorMode():
        for total in (torch.empty(2, 3), torch.empty(2, 3)):
            assert results.run(aten.add_.Tensor, (total, torch.empty(2, 3)), {}).out is total
        assert results.run(aten.add_.Tensor, (total, torch.empty(2, 3)), {}).cached is not None


def test_ops_without_tensors_are_remembered_within_their_fake_mode_where_their_type_is_said() -> None:
    results = FakeCache()
    with FakeTensorMode():
        first, second = (results.run(aten.zeros.default, ([3],), {"dtype": torch.int64}) for _ in range(2))
        assert described(first.out) == described(second.out)
        assert first.cached is second.cached is not None
        assert results.run(aten.zeros.default, ([3],), {}).cached is None
    assert type(results.run(aten.zeros.default, ([3],), {"dtype": torch.int64}).out) is Tensor


def test_captures_share_results_while_that_is_asked_for_each_in_its_own_mode() -> None:
    def result_in(mode: FakeTensorMode) -> Any:
        with mode:
            return FakeCache().run(aten.relu.default, (torch.empty(2, 3),), {})

    first, second = FakeTensorMode(), FakeTensorMode()
    with results_shared():
        known, again = result_in(first), result_in(second)
        with results_shared():
            assert result_in(second).cached is known.cached
    assert again.cached is known.cached is not None
    assert (known.out.fake_mode, again.out.fake_mode) == (first, second)
    assert described(known.out) == described(again.out)
    assert result_in(first).cached is not known.cached


@pytest.mark.parametrize("data", [0.0, 3, True])
def test_a_number_becomes_the_fake_that_torch_makes_of_it(data: float) -> None:
    real = torch.tensor(data)
    info = describe_op(aten.lift_fresh.default, ())
    with FakeTensorMode() as mode:
        expected: Any = aten.lift_fresh.default(real)
        made: Any = FakeRunner(None).run(info, aten.lift_fresh.default, (real,), {}).out  # type: ignore[arg-type]
    assert described(made) == described(expected)
    assert made.constant.item() == expected.constant.item() == data
    assert made.constant is not real
    assert {**made.__dict__, "constant": None} == {**expected.__dict__, "constant": None}
    with mode:  # a number that is written over is not known
        made.copy_(torch.empty(()))
    assert made.constant is None
    assert made.fake_mode is mode


def test_a_wrapped_tensor_is_as_torchs_own_constructor_makes_it() -> None:
    mode, device = FakeTensorMode(), torch.device("cpu")
    wrapper = Wrapper()
    for _ in range(2):
        meta = torch.empty_strided((2, 3), (1, 2), device="meta")
        made, expected = wrapper.fake(mode, meta, device), FakeTensor(mode, meta, device)
        assert described(made) == described(expected)
        assert made.__dict__ == expected.__dict__
        assert made.untyped_storage()._cdata == meta.untyped_storage()._cdata
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(expected)
    assert wrapper.fake(FakeTensorMode(), meta, device).fake_mode is not mode
