"""Matrix products on a GPU: FLOPs with those that tiles and waves waste."""

from __future__ import annotations

from functools import lru_cache

TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 1.5), (64, 64, 2.0), (64, 32, 2.8))
"""Rows and columns that one multiprocessor computes at a time, and its time per FLOP relative to the largest
tile.

Sizes: NVIDIA, "Matrix Multiplication Background User's Guide", tile quantization. A smaller tile loads more per
FLOP: (m + n) / (m · n) elements, 1.5 times as many in the third, 2 and 3 in the others, relative to 128 × 128.
Fitted to 777 training steps on an RTX 3090 they are 1.6, 2.0 and 2.8 (benchmarks/times/fit.py).
"""

SPLITS = (1, 2, 4, 8, 16, 32)
"""Parts of the inner dimension that separate multiprocessors sum. CUTLASS, "Efficient GEMM in CUDA",
parallelized reductions."""

LEAST_SPLIT = 256
"""Least number of inner elements of a part. Assumed, not measured."""

INNER_STEP = 32
"""Elements of the inner dimension that a tile loads at a time, as most of CUTLASS's kernels for half types."""


@lru_cache(1 << 16)
def tiled_flops(products: int, rows: int, columns: int, inner: int, sm_count: int) -> float:
    """FLOPs of the fastest tiling of (rows, inner) × (inner, columns), with padding and idle processors.

    The last tile of each dimension is padded to its size (tile quantization), and the last wave of tiles takes
    as long as a full one (wave quantization).

    `products` counts the independent products of one call. The result is at least 2 · products · rows · columns
    · inner.
    """
    best = float("inf")
    for long, short, slowdown in TILES:
        for tile_rows, tile_columns in {(long, short), (short, long)}:
            tiles = products * -(-rows // tile_rows) * -(-columns // tile_columns)
            for split in SPLITS:
                part = -(-inner // split)
                if split > 1 and part < LEAST_SPLIT:
                    break
                waves = -(-tiles * split // sm_count)
                depth = -(-part // INNER_STEP) * INNER_STEP
                best = min(best, 2.0 * waves * sm_count * tile_rows * tile_columns * depth * slowdown)
    return best
