"""Tiny random-weight GGUF models, one per architecture the tests need.

Every file is complete: stock llama.cpp loads it, tokenizes text with it and decodes it. Weights are
random but scaled the way trained ones are, so that routing differs from token to token and greedy
decoding wanders instead of repeating one token.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

QUANTS: tuple[str, ...] = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "mixed")

# "mixed" walks this ring: gate and up of layer i take entry i, down takes the next one.
_MIXED = ("Q4_K", "Q6_K", "Q8_0")
# Row length that every listed quantization divides, and the shorter one that serves the rest.
_K_ROW, _SHORT_ROW = 256, 128

Array = NDArray[np.float32]
Value = int | float | bool | str | Sequence[int] | Sequence[str]
_Block = Callable[[int], None]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens longer than a byte, each one character longer than an earlier one; "Ġ" is how the GPT-2
# alphabet spells a space. The order is that of the merges.
_MERGED = (
    "Ġt Ġth Ġthe Ġa Ġan Ġand Ġo Ġof Ġs Ġw Ġc Ġb Ġf Ġp Ġh th the he in ing an and er on re ou is es at en "
    "ll or it al ar st ed le lo"
)


def _byte_alphabet() -> list[str]:
    """The printable character standing for each byte in a byte-level BPE vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    """Token texts, by id: the 256 bytes, one token per merge, then the specials."""
    return [*_byte_alphabet(), *_MERGED.split(), *SPECIALS]


def _token_scale() -> Array:
    """Relative size of each token's output row.

    Bytes outside printable ASCII get small rows, so that what a model writes is mostly readable text.
    Specials get next to nothing, so that no run ends early.
    """
    scale = np.ones(len(vocabulary()), np.float32)
    scale[:256] = 0.3
    scale[0x20:0x7F] = 1.0
    scale[-len(SPECIALS) :] = 0.02
    return scale


# Models whose routes follow from the tokens: classes of tokens, and the columns of the embedding that one has.
_CLASSES, _CLASS_WIDTH = 32, 4


def _class_columns(kind: int) -> slice:
    return slice(kind * _CLASS_WIDTH, (kind + 1) * _CLASS_WIDTH)


@cache
def _class_order(kind: int, il: int, n_expert: int) -> tuple[int, ...]:
    """All experts of a layer, the ones that a class of tokens wants most first."""
    rng = random.Random(kind * 1009 + il)
    return tuple(sorted(range(n_expert), key=lambda _: rng.random()))


def scripted_routes(token: int, il: int, n_expert: int, n_used: int) -> tuple[int, ...]:
    """The experts of layer `il` for `token` in a model written with `scripted`: on every machine, with every kernel."""
    return _class_order(token % _CLASSES, il, n_expert)[:n_used]


@cache
def _ggml() -> ctypes.CDLL:
    """The ggml of the installed llama-cpp-python; the gguf package cannot write K-quants itself."""
    import llama_cpp

    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return lib


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
    done = _ggml().ggml_quantize_chunk(int(qtype), data.ctypes.data, out.ctypes.data, 0, n_rows, row, None)
    if done != out.nbytes:
        raise RuntimeError(f"ggml wrote {done} bytes of {qtype.name}, expected {out.nbytes}")
    return out


@dataclass
class _Model:
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
        self.raw_kv("tokenizer.ggml.merges", [f"{token[:-1]} {token[-1]}" for token in _MERGED.split()])
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
                row[_class_columns(token % _CLASSES)] = 5000.0
        if self.tied:
            data *= _token_scale()[:, None]
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
            self.add("output.weight", data * _token_scale()[:, None], self.dense_type)

    def write(self, builder: Callable[[_Model], _Block]) -> Path:
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
            length = float(np.sqrt(self.n_embd * _CLASS_WIDTH))
            for kind in range(_CLASSES):
                for place, expert in enumerate(_class_order(kind, il, self.n_expert)):
                    data[expert, _class_columns(kind)] = (self.n_expert - place) / length
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


# The architectures: each adds its own keys, then returns what writes one block.


def _llama(m: _Model) -> _Block:
    m.kv(rope__dimension_count=m.head)

    def block(il: int) -> None:
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.mlp(il, 2 * m.n_ff)

    return block


def _qwen2moe(m: _Model) -> _Block:
    m.kv(expert_shared_feed_forward_length=2 * m.n_ff)

    def block(il: int) -> None:
        m.attention(il, bias=True)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)
        m.gated_shared(il, 2 * m.n_ff)

    return block


def _qwen3moe(m: _Model) -> _Block:
    def block(il: int) -> None:
        m.attention(il, qk_norm=True)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)

    return block


def delta_net_kv(m: _Model) -> tuple[int, int, int, int]:
    """Value heads, key heads, state and convolution of a gated delta net, whose every second layer is attention."""
    n_v, n_k, state, conv = m.n_head, m.n_head // 2, m.head, 4
    m.kv(rope__dimension_count=m.head // 2, full_attention_interval=2)
    m.kv(ssm__conv_kernel=conv, ssm__state_size=state, ssm__inner_size=n_v * state)
    m.kv(ssm__group_count=n_k, ssm__time_step_rank=n_v)
    return n_v, n_k, state, conv


def delta_net(m: _Model, il: int, sizes: tuple[int, int, int, int], joint: bool) -> None:
    (n_v, n_k, state, conv), b = sizes, f"blk.{il}."
    mixed = (2 * n_k + n_v) * state
    m.norm(f"{b}attn_norm", m.n_embd)
    m.mat(f"{b}attn_qkv", mixed, m.n_embd)
    m.mat(f"{b}attn_gate", n_v * state, m.n_embd)
    m.mat(f"{b}ssm_conv1d", mixed, conv, qname="F32")
    m.vec(f"{b}ssm_dt.bias", n_v)
    m.vec(f"{b}ssm_a", n_v, mean=-0.5)  # the decay of the state; it must be negative
    if joint:
        m.mat(f"{b}ssm_ba", 2 * n_v, m.n_embd)
    else:
        m.mat(f"{b}ssm_beta", n_v, m.n_embd)
        m.mat(f"{b}ssm_alpha", n_v, m.n_embd)
    m.norm(f"{b}ssm_norm", state)
    m.mat(f"{b}ssm_out", m.n_embd, n_v * state, gain=1.5)


def hybrid(m: _Model, *, joint: bool, rest: _Block) -> _Block:
    """Delta nets and full attention in turn, a head always of the latter, and `rest` after either."""
    sizes = delta_net_kv(m)

    def block(il: int) -> None:
        if il < m.n_layer and (il + 1) % 2:
            delta_net(m, il, sizes, joint=joint)
        else:
            m.attention(il, qk_norm=True, q_factor=2)
        m.norm(f"blk.{il}.post_attention_norm", m.n_embd)
        rest(il)

    return block


def rotate_sections(m: _Model) -> None:
    """The sections of a multimodal rotation, of which text uses the first."""
    third = m.head // 12
    m.kv(rope__dimension_sections=[m.head // 4 - 2 * third, third, third, 0])


def gated_experts(m: _Model) -> _Block:
    """Routed experts and a shared one with a gate."""
    m.kv(expert_shared_feed_forward_length=m.n_ff)

    def block(il: int) -> None:
        m.router(il)
        m.experts(il)
        m.gated_shared(il, m.n_ff)

    return block


def _qwen35moe(m: _Model) -> _Block:
    rotate_sections(m)
    return hybrid(m, joint=False, rest=gated_experts(m))


def _gemma4(m: _Model) -> _Block:
    # The embedding doubles as the output, and each token's own embedding stays in the residual
    # stream: kept small beside what the blocks add, it does not make every token predict itself.
    m.tied, m.embd_std = True, 0.005
    windowed = [il % 2 == 0 for il in range(m.n_layer)]
    wide = 2 * m.head
    m.kv(attention__sliding_window=32, attention__sliding_window_pattern=windowed)
    m.kv(attention__key_length=wide, attention__value_length=wide, rope__dimension_count=wide)
    m.kv(attention__key_length_swa=m.head, attention__value_length_swa=m.head)
    m.kv(rope__dimension_count_swa=m.head, rope__freq_base_swa=10000.0)
    m.kv(embedding_length_per_layer_input=0, attention__shared_kv_layers=0, final_logit_softcapping=30.0)
    if not all(windowed):
        # Proportional rope: a huge factor leaves the upper half of the pairs unrotated.
        factors = np.ones(wide // 2, np.float32)
        factors[wide // 4 :] = 1e30
        m.add("rope_freqs.weight", factors, "F32")

    def block(il: int) -> None:
        b, n = f"blk.{il}.", m.n_embd
        head = m.head if windowed[il] else wide
        for part in ("attn", "post_attention", "ffn", "post_ffw"):
            m.norm(f"{b}{part}_norm", n)
        for part in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
            m.norm(b + part, n)
        m.norm(f"{b}attn_q_norm", head)
        m.norm(f"{b}attn_k_norm", head)
        m.mat(f"{b}attn_q", m.n_head * head, n)
        m.mat(f"{b}attn_k", m.n_head_kv * head, n)
        if windowed[il]:
            # Full-attention layers have none: their keys serve as values.
            m.mat(f"{b}attn_v", m.n_head_kv * head, n)
        m.mat(f"{b}attn_output", n, m.n_head * head)
        m.vec(f"{b}layer_output_scale.weight", 1, mean=1.0, std=0.02)
        m.mlp(il, 2 * m.n_ff)
        m.router(il)
        # llama.cpp divides the router's input by sqrt(n_embd); this undoes it.
        m.vec(f"{b}ffn_gate_inp.scale", n, mean=float(np.sqrt(n)))
        m.experts(il, fused=True)
        m.vec(f"{b}ffn_down_exps.scale", m.n_expert, mean=1.0)

    return block


def _gpt_oss(m: _Model) -> _Block:
    m.kv(rope__dimension_count=m.head, attention__sliding_window=32)

    def block(il: int) -> None:
        b = f"blk.{il}."
        m.attention(il, bias=True)
        m.vec(f"{b}attn_output.bias", m.n_embd)
        m.vec(f"{b}attn_sinks.weight", m.n_head)
        m.norm(f"{b}post_attention_norm", m.n_embd)
        m.router(il)
        m.vec(f"{b}ffn_gate_inp.bias", m.n_expert)
        m.experts(il, bias=True)

    return block


def _glm4moe(m: _Model) -> _Block:
    m.kv(rope__dimension_count=m.head // 2)
    m.late_moe_kv(gating=2)  # sigmoid

    def block(il: int) -> None:
        m.attention(il, bias=True, qk_norm=True)
        m.norm(f"blk.{il}.post_attention_norm", m.n_embd)
        m.late_moe(il)

    return block


def _deepseek2(m: _Model) -> _Block:
    # Multi-head latent attention, stored as one shared latent "head" per token.
    nope, rope, v_head, q_rank, kv_rank = m.head, m.head // 2, m.head, m.n_embd, m.n_embd
    m.kv(attention__head_count_kv=1, attention__q_lora_rank=q_rank, attention__kv_lora_rank=kv_rank)
    m.kv(attention__key_length=kv_rank + rope, attention__value_length=kv_rank)
    m.kv(attention__key_length_mla=nope + rope, attention__value_length_mla=v_head)
    m.kv(rope__dimension_count=rope)
    m.late_moe_kv(gating=1)  # softmax

    def block(il: int) -> None:
        b, n = f"blk.{il}.", m.n_embd
        m.norm(f"{b}attn_norm", n)
        m.mat(f"{b}attn_q_a", q_rank, n)
        m.norm(f"{b}attn_q_a_norm", q_rank)
        m.mat(f"{b}attn_q_b", m.n_head * (nope + rope), q_rank, gain=1.5)
        m.mat(f"{b}attn_kv_a_mqa", kv_rank + rope, n)
        m.norm(f"{b}attn_kv_a_norm", kv_rank)
        m.mat(f"{b}attn_k_b", m.n_head, kv_rank, nope)
        m.mat(f"{b}attn_v_b", m.n_head, v_head, kv_rank)
        m.mat(f"{b}attn_output", n, m.n_head * v_head, gain=1.5)
        m.norm(f"{b}ffn_norm", n)
        m.late_moe(il)

    return block


_BUILDERS: dict[str, Callable[[_Model], _Block]] = {
    "llama": _llama,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen35moe": _qwen35moe,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4moe,
    "deepseek2": _deepseek2,
}
_NEXTN = ("qwen35moe", "glm4moe", "deepseek2")

ARCHES: tuple[str, ...] = tuple(_BUILDERS)


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
    if arch not in _BUILDERS:
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
    model = _Model(path, arch, quant, shards, seed, n_layer, n_expert, n_used, n_embd, n_ff, nextn)
    model.scripted = scripted
    return model.write(_BUILDERS[arch])
