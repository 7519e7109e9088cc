"""Which tensors a made model has, in which type, and what its router makes popular."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from .pools import Fill, Tensor
from .shapes import Shape

_T = GGMLQuantizationType
Q8_0, Q4_K, Q6_K, MXFP4 = _T.Q8_0, _T.Q4_K, _T.Q6_K, _T.MXFP4

# The zipf router needs an input that is the same for every token. On models whose router has no bias, every
# element of every embedding gets this mean (the rms stays 1), and the residual stream carries it along.
COMMON_MEAN = 0.25
# No expert may be wanted by more than this share of the tokens: a Zipf head would ask for more than all.
MAX_POPULARITY = 0.95
OUTPUT_GAIN = 2.5  # spread of the logits: random weights would give 1, trained models have 2 to 3
# Attention keeps what tokens have in common and averages the rest away. At full strength the common part
# takes over with depth, and even the uniform router comes to prefer some experts.
ATTN_GAIN = 0.25


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
