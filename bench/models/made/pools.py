"""The weights of a made model, drawn from pools of quantized units."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from bench.models.quantizer import load_quantizer

Fill = Callable[[np.random.Generator], NDArray[np.float64]]

UNIT = 256  # elements per pool unit: one K-quant block, eight blocks of the 32-element types
POOL_UNITS = 1 << 15
PIECE_BYTES = 16 << 20  # what is held in memory and written at a time


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: F32 ones are made whole, by `fill` if given; the others are drawn from a pool."""

    name: str
    dims: tuple[int, ...]  # slowest first
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32
    std: float = 0.0
    mean: float = 0.0
    fill: Fill | None = None

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.qtype]
        return math.prod(self.dims) // block * int(size)


class Pools:
    """Quantized units of normal weights, one pool per tensor type, deviation and mean."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.cache: dict[tuple[GGMLQuantizationType, float, float], NDArray[np.uint8]] = {}
        self.quantize = load_quantizer()

    def get(self, qtype: GGMLQuantizationType, std: float, mean: float) -> NDArray[np.uint8]:
        """The pool as rows of bytes, one unit of 256 elements per row."""
        key = (qtype, std, mean)
        if key not in self.cache:
            rng = self.rng(f"pool {int(qtype)} {std} {mean}")
            weights = rng.standard_normal((POOL_UNITS, UNIT), dtype=np.float32)
            weights *= np.float32(std)
            weights += np.float32(mean)
            block, size = GGML_QUANT_SIZES[qtype]
            pool = np.empty((POOL_UNITS, UNIT // block * size), np.uint8)
            self.quantize(int(qtype), weights.ctypes.data, pool.ctypes.data, 0, POOL_UNITS, UNIT, None)
            self.cache[key] = pool
        return self.cache[key]

    def rng(self, name: str) -> np.random.Generator:
        """A generator of its own per tensor: a tensor does not depend on the ones written before it."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def pieces(self, tensor: Tensor) -> Iterator[NDArray[Any]]:
        """The tensor's data in pieces, each valid until the next: memory use does not depend on its size."""
        rng = self.rng(tensor.name)
        if tensor.qtype == GGMLQuantizationType.F32:
            values = tensor.fill(rng) if tensor.fill else rng.normal(tensor.mean, tensor.std, tensor.dims)
            yield np.ascontiguousarray(values, dtype=np.float32)
            return
        pool = self.get(tensor.qtype, tensor.std, tensor.mean)
        left = tensor.nbytes // pool.shape[1]
        buffer = np.empty((min(left, PIECE_BYTES // pool.shape[1]), pool.shape[1]), np.uint8)
        while left:
            piece = buffer[:left]
            # "clip" lets numpy write straight into `out`; the indices are always in range.
            np.take(pool, rng.integers(0, len(pool), len(piece)), axis=0, out=piece, mode="clip")
            yield piece
            left -= len(piece)
