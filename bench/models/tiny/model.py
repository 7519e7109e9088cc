"""One tiny model being written: its sizes, its random weights, and the building blocks of its architecture.

Weights are random but scaled the way trained ones are, so that routing differs from token to token and greedy
decoding wanders instead of repeating one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from bench.models.quantizer import load_quantizer

from .scripted import CLASS_WIDTH, CLASSES, class_columns, class_order
from .vocabulary import CHAT_TEMPLATE, MERGED, SPECIALS, token_scale, vocabulary

# "mixed" walks this ring: gate and up of layer i take entry i, down takes the next one.
_MIXED = ("Q4_K", "Q6_K", "Q8_0")

Array = NDArray[np.float32]
Value = int | float | bool | str | Sequence[int] | Sequence[str]
Block = Callable[[int], None]


def _quantize(data: Array, qtype: GGMLQuantizationType) -> NDArray[np.generic]:
    """`data` stored as `qtype`; block formats come back as bytes with the row length in bytes."""
    if qtype == GGMLQuantizationType.F32:
        return data
    if qtype == GGMLQuantizationType.F16:
        return data.astype(np.float16)
    block, size = GGML_QUANT_SIZES[qtype]
    data = np.ascontiguousarray(data)
    row = data.shape[-1]
    out = np.empty((*data.shape[:-1], row // block * size), np.uint8)
    n_rows = data.size // row
    done = load_quantizer()(int(qtype), data.ctypes.data, out.ctypes.data, 0, n_rows, row, None)
    if done != out.nbytes:
        raise RuntimeError(f"ggml wrote {done} bytes of {qtype.name}, expected {out.nbytes}")
    return out


@dataclass
class TinyModel:
    """One model being written: its sizes, the random stream, and the writer underneath."""

    path: Path
    arch: str
    quant: str
    shards: int
    seed: int
    n_layer: int
    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    nextn: int
    n_head: int = 4
    n_head_kv: int = 2
    # Whether the embedding is also the output, and the size of its entries.
    tied: bool = False
    embd_std: float = 1.0
    # Whether a token's routes follow from its id: `scripted_routes`.
    scripted: bool = False
    # Whether the architecture's own keys say how many heads of keys there are and how long.
    own_heads: bool = False

    def __post_init__(self) -> None:
        self.n_block = self.n_layer + self.nextn
        self.head = self.n_embd // self.n_head
        # A published MXFP4 model quantizes only its experts that far.
        self.dense_type = "Q8_0" if self.quant in ("MXFP4", "mixed") else self.quant
        self.rng = np.random.default_rng(self.seed)
        self.writer = GGUFWriter(self.path, self.arch)

    def kv(self, **values: Value) -> None:
        """Architecture keys, spelled with `__` for the dot (`attention__head_count=4`)."""
        for name, value in values.items():
            self.raw_kv(f"{self.arch}.{name.replace('__', '.')}", value)

    def raw_kv(self, key: str, value: Value) -> None:
        """One key under its full name, with the value type llama.cpp expects for it."""
        if isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, int):
            self.writer.add_uint32(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        elif isinstance(value, str):
            self.writer.add_string(key, value)
        else:
            self.writer.add_key_value(key, list(value), GGUFValueType.ARRAY)

    def common_kv(self) -> None:
        """Keys that most architectures share."""
        self.raw_kv("general.name", f"tiny {self.arch} {self.quant}")
        self.kv(block_count=self.n_block, context_length=2048)
        self.kv(embedding_length=self.n_embd)
        if self.arch != "nemotron_h_moe":
            self.kv(feed_forward_length=2 * self.n_ff)
        self.kv(attention__head_count=self.n_head, attention__layer_norm_rms_epsilon=1e-6)
        self.kv(rope__freq_base=10000.0)
        if not self.own_heads and self.arch != "deepseek2":
            self.kv(attention__head_count_kv=self.n_head_kv)
        if not self.own_heads and self.arch not in ("deepseek2", "gemma4"):
            self.kv(attention__key_length=self.head, attention__value_length=self.head)
        if self.arch != "llama":
            self.kv(expert_count=self.n_expert, expert_used_count=self.n_used)
            self.kv(expert_feed_forward_length=self.n_ff)
        if self.nextn:
            self.kv(nextn_predict_layers=int(self.nextn))

    def vocab_kv(self) -> None:
        """The same byte-level BPE vocabulary for every architecture."""
        tokens = vocabulary()
        first_special = len(tokens) - len(SPECIALS)
        self.raw_kv("tokenizer.ggml.model", "gpt2")
        self.raw_kv("tokenizer.ggml.pre", "gpt-2")
        self.raw_kv("tokenizer.ggml.tokens", tokens)
        self.raw_kv("tokenizer.ggml.token_type", [1] * first_special + [3] * len(SPECIALS))
        self.raw_kv("tokenizer.ggml.merges", [f"{token[:-1]} {token[-1]}" for token in MERGED.split()])
        self.raw_kv("tokenizer.ggml.bos_token_id", first_special)
        self.raw_kv("tokenizer.ggml.eos_token_id", first_special + 2)
        self.raw_kv("tokenizer.ggml.padding_token_id", first_special)
        self.raw_kv("tokenizer.ggml.add_bos_token", False)
        self.raw_kv("tokenizer.chat_template", CHAT_TEMPLATE)

    def start_block(self, il: int) -> None:
        """Open the next shard where block `il` begins one."""
        if il and il * self.shards // self.n_block != (il - 1) * self.shards // self.n_block:
            # The writer makes one file, split keys included, of each entry of this list.
            self.writer.tensors.append({})

    def _normal(self, shape: tuple[int, ...], std: float) -> Array:
        data: Array = self.rng.standard_normal(shape, np.float32) * np.float32(std)
        return data

    def add(self, name: str, data: Array, qname: str) -> None:
        qtype = GGMLQuantizationType[qname]
        if data.shape[-1] % GGML_QUANT_SIZES[qtype][0]:
            # Rows too short for the format: F16, as llama.cpp's own quantizer falls back.
            qtype = GGMLQuantizationType.F16
        self.writer.add_tensor(name, _quantize(data, qtype), raw_dtype=qtype)

    def vec(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        """Norm weights, biases, scales: always F32."""
        self.add(name, self._normal(shape, std) + np.float32(mean), "F32")

    def norm(self, name: str, n: int, mean: float = 1.0) -> None:
        self.vec(f"{name}.weight", n, mean=mean)

    def mat(self, name: str, *shape: int, gain: float = 1.0, qname: str | None = None) -> None:
        """A weight matrix, shape (..., rows out, columns in)."""
        std = gain / float(np.sqrt(shape[-1]))
        self.add(f"{name}.weight", self._normal(shape, std), qname or self.dense_type)

    def embeddings(self) -> Array:
        data = self._normal((len(vocabulary()), self.n_embd), self.embd_std)
        if self.scripted:
            # A direction for each class of tokens, so long that nothing a layer adds turns it.
            for token, row in enumerate(data):
                row[class_columns(token % CLASSES)] = 5000.0
        if self.tied:
            data *= token_scale()[:, None]
        self.add("token_embd.weight", data, self.dense_type)
        return data

    def output(self, embeddings: Array) -> None:
        # Logits of standard deviation near 3, from the output rows or, where those are the small
        # embeddings, from the norm before them.
        std = 3.0 / float(np.sqrt(self.n_embd))
        self.norm("output_norm", self.n_embd, std / self.embd_std if self.tied else 1.0)
        if not self.tied:
            # Against its own embedding, a token rarely follows itself: greedy runs keep moving.
            data = self._normal(embeddings.shape, std) - np.float32(0.6 * std) * embeddings
            self.add("output.weight", data * token_scale()[:, None], self.dense_type)

    def write(self, builder: Callable[[TinyModel], Block]) -> Path:
        """Write the whole model; `builder` adds its keys and returns what writes one block."""
        self.common_kv()
        self.vocab_kv()
        block = builder(self)
        embeddings = self.embeddings()
        for il in range(self.n_block):
            self.start_block(il)
            block(il)
            if il >= self.n_layer:
                self.nextn_head(il)
        self.output(embeddings)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.writer.format_shard_names(self.path)[0]

    def attention(self, il: int, *, bias: bool = False, qk_norm: bool = False, q_factor: int = 1) -> None:
        """Grouped-query attention; `q_factor` 2 adds the output gate to the query projection."""
        b, n = f"blk.{il}.", self.n_embd
        kv_width = self.n_head_kv * self.head
        widths = {"q": self.n_head * self.head * q_factor, "k": kv_width, "v": kv_width}
        self.norm(f"{b}attn_norm", n)
        for part, width in widths.items():
            self.mat(f"{b}attn_{part}", width, n, gain=1.0 if part == "v" else 1.5)
            if bias:
                self.vec(f"{b}attn_{part}.bias", width)
        self.mat(f"{b}attn_output", n, self.n_head * self.head, gain=1.5)
        if qk_norm:
            self.norm(f"{b}attn_q_norm", self.head)
            self.norm(f"{b}attn_k_norm", self.head)

    def mlp(self, il: int, n_ff: int, suffix: str = "") -> None:
        """A dense gated feed-forward, or with suffix `_shexp` the shared expert."""
        for part, shape in self._mlp_shapes(n_ff):
            self.mat(f"blk.{il}.ffn_{part}{suffix}", *shape, gain=1.5)

    def _mlp_shapes(self, n_ff: int) -> list[tuple[str, tuple[int, int]]]:
        return [("gate", (n_ff, self.n_embd)), ("up", (n_ff, self.n_embd)), ("down", (self.n_embd, n_ff))]

    def router(self, il: int) -> None:
        if self.scripted:
            # One unit of logit from expert to expert: far more than rounding can move.
            data = np.zeros((self.n_expert, self.n_embd), np.float32)
            length = float(np.sqrt(self.n_embd * CLASS_WIDTH))
            for kind in range(CLASSES):
                for place, expert in enumerate(class_order(kind, il, self.n_expert)):
                    data[expert, class_columns(kind)] = (self.n_expert - place) / length
            self.add(f"blk.{il}.ffn_gate_inp.weight", data, "F32")
            return
        # The gain spreads the router's logits far enough apart for tokens to disagree on experts.
        self.mat(f"blk.{il}.ffn_gate_inp", self.n_expert, self.n_embd, gain=2.0, qname="F32")

    def experts(self, il: int, *, fused: bool = False, bias: bool = False) -> None:
        """Routed experts; `fused` stores gate and up as one tensor, gate rows first."""
        shapes = self._mlp_shapes(self.n_ff)
        if fused:
            shapes = [("gate_up", (2 * self.n_ff, self.n_embd)), shapes[-1]]
        for part, (rows, cols) in shapes:
            qname = self.quant
            if qname == "mixed":
                qname = _MIXED[(il + (part == "down")) % len(_MIXED)]
            self.mat(f"blk.{il}.ffn_{part}_exps", self.n_expert, rows, cols, gain=1.5, qname=qname)
            if bias:
                self.vec(f"blk.{il}.ffn_{part}_exps.bias", self.n_expert, rows)

    def gated_shared(self, il: int, n_ff: int) -> None:
        """A shared expert behind its own gate."""
        self.vec(f"blk.{il}.ffn_gate_inp_shexp.weight", self.n_embd)
        self.mlp(il, n_ff, "_shexp")

    def late_moe_kv(self, gating: int) -> None:
        self.kv(leading_dense_block_count=1, expert_shared_count=1, expert_gating_func=gating)
        self.kv(expert_weights_scale=1.5, expert_weights_norm=True)

    def late_moe(self, il: int) -> None:
        """Dense in the first block; after it experts picked with a bias, and one shared expert."""
        if il == 0:
            self.mlp(il, 2 * self.n_ff)
            return
        self.router(il)
        self.vec(f"blk.{il}.exp_probs_b.bias", self.n_expert)
        self.experts(il)
        self.mlp(il, self.n_ff, "_shexp")

    def expert_table(self, il: int) -> None:
        """The experts of each token, in place of a router's choice."""
        rows = [self.rng.permutation(self.n_expert)[: self.n_used] for _ in vocabulary()]
        self.writer.add_tensor(f"blk.{il}.ffn_gate_tid2eid.weight", np.array(rows, np.int32))

    def nextn_head(self, il: int) -> None:
        """What a multi-token-prediction block has on top of a trunk block."""
        self.mat(f"blk.{il}.nextn.eh_proj", self.n_embd, 2 * self.n_embd)
        for part in ("enorm", "hnorm", "shared_head_norm"):
            # One architecture keeps the last of them under the name of a layer's own.
            name = "layer_output_norm" if (self.arch, part) == ("bailingmoe3", "shared_head_norm") else f"nextn.{part}"
            self.norm(f"blk.{il}.{name}", self.n_embd)
