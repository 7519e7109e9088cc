"""The numbers of public Mixture-of-Experts models, and a vocabulary of the size of theirs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from gguf import RopeScalingType, TokenType

from bench.models.byte_alphabet import byte_alphabet


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


def scaled(s: Shape, scale: int) -> Shape:
    """The shape with its main sizes divided, within what is valid."""
    n_embd, n_head = max(256, s.n_embd // scale // 256 * 256), max(4, s.n_head // scale)
    n_vocab, n_expert = max(1024, s.n_vocab // scale), max(4 * s.n_used, s.n_expert // scale)
    return replace(s, n_embd=n_embd, n_head=n_head, n_head_kv=2, n_expert=n_expert, n_ff=256, n_vocab=n_vocab)


def vocabulary(shape: Shape) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: bytes, a few merged pairs, made-up words, control tokens."""
    tokens = byte_alphabet()
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
