"""A tiny qwen3moe GGUF with random weights, written by hand: F32, and Q4_K experts for the tiled kernel."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

LAYERS, EMBD, HEADS, KV_HEADS, EXPERTS, USED, FF = 2, 256, 4, 2, 8, 2, 512
ROOM = 512  # positions of the context
F32, Q4_K = 0, 12
Q4_K_BLOCK, Q4_K_BYTES = 256, 144
NUMBERS: dict[str, tuple[int, str, int | float | bool]] = {
    "u8": (0, "<B", 200), "i8": (1, "<b", -100), "u16": (2, "<H", 60_000), "i16": (3, "<h", -30_000),
    "u32": (4, "<I", 4_000_000_000), "i32": (5, "<i", -2_000_000_000), "f32": (6, "<f", 0.5), "bool": (7, "<?", True),
    "u64": (10, "<Q", 1 << 40), "i64": (11, "<q", -(1 << 40)), "f64": (12, "<d", 0.1),
}  # fmt: skip
"""One key of each type, `bmoe.NAME`, to see whether the parser gives them back: GGUF's number, format, value."""

Shape = tuple[int, ...]
"""Slowest dimension first."""


def _text(s: str) -> bytes:
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _u32(name: str, value: int) -> bytes:
    return _key(name, 4, struct.pack("<I", value))


def _texts(name: str, values: Sequence[str]) -> bytes:
    return _key(name, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(_text, values)))


def _vocabulary() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [*(chr(b) if b in printable else chr(next(spare)) for b in range(256)), "Ġt", "<|end|>"]


def _keys(used: int) -> list[bytes]:
    arch, words = "qwen3moe", _vocabulary()
    numbers = {
        "block_count": LAYERS, "context_length": ROOM, "embedding_length": EMBD, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "expert_count": EXPERTS,
        "expert_used_count": used, "expert_feed_forward_length": FF, "attention.key_length": EMBD // HEADS,
        "attention.value_length": EMBD // HEADS,
    }  # fmt: skip
    keys = [_key("general.architecture", 8, _text(arch))]
    keys += [_u32(f"{arch}.{name}", n) for name, n in numbers.items()]
    keys.append(_key(f"{arch}.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-6)))
    keys.append(_key("tokenizer.ggml.model", 8, _text("gpt2")))
    keys.append(_key("tokenizer.ggml.pre", 8, _text("gpt-2")))
    keys += [_texts("tokenizer.ggml.tokens", words), _texts("tokenizer.ggml.merges", ["Ġ t"])]
    types = struct.pack(f"<IQ{len(words)}i", 5, len(words), *([1] * (len(words) - 1)), 3)
    keys.append(_key("tokenizer.ggml.token_type", 9, types))
    keys.append(_u32("tokenizer.ggml.eos_token_id", len(words) - 1))
    keys += [_key(f"bmoe.{name}", kind, struct.pack(form, value)) for name, (kind, form, value) in NUMBERS.items()]
    keys.append(_key("bmoe.array", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)))
    return keys


def _tensors() -> dict[str, tuple[Shape, int, float]]:
    """Shape, type and standard deviation of each tensor; 0: a norm."""
    n, words, head = EMBD, len(_vocabulary()), EMBD // HEADS
    wide = 1.5 / n**0.5
    found: dict[str, tuple[Shape, int, float]] = {"token_embd.weight": ((words, n), F32, 1.0)}
    for il in range(LAYERS):
        b = f"blk.{il}."
        for name, size in (("attn_norm", n), ("ffn_norm", n), ("attn_q_norm", head), ("attn_k_norm", head)):
            found[f"{b}{name}.weight"] = ((size,), F32, 0.0)
        for name, rows in (("q", n), ("k", KV_HEADS * head), ("v", KV_HEADS * head), ("output", n)):
            found[f"{b}attn_{name}.weight"] = ((rows, n), F32, wide)
        found[f"{b}ffn_gate_inp.weight"] = ((EXPERTS, n), F32, wide)
        for name, rows, cols in (("gate", FF, n), ("up", FF, n), ("down", n, FF)):
            found[f"{b}ffn_{name}_exps.weight"] = ((EXPERTS, rows, cols), Q4_K, wide)
    found["output_norm.weight"] = ((n,), F32, 0.0)
    found["output.weight"] = ((words, n), F32, 3.0 / n**0.5)
    return found


def _data(rng: np.random.Generator, shape: Shape, kind: int, std: float) -> bytes:
    if kind == F32:
        values = rng.standard_normal(shape, np.float32) * np.float32(std) if std else np.ones(shape, np.float32)
        return values.astype("<f4").tobytes()
    blocks: npt.NDArray[np.uint8] = rng.integers(
        0, 256, (int(np.prod(shape)) // Q4_K_BLOCK, Q4_K_BYTES), dtype=np.uint8
    )
    # A value is d * scale * quant - dmin * min, of 6, 4 and 6 random bits: these scales give a mean near 0.
    d = std / 200
    blocks[:, :4] = np.frombuffer(struct.pack("<ee", d, 7.5 * d), np.uint8)
    return blocks.tobytes()


def write_tiny(path: Path, used: int = USED, shards: int = 1, seed: int = 0) -> Path:
    """Writes the model, in `shards` files; the path of the first. `used`: experts for each token, as the file says."""
    rng, keys, tensors = np.random.default_rng(seed), _keys(used), list(_tensors().items())
    data = [_data(rng, *spec) for _, spec in tensors]
    each = -(-len(tensors) // shards)
    paths = [path.with_name(f"{path.stem}-{i + 1:05}-of-{shards:05}.gguf") for i in range(shards)]
    for i, shard in enumerate(paths if shards > 1 else [path]):
        own = range(i * each, min((i + 1) * each, len(tensors)))
        head = keys if i == 0 else []
        if shards > 1:
            split = (("no", 2, "<H", i), ("count", 2, "<H", shards), ("tensors.count", 5, "<i", len(tensors)))
            head = [*head, *(_key(f"split.{name}", kind, struct.pack(form, v)) for name, kind, form, v in split)]
        infos, at = [], 0
        for k in own:
            name, (shape, kind, _) = tensors[k]
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos.append(_text(name) + dims + struct.pack("<IQ", kind, at))
            at += len(data[k]) + -len(data[k]) % 32
        start = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(head)) + b"".join(head) + b"".join(infos)
        body = b"".join(data[k] + bytes(-len(data[k]) % 32) for k in own)
        shard.write_bytes(start + bytes(-len(start) % 32) + body)
    return paths[0] if shards > 1 else path
