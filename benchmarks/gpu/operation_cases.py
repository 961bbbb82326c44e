"""The ops whose temporaries are recorded, at sizes that training steps have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.settings import Precision
from gpu.operations import Case, Function, Input

# B samples, C channels, H and W image size; T tokens, D head or model size

aten = torch.ops.aten

FP32, BF16 = torch.float32, torch.bfloat16
_DTYPES = {FP32: "fp32", BF16: "bf16"}
_SDP_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def floats(*shape: int, dtype: torch.dtype = FP32, leaf: bool = True, nhwc: bool = False) -> Input:
    """Random numbers that require a gradient if `leaf`."""

    def make(device: torch.device | str) -> Tensor:
        tensor = torch.randn(shape, dtype=dtype, device=device)
        if nhwc:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor.requires_grad_(leaf)

    return make


def integers(high: int, *shape: int) -> Input:
    """Random numbers below `high`."""
    return lambda device: torch.randint(0, high, shape, device=device)


def booleans(*shape: int) -> Input:
    """True in about half of the places, and in the first of each row, so that no row is masked whole."""

    def make(device: torch.device | str) -> Tensor:
        mask = torch.randn(shape, device=device) > 0
        mask[..., 0] = True
        return mask

    return make


def _columns() -> Iterator[Case]:
    """The bias gradient of a Linear: a sum over rows; and other reductions."""
    for rows, width_in, width, dtype in (
        (4096, 1024, 1024, FP32),
        (4096, 1024, 4096, FP32),
        (65536, 256, 1024, FP32),
        (4096, 512, 30522, FP32),
        (512, 768, 50304, FP32),
        (8192, 1024, 3072, BF16),
    ):
        yield Case(
            name=f"linear with bias, {rows} rows, {width_in} to {width}, {_DTYPES[dtype]}",
            group="linear",
            make=partial(nn.Linear, width_in, width, dtype=dtype),
            inputs=(floats(rows, width_in, dtype=dtype),),
            toy_inputs=(floats(8, width_in, dtype=dtype),),
        )
    for name, function in (
        ("sum over rows, 16384 × 2048", lambda x: x.sum(0)),
        ("sum over columns, 16384 × 2048", lambda x: x.sum(1)),
        ("mean of all, 16384 × 2048", lambda x: x.mean()),
        ("variance of rows, 16384 × 2048", lambda x: x.var(0)),
    ):
        yield _function(name, "linear", function, floats(16384, 2048), toy=floats(16, 8))


def _matmuls() -> Iterator[Case]:
    group = "linear"
    for name, function, left, right in (
        ("mm of every other column", lambda a, b: a[:, ::2] @ b, (4096, 4096), (2048, 1024)),
        ("mm of a transpose", lambda a, b: a.T @ b, (2048, 4096), (2048, 1024)),
        ("mm of all columns but one", lambda a, b: a[:, 1:] @ b, (4096, 4096), (4095, 1024)),
    ):
        toy = tuple(floats(*(-(-size // 256) for size in shape)) for shape in (left, right))
        if "but one" in name:
            toy = (floats(16, 16), floats(15, 4))
        yield _function(name, group, function, floats(*left), floats(*right), toy=toy)
    yield _function(
        "matmul of a batch and a matrix expanded over it",
        group,
        lambda a, b: torch.bmm(a, b.expand(a.shape[0], -1, -1)),
        floats(16, 1024, 1024),
        floats(1, 1024, 512),
        toy=(floats(2, 8, 8), floats(1, 8, 4)),
    )
    yield _function(
        "bmm of transposed heads, bf16",
        group,
        lambda a, b: torch.bmm(a.transpose(0, 1), b.transpose(0, 1).transpose(1, 2)),
        floats(1024, 16, 64, dtype=BF16),
        floats(1024, 16, 64, dtype=BF16),
        toy=(floats(8, 2, 4, dtype=BF16), floats(8, 2, 4, dtype=BF16)),
    )


def _normalisations() -> Iterator[Case]:
    for rows, width, dtype in ((8192, 1024, FP32), (131072, 256, FP32), (8192, 4096, BF16)):
        for name, make in (("layer_norm", nn.LayerNorm), ("rms_norm", nn.RMSNorm)):
            yield Case(
                name=f"{name}, {rows} × {width}, {_DTYPES[dtype]}",
                group="normalisation",
                make=partial(make, width, dtype=dtype),
                inputs=(floats(rows, width, dtype=dtype),),
                toy_inputs=(floats(4, width, dtype=dtype),),
            )
    for dtype in (FP32, BF16):
        for layout in ("NCHW", "NHWC"):
            nhwc = layout == "NHWC"
            images = (floats(32, 256, 56, 56, dtype=dtype, nhwc=nhwc),)
            toy_images = (floats(2, 256, 4, 4, dtype=dtype, nhwc=nhwc),)
            for name, make in (("group_norm", partial(nn.GroupNorm, 32)), ("batch_norm", nn.BatchNorm2d)):
                yield Case(
                    name=f"{name}, 32 × 256 × 56 × 56, {layout}, {_DTYPES[dtype]}",
                    group="normalisation",
                    # as under autocast, where BatchNorm's weights stay in float32
                    make=partial(make, 256, dtype=FP32 if name == "batch_norm" else dtype),
                    inputs=images,
                    toy_inputs=toy_images,
                )


def _losses() -> Iterator[Case]:
    group = "losses"
    for dtype in (FP32, BF16):
        named = _DTYPES[dtype]
        rows, toy = floats(8192, 8192, dtype=dtype), floats(4, 8, dtype=dtype)
        yield _function(f"softmax, 8192 × 8192, {named}", group, lambda x: x.softmax(-1), rows, toy=toy)
        yield _function(f"log_softmax, 8192 × 8192, {named}", group, lambda x: x.log_softmax(-1), rows, toy=toy)
        yield _function(
            f"cross_entropy, 4096 × 50257, {named}",
            group,
            F.cross_entropy,
            floats(4096, 50257, dtype=dtype),
            integers(50257, 4096),
            toy=(floats(4, 8, dtype=dtype), integers(8, 4)),
        )
        yield _function(f"gelu, 8192 × 8192, {named}", group, F.gelu, rows, toy=toy)
        yield _function(f"dropout, 8192 × 8192, {named}", group, partial(F.dropout, p=0.1), rows, toy=toy)
    yield _function(
        "softmax of a transpose", group, lambda x: x.T.softmax(-1), floats(8192, 8192), toy=floats(4, 8)
    )
    yield _function(
        "cross_entropy of pixels, 8 × 21 × 256 × 256",
        group,
        F.cross_entropy,
        floats(8, 21, 256, 256),
        integers(21, 8, 256, 256),
        toy=(floats(1, 3, 4, 4), integers(3, 1, 4, 4)),
    )


def _attention() -> Iterator[Case]:
    for size in (64, 80, 128, 256):
        yield _sdpa(f"sdpa, causal, heads of {size}, bf16", _qkv(size), is_causal=True)
    yield _sdpa("sdpa, heads of 64, bf16", _qkv(64))
    yield _sdpa("sdpa, dropout, heads of 64, bf16", _qkv(64), dropout_p=0.1)
    yield _sdpa("sdpa, causal, heads of 64, fp32", _qkv(64, dtype=FP32), is_causal=True)
    yield _sdpa(
        "sdpa, 8 key heads for 32, bf16", _qkv(64, key_heads=8, heads=32), is_causal=True, enable_gqa=True
    )
    yield _sdpa("sdpa, bool mask, bf16", (*_qkv(64), booleans(8, 1, 1024, 1024)))
    yield _sdpa("sdpa, bool mask, fp32", (*_qkv(64, dtype=FP32), booleans(8, 1, 1024, 1024)))
    yield _sdpa("sdpa, learned bias, bf16", (*_qkv(64), floats(1, 16, 1024, 1024, dtype=BF16)))
    yield _sdpa("sdpa, 2000 tokens, causal, bf16", _qkv(64, tokens=2000), is_causal=True)
    for size in (64, 128):
        yield _kernel(
            f"flash kernel, heads of {size}", aten._scaled_dot_product_flash_attention, _qkv(size), 0.0, True
        )
        yield _kernel(
            f"cudnn kernel, heads of {size}",
            aten._scaled_dot_product_cudnn_attention,
            _qkv(size),
            None,
            True,
            0.0,
            True,
        )
        for dtype in (BF16, FP32):
            yield _kernel(
                f"efficient kernel, heads of {size}, {_DTYPES[dtype]}",
                aten._scaled_dot_product_efficient_attention,
                _qkv(size, dtype=dtype),
                None,
                True,
                0.0,
                True,
            )
    for dtype in (BF16, FP32):
        yield _kernel(
            f"math kernel, heads of 64, {_DTYPES[dtype]}",
            aten._scaled_dot_product_attention_math,
            _qkv(64, dtype=dtype),
            None,
            0.0,
            True,
        )


def _indexing() -> Iterator[Case]:
    group = "indexing"
    for tokens in (2048, 16384):
        for rows in (1000, 50257):
            yield Case(
                name=f"embedding, {tokens} tokens, {rows} × 768",
                group=group,
                make=partial(nn.Embedding, rows, 768),
                inputs=(integers(rows, 8, tokens // 8),),
                toy_inputs=(integers(rows, 2, 4),),
            )
    table = floats(65536, 256)
    toy = (floats(16, 4), integers(16, 8))
    yield _function("index of rows", group, lambda x, i: x[i], table, integers(65536, 32768), toy=toy)
    yield _function(
        "index_select of rows", group, lambda x, i: x.index_select(0, i), table, integers(65536, 32768), toy=toy
    )
    yield _function(
        "gather of columns",
        group,
        lambda x, i: x.gather(1, i),
        table,
        integers(256, 65536, 64),
        toy=(floats(4, 8), integers(8, 4, 2)),
    )
    rows = floats(4096, 8192)
    toy_rows = floats(4, 8)
    for name, function in (
        ("sort of rows", lambda x: x.sort(-1)[0]),
        ("topk of rows, 50", lambda x: x.topk(4 if x.shape[-1] == 8 else 50)[0]),
        ("cumsum of rows", lambda x: x.cumsum(-1)),
        ("cumsum over rows", lambda x: x.cumsum(0)),
        ("max of rows", lambda x: x.max(-1)[0]),
    ):
        yield _function(f"{name}, 4096 × 8192", group, function, rows, toy=toy_rows)
    flat = floats(8 * 1024 * 1024)
    yield _function("sort of 8 Mi numbers", group, lambda x: x.sort()[0], flat, toy=floats(8))
    yield _function("cumsum of 8 Mi numbers", group, lambda x: x.cumsum(0), flat, toy=floats(8))
    yield _function("nonzero, 4096 × 8192", group, torch.nonzero, booleans(4096, 8192), toy=booleans(4, 8))


def _convolutions() -> Iterator[Case]:
    """Kernel × layout × type; float32 with and without TF32."""
    shapes: dict[str, tuple[tuple[int, int, int], dict[str, int]]] = {
        "1×1, 256 to 64": ((32, 256, 56), {"out": 64, "kernel": 1}),
        "3×3, 64 to 64": ((32, 64, 56), {"out": 64, "kernel": 3, "padding": 1}),
        "3×3, 512 to 512": ((32, 512, 14), {"out": 512, "kernel": 3, "padding": 1}),
        "7×7 by 2, 3 to 64": ((32, 3, 224), {"out": 64, "kernel": 7, "padding": 3, "stride": 2}),
        "3×3 depthwise, 256": ((32, 256, 56), {"out": 256, "kernel": 3, "padding": 1, "groups": 256}),
        "3×3 in 32 groups, 256": ((32, 256, 56), {"out": 256, "kernel": 3, "padding": 1, "groups": 32}),
        "16×16 by 16, 3 to 768": ((32, 3, 224), {"out": 768, "kernel": 16, "stride": 16}),
    }
    for name, ((samples, channels, size), options) in shapes.items():
        for layout in ("NCHW", "NHWC"):
            for precision in (Precision.FP32, Precision.TF32, Precision.BF16):
                dtype = BF16 if precision is Precision.BF16 else FP32
                nhwc = layout == "NHWC"
                yield Case(
                    name=f"conv {name}, {samples} × {size} × {size}, {layout}, {precision}",
                    group="convolution",
                    make=partial(_convolution, channels, dtype=dtype, nhwc=nhwc, **options),
                    inputs=(floats(samples, channels, size, size, dtype=dtype, nhwc=nhwc),),
                    toy_inputs=(floats(1, channels, 16, 16, dtype=dtype, nhwc=nhwc),),
                    precision=precision,
                )


def _convolution(
    channels: int, *, out: int, kernel: int, dtype: torch.dtype, nhwc: bool, **options: int
) -> nn.Module:
    layer = nn.Conv2d(channels, out, kernel, bias=False, dtype=dtype, **options)
    return layer.to(memory_format=torch.channels_last) if nhwc else layer


def _recurrent() -> Iterator[Case]:
    for make in (nn.LSTM, nn.GRU):
        for layers, dropout in ((1, 0.0), (2, 0.2)):
            yield Case(
                name=f"{make.__name__}, {layers} layers, dropout {dropout}, 64 × 128 × 512 to 512",
                group="recurrent",
                make=partial(make, 512, 512, layers, dropout=dropout, batch_first=True),
                inputs=(floats(64, 128, 512),),
                toy_inputs=(floats(2, 3, 512),),
            )


def _optimizers() -> Iterator[Case]:
    shapes = [(4096, 1024), (1024, 4096), (1024,)] * 8 + [(50257, 1024)]
    weights = partial(_weights, shapes)
    adamw = torch.optim.AdamW
    for name, optimizer in (
        ("AdamW foreach", partial(adamw, foreach=True)),
        ("AdamW fused", partial(adamw, fused=True)),
        ("AdamW for-loop", partial(adamw, foreach=False)),
        ("SGD momentum foreach", partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4, foreach=True)),
        ("Adafactor", torch.optim.Adafactor),
    ):
        yield Case(
            name=f"{name}, 119 M parameters in 25",
            group="optimizer",
            make=weights,
            inputs=(),
            toy_inputs=None,
            optimizer=optimizer,
        )
    yield Case(
        name="foreach norm, 119 M numbers in 25",
        group="optimizer",
        make=weights,
        inputs=(),
        toy_inputs=None,
    )


def _weights(shapes: list[tuple[int, ...]]) -> nn.Module:
    return Function(
        lambda *tensors: nn.utils.get_total_norm([tensor.detach() for tensor in tensors]),
        *(nn.Parameter(torch.empty(shape)) for shape in shapes),
    )


def _function(
    name: str,
    group: str,
    function: Callable[..., Any],
    *inputs: Input,
    toy: Input | tuple[Input, ...] | None = None,
) -> Case:
    """A function without weights; without toy inputs it is rehearsed on its own."""
    toys = inputs if toy is None else toy if isinstance(toy, tuple) else (toy,)
    return Case(name=name, group=group, make=partial(Function, function), inputs=inputs, toy_inputs=toys)


def _qkv(
    size: int,
    *,
    tokens: int = 1024,
    heads: int = 16,
    key_heads: int | None = None,
    dtype: torch.dtype = BF16,
) -> tuple[Input, ...]:
    """Queries, keys and values (B, heads, T, D), as a projection leaves them: heads beside each other."""

    def of(count: int) -> Input:
        def make(device: torch.device | str) -> Tensor:
            packed = torch.randn(8, tokens, count, size, dtype=dtype, device=device)
            return packed.transpose(1, 2).requires_grad_()

        return make

    shared = of(heads if key_heads is None else key_heads)
    return of(heads), shared, shared


def _sdpa(name: str, inputs: tuple[Input, ...], **options: Any) -> Case:
    """What torch chooses, and its name."""
    attend = partial(F.scaled_dot_product_attention, **options)

    def chosen(tensors: tuple[Tensor, ...]) -> str:
        choice = torch._fused_sdp_choice(*tensors, **options)
        return f"torch chooses {_SDP_BACKENDS.get(int(choice), choice)}"

    return Case(
        name=name,
        group="attention",
        make=partial(Function, attend),
        inputs=inputs,
        toy_inputs=None,
        note=chosen,
    )


def _kernel(name: str, kernel: Any, inputs: tuple[Input, ...], *options: Any) -> Case:
    """One kernel, called directly; its first result is the attention's."""
    return Case(
        name=name,
        group="attention",
        make=partial(Function, lambda *tensors: _first(kernel(*tensors, *options))),
        inputs=inputs,
        toy_inputs=None,
    )


def _first(results: tuple[Tensor, ...]) -> Tensor:
    return results[0]


CASES: tuple[Case, ...] = (
    *_columns(),
    *_matmuls(),
    *_normalisations(),
    *_losses(),
    *_attention(),
    *_indexing(),
    *_recurrent(),
    *_optimizers(),
    *_convolutions(),
)
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES))
assert len({case.name for case in CASES}) == len(CASES)
