"""Write random-weight GGUF files with the real shapes of public Mixture-of-Experts models, for benchmarks.

    python bench/models/make_model.py qwen3-30b-a3b --layers 12 --out FILE [--router uniform|zipf] [--seed 0]
    python bench/models/make_model.py qwen3.6-35b-a3b --layers 4 --mtp --out FILE

The files load in stock llama.cpp, take text prompts, and have the sizes, tensor types and layout of the
model they are named after; what they say is noise. Weights are normal with a standard deviation of
1/sqrt(fan_in): a pool of quantized units is made once per tensor type, and each tensor is a fresh random
sequence of those units, so no two experts are alike and the disk, not the quantizer, sets the speed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from numpy.typing import NDArray

Fill = Callable[[np.random.Generator], NDArray[np.float64]]

_T = GGMLQuantizationType
F32, Q8_0, Q4_K, Q6_K, MXFP4 = _T.F32, _T.Q8_0, _T.Q4_K, _T.Q6_K, _T.MXFP4

UNIT = 256  # elements per pool unit: one K-quant block, eight blocks of the 32-element types
POOL_UNITS = 1 << 15
PIECE_BYTES = 16 << 20  # what is held in memory and written at a time
FILE_TYPES = {"q4_k_m": 15, "mxfp4": 38}  # llama.cpp's numbers for general.file_type

# The zipf router needs an input that is the same for every token. On models whose router has no bias, every
# element of every embedding gets this mean (the rms stays 1), and the residual stream carries it along.
COMMON_MEAN = 0.25
# No expert may be wanted by more than this share of the tokens: a Zipf head would ask for more than all.
MAX_POPULARITY = 0.95
OUTPUT_GAIN = 2.5  # spread of the logits: random weights would give 1, trained models have 2 to 3
# Attention keeps what tokens have in common and averages the rest away. At full strength the common part
# takes over with depth, and even the uniform router comes to prefer some experts.
ATTN_GAIN = 0.25


class MakeModelError(Exception):
    """A request that cannot be honoured; the message is one line."""


@dataclass(frozen=True)
class Shape:
    """The numbers of one public model."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_used: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    eps: float
    special_at: int
    pre: str  # the tokenizer's splitting rule
    quants: tuple[str, ...] = ("q4_k_m", "mxfp4")
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # first the start of text
    eos: str = "<|im_end|>"
    turn: str = "<|im_start|>{role}\n{text}<|im_end|>\n"
    growth: float = 0.0  # mean square that a layer adds to the residual stream (measured, zipf router)
    full_attn_every: int = 0  # the other layers are gated delta nets, which have the next three
    n_key_heads: int = 0
    n_value_heads: int = 0
    state_dim: int = 0
    nextn: int = 0  # multi-token-prediction blocks, after the other layers
    keys: dict[str, Any] = field(default_factory=dict)  # metadata by the name of the writer's method


HARMONY = "startoftext endoftext reserved_200000 reserved_200001 return constrain reserved_200004 channel"
# fmt: off
SHAPES = {
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe", n_layer=48, n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_expert=128,
        n_used=8, n_ff=768, n_vocab=151936, n_ctx=40960, rope_base=1e6, eps=1e-6, growth=0.09,
        special_at=151643, pre="qwen2", keys={"feed_forward_length": 6144},
    ),
    "qwen3.6-35b-a3b": Shape(
        arch="qwen35moe", n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, head_dim=256, n_expert=256,
        n_used=8, n_ff=512, n_vocab=248320, n_ctx=262144, rope_base=1e7, eps=1e-6, growth=0.2,
        full_attn_every=4, n_key_heads=16, n_value_heads=32, state_dim=128, special_at=248044, pre="qwen35",
        keys={
            "full_attention_interval": 4, "rope_dimension_count": 64,
            "rope_dimension_sections": [11, 11, 10, 0], "ssm_conv_kernel": 4, "ssm_state_size": 128,
            "ssm_group_count": 16, "ssm_time_step_rank": 32, "ssm_inner_size": 32 * 128,
        },
    ),
    "gpt-oss-120b": Shape(
        arch="gpt-oss", n_layer=36, n_embd=2880, n_head=64, n_head_kv=8, head_dim=64, n_expert=128,
        n_used=4, n_ff=2880, n_vocab=201088, n_ctx=131072, rope_base=150000.0, eps=1e-5,
        special_at=199998, pre="gpt-4o", quants=("mxfp4",), eos="<|return|>",
        special=tuple(f"<|{name}|>" for name in [*HARMONY.split(), "start", "end", "message"]),
        turn="<|start|>{role}<|message|>{text}<|end|>",
        keys={
            "feed_forward_length": 2880, "sliding_window": 128, "rope_scaling_type": RopeScalingType.YARN,
            "rope_scaling_factor": 32.0, "rope_scaling_orig_ctx_len": 4096,
        },
    ),
}
# fmt: on


@dataclass(frozen=True)
class ModelInfo:
    """What was written: `expert_bytes` is the routed experts' weights, `dense_bytes` all other tensors."""

    path: Path
    bytes: int
    dense_bytes: int
    expert_bytes: int
    layers: int
    n_expert: int
    n_used: int
    quant: str
    router: str


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: F32 ones are made whole, by `fill` if given; the others are drawn from a pool."""

    name: str
    dims: tuple[int, ...]  # slowest first
    qtype: GGMLQuantizationType = F32
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
        self.quantize = _load_quantizer()

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
        if tensor.qtype == F32:
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


def _load_quantizer() -> Callable[..., int]:
    """ggml's own quantizer, from the installed llama-cpp-python (found without importing it)."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise MakeModelError("llama-cpp-python is not installed here: its libggml-base has the quantizer")
    quantize = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so")).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return quantize


def more_bits(layer: int, n_layer: int) -> bool:
    """Whether Q4_K_M has this layer's value and down weights in Q6_K: both ends, every third between."""
    first, last = n_layer // 8, n_layer * 7 // 8
    return not first <= layer < last or layer in range(first + 2, last, 3)


def popularity(n_expert: int, n_used: int, s: float) -> NDArray[np.float64]:
    """Share of tokens that use each expert, most popular first: Zipf, with the head held at the maximum."""
    zipf = np.arange(1, n_expert + 1, dtype=np.float64) ** -s
    share = np.minimum(zipf * n_used / zipf.sum(), MAX_POPULARITY)
    while share.sum() < n_used * (1 - 1e-9):
        free = share < MAX_POPULARITY
        spare = n_used - share[~free].sum()
        share[free] = np.minimum(zipf[free] * spare / zipf[free].sum(), MAX_POPULARITY)
    return np.asarray(share)


@dataclass(frozen=True)
class Plan:
    """The tensors of one file, from its shape, quantization and router."""

    shape: Shape
    quant: str
    zipf_s: float | None  # None: the uniform router

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, in the order of the file."""
        s, q4 = self.shape, self.quant == "q4_k_m"
        # gpt-oss has router biases, so its zipf router needs nothing from the residual stream.
        mean = COMMON_MEAN if self.zipf_s is not None and s.arch != "gpt-oss" else 0.0
        vocab = (s.n_vocab, s.n_embd)
        yield Tensor("token_embd.weight", vocab, Q4_K if q4 else Q8_0, math.sqrt(1 - mean**2), mean)
        for layer in range(s.n_layer + s.nextn):
            better = more_bits(layer, s.n_layer)
            yield Tensor(f"blk.{layer}.attn_norm.weight", (s.n_embd,), mean=1.0)
            if s.full_attn_every and (layer + 1) % s.full_attn_every and layer < s.n_layer:
                yield from self._delta_net(f"blk.{layer}.", better)
            else:
                yield from self._attention(f"blk.{layer}.", better)
            yield from self._experts(f"blk.{layer}.", better, layer)
            if layer >= s.n_layer:
                yield self._weight(f"blk.{layer}.nextn.eh_proj.weight", s.n_embd, 2 * s.n_embd)
                for part in ("enorm", "hnorm", "shared_head_norm"):
                    yield Tensor(f"blk.{layer}.nextn.{part}.weight", (s.n_embd,), mean=1.0)
        yield Tensor("output_norm.weight", (s.n_embd,), mean=1.0)
        yield Tensor("output.weight", vocab, Q6_K if q4 else Q8_0, OUTPUT_GAIN / math.sqrt(s.n_embd))

    def _weight(self, name: str, *dims: int, better: bool = False, gain: float = 1.0) -> Tensor:
        high, low = (Q6_K, Q4_K) if self.quant == "q4_k_m" else (Q8_0, MXFP4)
        if self.quant == "mxfp4":  # the experts alone are in the small type
            better = "_exps." not in name
        return Tensor(name, dims, high if better else low, gain / math.sqrt(dims[-1]))

    def _attention(self, blk: str, better: bool) -> Iterator[Tensor]:
        s = self.shape
        q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        gated = 2 if s.arch == "qwen35moe" else 1  # the query projection also makes the output gate
        yield self._weight(f"{blk}attn_q.weight", q * gated, s.n_embd)
        yield self._weight(f"{blk}attn_k.weight", kv, s.n_embd)
        yield self._weight(f"{blk}attn_v.weight", kv, s.n_embd, better=better)
        yield self._weight(f"{blk}attn_output.weight", s.n_embd, q, gain=ATTN_GAIN)
        if s.arch == "gpt-oss":
            for name, size in (("q", q), ("k", kv), ("v", kv), ("output", s.n_embd)):
                yield Tensor(f"{blk}attn_{name}.bias", (size,), std=0.02)
            yield Tensor(f"{blk}attn_sinks.weight", (s.n_head,), std=1.0)
        else:
            yield Tensor(f"{blk}attn_q_norm.weight", (s.head_dim,), mean=1.0)
            yield Tensor(f"{blk}attn_k_norm.weight", (s.head_dim,), mean=1.0)

    def _delta_net(self, blk: str, better: bool) -> Iterator[Tensor]:
        s, heads = self.shape, self.shape.n_value_heads
        values = heads * s.state_dim
        mixed = 2 * s.n_key_heads * s.state_dim + values
        yield self._weight(f"{blk}attn_qkv.weight", mixed, s.n_embd, better=better)
        yield self._weight(f"{blk}attn_gate.weight", values, s.n_embd)
        yield Tensor(f"{blk}ssm_conv1d.weight", (mixed, 4), std=0.5)
        # The softplus of these biases, the time step, is spread evenly over the decades from 0.001 to 0.1.
        steps: Fill = lambda rng: np.log(np.expm1(10 ** rng.uniform(-3.0, -1.0, heads)))  # noqa: E731
        yield Tensor(f"{blk}ssm_dt.bias", (heads,), fill=steps)
        yield Tensor(f"{blk}ssm_a", (heads,), fill=lambda rng: -rng.uniform(1.0, 16.0, heads))
        for name in ("beta", "alpha"):
            yield Tensor(f"{blk}ssm_{name}.weight", (heads, s.n_embd), std=1 / math.sqrt(s.n_embd))
        yield Tensor(f"{blk}ssm_norm.weight", (s.state_dim,), mean=1.0)
        yield self._weight(f"{blk}ssm_out.weight", s.n_embd, values, gain=ATTN_GAIN)

    def _experts(self, blk: str, better: bool, layer: int) -> Iterator[Tensor]:
        s = self.shape
        norm = "ffn_norm" if s.arch == "qwen3moe" else "post_attention_norm"
        yield Tensor(f"{blk}{norm}.weight", (s.n_embd,), mean=1.0)
        router = (s.n_expert, s.n_embd)
        yield Tensor(f"{blk}ffn_gate_inp.weight", router, fill=lambda rng: self._router(rng, layer))
        for name in ("gate", "up", "down"):
            rows, columns = (s.n_embd, s.n_ff) if name == "down" else (s.n_ff, s.n_embd)
            high = better and name == "down"
            yield self._weight(f"{blk}ffn_{name}_exps.weight", s.n_expert, rows, columns, better=high)
            if s.arch == "gpt-oss":
                yield Tensor(f"{blk}ffn_{name}_exps.bias", (s.n_expert, rows), std=0.1)
            if s.arch == "qwen35moe":
                yield self._weight(f"{blk}ffn_{name}_shexp.weight", rows, columns, better=high)
        if s.arch == "qwen35moe":
            yield Tensor(f"{blk}ffn_gate_inp_shexp.weight", (s.n_embd,), std=1 / math.sqrt(s.n_embd))
        if s.arch == "gpt-oss":
            yield Tensor(f"{blk}ffn_gate_inp.bias", (s.n_expert,), fill=self._offsets)

    def _offsets(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Router offsets, in deviations of the logits, that give popularities shuffled anew in each layer.

        Many independent normal logits make the bar for the top few nearly constant, so an expert offset by
        the normal quantile of its share clears the bar at about that share.
        """
        s = self.shape
        if self.zipf_s is None:
            return np.zeros(s.n_expert)
        quantile = NormalDist().inv_cdf
        return rng.permutation(np.array([quantile(p) for p in popularity(s.n_expert, s.n_used, self.zipf_s)]))

    def _router(self, rng: np.random.Generator, layer: int) -> NDArray[np.float64]:
        s = self.shape
        weight = rng.normal(0.0, 1 / math.sqrt(s.n_embd), (s.n_expert, s.n_embd))
        # A head's first projection is random: the common mean does not get through to its router.
        if self.zipf_s is None or s.arch == "gpt-oss" or layer >= s.n_layer:
            return weight
        # The router's own noise must not read the common mean: only the offsets do.
        weight -= weight.mean(axis=1, keepdims=True)
        # The norm before the router divides the mean by the rms of the residual stream at this depth.
        seen = COMMON_MEAN / math.sqrt(1 + s.growth * (layer + 0.5))
        return weight + self._offsets(rng)[:, None] / (seen * s.n_embd)


def vocabulary(shape: Shape) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: bytes, a few merged pairs, made-up words, control tokens."""
    # Byte-level BPE writes each byte as a visible character: its own if it has one, else one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    tokens = [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]
    space = tokens[ord(" ")]
    merges = [f"{a} {b}" for a, b in ("th", "in", "er", "an", "on", "re", "ou", "st", "en")]
    merges += ["th e", "an d", "in g", f"{space} the", f"{space} and", f"{space} a"]
    tokens += [merge.replace(" ", "") for merge in merges]
    syllables = [a + b for a in "bdfghjklmnprtvwz" for b in "aeiou"]
    ends = ["", *syllables]  # three syllables once the two-syllable words are used up
    words = (space + a + b + c for c in ends for b in syllables for a in syllables)
    first = min(shape.special_at, shape.n_vocab - len(shape.special))
    tokens += [*islice(words, first - len(tokens)), *shape.special]
    tokens += islice(words, shape.n_vocab - len(tokens))
    types = [int(TokenType.NORMAL)] * len(tokens)
    types[first : first + len(shape.special)] = [int(TokenType.CONTROL)] * len(shape.special)
    return tokens, types, merges


def _metadata(writer: GGUFWriter, s: Shape, name: str, quant: str) -> None:
    tokens, types, merges = vocabulary(s)
    turn = s.turn.format(role="{{ m.role }}", text="{{ m.content }}")
    start = s.turn.partition("{text}")[0].format(role="assistant")
    loop = "{% for m in messages %}" + turn + "{% endfor %}"
    # fmt: off
    values = {
        "name": f"{name} (random weights)", "file_type": FILE_TYPES[quant], "quantization_version": 2,
        "block_count": s.n_layer + s.nextn, "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "head_count": s.n_head, "head_count_kv": s.n_head_kv, "key_length": s.head_dim,
        "value_length": s.head_dim, "layer_norm_rms_eps": s.eps, "rope_freq_base": s.rope_base,
        "expert_count": s.n_expert, "expert_used_count": s.n_used, "expert_feed_forward_length": s.n_ff,
        **({"expert_shared_feed_forward_length": s.n_ff} if s.arch == "qwen35moe" else {}), **s.keys,
        **({"nextn_predict_layers": s.nextn} if s.nextn else {}),
        "tokenizer_model": "gpt2", "tokenizer_pre": s.pre, "token_list": tokens, "token_types": types,
        "token_merges": merges, "bos_token_id": tokens.index(s.special[0]),
        "eos_token_id": tokens.index(s.eos), "pad_token_id": tokens.index("<|endoftext|>"),
        "add_bos_token": False,
        "chat_template": loop + "{% if add_generation_prompt %}" + start + "{% endif %}",
    }
    # fmt: on
    for method, value in values.items():
        getattr(writer, f"add_{method}")(value)


def _scaled(s: Shape, scale: int) -> Shape:
    """The shape with its main sizes divided, within what is valid."""
    n_embd, n_head = max(256, s.n_embd // scale // 256 * 256), max(4, s.n_head // scale)
    n_vocab, n_expert = max(1024, s.n_vocab // scale), max(4 * s.n_used, s.n_expert // scale)
    return replace(s, n_embd=n_embd, n_head=n_head, n_head_kv=2, n_expert=n_expert, n_ff=256, n_vocab=n_vocab)


def make_model(
    path: str | os.PathLike[str],
    shape: str = "qwen3-30b-a3b",
    layers: int | None = 12,
    router: str = "uniform",
    zipf_s: float = 1.0,
    seed: int = 0,
    quant: str | None = None,
    *,
    scale: int = 1,
    mtp: bool = False,
    force: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> ModelInfo:
    """Write one model file and say what is in it. It appears under its name only when it is whole.

    No `layers` is all of them, no `quant` the model's own; `scale` divides the sizes, for tests; `mtp` adds a
    multi-token-prediction block, whose router is uniform; `progress` gets the bytes done and the bytes in all.
    """
    path, full = Path(path), SHAPES.get(shape)
    if full is None:
        raise MakeModelError(f"unknown model {shape!r}: choose from {', '.join(SHAPES)}")
    quant = full.quants[0] if quant is None else quant
    if quant not in full.quants:
        raise MakeModelError(f"{shape} has no quantization {quant!r}: choose from {', '.join(full.quants)}")
    if router not in ("uniform", "zipf"):
        raise MakeModelError(f"unknown router {router!r}: choose from uniform, zipf")
    if mtp and full.arch != "qwen35moe":
        raise MakeModelError(f"{shape} has no multi-token-prediction block: --mtp is for qwen3.6-35b-a3b")
    sizes = replace(full, n_layer=full.n_layer if layers is None else layers, nextn=int(mtp))
    if not 1 <= sizes.n_layer <= full.n_layer:
        raise MakeModelError(f"{shape} can have 1 to {full.n_layer} layers, not {layers}")
    if not 0 < zipf_s <= 4 or seed < 0 or scale < 1:
        raise MakeModelError("out of range: the zipf exponent is in (0, 4], the seed at least 0")
    if path.exists() and not (force and path.is_file()):
        raise MakeModelError(f"{path} exists" + (": give --force to replace it" if path.is_file() else ""))
    if not path.parent.is_dir():
        raise MakeModelError(f"{path.parent} is not a folder")
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a run that was killed
    sizes = _scaled(sizes, scale) if scale > 1 else sizes
    tensors = list(Plan(sizes, quant, zipf_s if router == "zipf" else None).tensors())
    total = sum(tensor.nbytes for tensor in tensors)
    need, free = (total + 32 * sizes.n_vocab) / 2**30, shutil.disk_usage(path.parent).free / 2**30
    if need > free:
        raise MakeModelError(f"{path} needs {need:.1f} GiB and the disk has {free:.1f} GiB free")
    writer, pools, done = GGUFWriter(partial, sizes.arch), Pools(seed), 0
    try:
        _metadata(writer, sizes, shape, quant)
        for tensor in tensors:
            # Any dtype but uint8, which would have the writer read the shape as bytes.
            writer.add_tensor_info(tensor.name, tensor.dims, np.dtype("f4"), tensor.nbytes, tensor.qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        out = writer.fout[0]
        writer.write_padding(out, out.tell())
        for tensor in tensors:
            # Not write_tensor_data: it wants the whole tensor in memory, and some take 600 MB.
            for piece in pools.pieces(tensor):
                out.write(piece.data)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            writer.write_padding(out, tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())
        os.replace(partial, path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    experts = sum(tensor.nbytes for tensor in tensors if tensor.name.endswith("_exps.weight"))
    counts = (sizes.n_layer, sizes.n_expert, sizes.n_used)
    return ModelInfo(path, path.stat().st_size, total - experts, experts, *counts, quant, router)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"make_model: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = _Parser(prog="make_model", description="Write random weights in the shape of a public model.")
    parser.add_argument("shape", help=", ".join(SHAPES))
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer layers than the model has")
    parser.add_argument("--router", default="uniform", help="uniform (default) or zipf")
    parser.add_argument("--zipf-s", type=float, default=1.0, metavar="S", help="default: 1.0; 1.3 is like real models")
    parser.add_argument("--quant", help="q4_k_m or mxfp4 (default: the model's usual one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide the sizes by N, for tests")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction block (qwen3.6-35b-a3b)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    options = vars(parser.parse_args(argv))
    from rich.console import Console  # here: making models from Python does without
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    screen = Console(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    task = bar.add_task("writing", total=None)
    options["progress"] = lambda done, total: bar.update(task, completed=done, total=total)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        with bar:
            info = make_model(options.pop("out"), **options)
    except (MakeModelError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("make_model: stopped, nothing was left behind", file=sys.stderr)
        return 130
    gib = [size / 2**30 for size in (info.bytes, info.expert_bytes, info.dense_bytes)]
    print(f"{info.path}: {info.layers} layers, {gib[0]:.2f} GiB ({gib[1]:.2f} experts, {gib[2]:.2f} dense)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
