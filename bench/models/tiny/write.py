"""Writes a tiny model: checks what was asked for, and picks the sizes that suit it."""

from __future__ import annotations

from pathlib import Path

from . import heads as head_archs
from .model import TinyModel
from .trunks import BUILDERS

QUANTS: tuple[str, ...] = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "mixed")

# Row length that every listed quantization divides, and the shorter one that serves the rest.
_K_ROW, _SHORT_ROW = 256, 128
_NEXTN = ("qwen35moe", "glm4moe", "deepseek2")

ARCHES: tuple[str, ...] = tuple(BUILDERS)


def write_tiny(
    path: Path,
    arch: str,
    quant: str | None = None,
    *,
    shards: int = 1,
    seed: int = 0,
    n_layer: int = 3,
    n_expert: int = 8,
    n_used: int = 2,
    n_embd: int | None = None,
    n_ff: int | None = None,
    nextn: bool = False,
    scripted: bool = False,
) -> Path:
    """Write a tiny model and return the file to open: `path`, or the first of its shards.

    `quant` applies to the experts and the other matrices; norms, routers and biases stay F32. It
    defaults to F32, for gpt-oss to MXFP4. `n_embd` and the expert width `n_ff` default to the
    shortest rows that suit `quant`. `nextn` appends a multi-token-prediction block, which llama.cpp
    leaves unread. Shards hold whole blocks: with as many shards as blocks, each has its own file. `scripted`: a
    token's routes follow from its id, see `scripted_routes` (for architectures with a plain router, qwen3moe).
    """
    if quant is None:
        quant = "MXFP4" if arch == "gpt-oss" else "F32"
    if arch not in BUILDERS:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(ARCHES)}")
    if quant not in QUANTS:
        raise ValueError(f"unknown quantization {quant!r}; known: {', '.join(QUANTS)}")
    if nextn and arch not in _NEXTN:
        raise ValueError(f"{arch} has no nextn block")
    if n_layer < 2:
        # Too few for a leading dense block to leave any experts, and for gemma4 to load at all.
        raise ValueError(f"n_layer={n_layer}; at least 2")
    if not 1 <= shards <= n_layer + nextn:
        raise ValueError(f"{shards} shards for {n_layer + nextn} blocks")
    row = _K_ROW if quant in ("Q4_K", "Q6_K", "mixed") else _SHORT_ROW
    n_embd, n_ff = n_embd or row, n_ff or row
    model = TinyModel(path, arch, quant, shards, seed, n_layer, n_expert, n_used, n_embd, n_ff, nextn)
    model.scripted = scripted
    return model.write(BUILDERS[arch])


def write_tiny_mtp(path: Path, arch: str, quant: str = "F32", heads: int = 1) -> Path:
    """A tiny model with `heads` heads; only hy_v3, mimo2 and step35 may have several."""
    if arch in head_archs.BUILDERS:
        builder, layers, own_heads = head_archs.BUILDERS[arch]
        return TinyModel(path, arch, quant, 1, 0, layers, 8, 2, 128, 128, heads, own_heads=own_heads).write(builder)
    assert heads == 1
    return write_tiny(path, arch, quant, nextn=True)
