"""Tiny models of the architectures that the tests need only for their multi-token-prediction heads.

Tensors and keys are those that the pinned llama.cpp loads (src/models); sizes are as small as its kernels allow.
"""

from __future__ import annotations

from collections.abc import Callable

from .model import Block, TinyModel
from .trunks import deepseek2, gated_experts, hybrid, rotate_sections

_INDEXER_HEADS, _INDEXER_HEAD = 2, 64
_INDEXER_KEPT = 128  # keys: with fewer, rounding tips which, and runs in batches of other widths go apart


def _hy_v3(m: TinyModel) -> Block:
    m.kv(rope__dimension_count=m.head, expert_shared_feed_forward_length=m.n_ff, expert_weights_norm=True)

    def block(il: int) -> None:
        m.attention(il, qk_norm=True)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)
        m.mlp(il, m.n_ff, "_shexp")

    return block


def _step35(m: TinyModel) -> Block:
    """Sliding windows in turn with full attention, a gate for each head."""
    m.kv(rope__dimension_count=m.head, expert_shared_feed_forward_length=m.n_ff, expert_weights_norm=True)
    m.kv(attention__sliding_window=32, attention__sliding_window_pattern=[il % 2 == 0 for il in range(m.n_block)])

    def block(il: int) -> None:
        m.attention(il, qk_norm=True)
        m.mat(f"blk.{il}.attn_gate", m.n_head, m.n_embd)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.vec(f"blk.{il}.exp_probs_b.bias", m.n_expert)
        m.experts(il)
        m.mlp(il, m.n_ff, "_shexp")

    return block


def _mimo2(m: TinyModel) -> Block:
    """Sliding windows with sinks; its heads have no experts."""
    m.kv(rope__dimension_count=m.head)
    m.kv(attention__sliding_window=32, attention__sliding_window_pattern=[il % 2 == 0 for il in range(m.n_block)])

    def block(il: int) -> None:
        b = f"blk.{il}."
        m.norm(f"{b}attn_norm", m.n_embd)
        m.mat(f"{b}attn_qkv", (m.n_head + 2 * m.n_head_kv) * m.head, m.n_embd, gain=1.5)
        m.mat(f"{b}attn_output", m.n_embd, m.n_head * m.head, gain=1.5)
        m.vec(f"{b}attn_sinks.weight", m.n_head)
        m.norm(f"{b}ffn_norm", m.n_embd)
        if il >= m.n_layer:
            m.mlp(il, 2 * m.n_ff)
            return
        m.router(il)
        m.vec(f"{b}exp_probs_b.bias", m.n_expert)
        m.experts(il)

    return block


def _cohere2moe(m: TinyModel) -> Block:
    """Attention and experts side by side on one norm."""
    m.kv(rope__dimension_count=m.head, logit_scale=1.0, leading_dense_block_count=1, expert_shared_count=1)
    m.kv(attention__sliding_window=32, attention__sliding_window_pattern=[il % 2 == 0 for il in range(m.n_block)])

    def block(il: int) -> None:
        m.attention(il)
        if il == 0:
            m.mlp(il, 2 * m.n_ff)
            return
        m.router(il)
        m.experts(il)
        m.mlp(il, m.n_ff, "_shexp")

    return block


def _qwen3next(m: TinyModel) -> Block:
    return hybrid(m, joint=True, rest=gated_experts(m))


def _qwen35(m: TinyModel) -> Block:
    """Without experts: nothing is streamed, and the head drafts all the same."""
    rotate_sections(m)
    return hybrid(m, joint=False, rest=lambda il: m.mlp(il, 2 * m.n_ff))


def _sparse(m: TinyModel) -> Block:
    """deepseek2's latent attention under an indexer that picks the keys: deepseek32 and glm-dsa."""
    m.kv(attention__indexer__head_count=_INDEXER_HEADS, attention__indexer__key_length=_INDEXER_HEAD)
    m.kv(attention__indexer__top_k=_INDEXER_KEPT)
    dense = deepseek2(m)

    def block(il: int) -> None:
        b = f"blk.{il}."
        dense(il)
        m.norm(f"{b}indexer.k_norm", _INDEXER_HEAD)
        m.vec(f"{b}indexer.k_norm.bias", _INDEXER_HEAD)
        m.mat(f"{b}indexer.proj", _INDEXER_HEADS, m.n_embd)
        m.mat(f"{b}indexer.attn_k", _INDEXER_HEAD, m.n_embd)
        m.mat(f"{b}indexer.attn_q_b", _INDEXER_HEADS * _INDEXER_HEAD, m.n_embd)

    return block


def _bailingmoe3(m: TinyModel) -> Block:
    """Kimi delta attention in turn with latent attention."""
    nope, rope, v_head, rank, head = m.head, m.head // 2, m.head, m.n_embd, m.head
    recurrent = [il < m.n_layer and (il + 1) % 2 != 0 for il in range(m.n_block)]
    m.kv(attention__head_count_kv=[0 if r else 1 for r in recurrent], attention__kv_lora_rank=rank)
    m.kv(attention__key_length=rank + rope, attention__value_length=rank)
    m.kv(attention__key_length_mla=nope + rope, attention__value_length_mla=v_head)
    m.kv(rope__dimension_count=rope, ssm__conv_kernel=4, kda__head_dim=head, kda__gate_lower_bound=-5.0)
    m.late_moe_kv(gating=2)
    inner = head * m.n_head

    def block(il: int) -> None:
        b, n = f"blk.{il}.", m.n_embd
        m.norm(f"{b}attn_norm", n)
        if recurrent[il]:
            for part in "qkv":
                m.vec(f"{b}ssm_conv1d_{part}.weight", inner, 1, 4, std=0.5)
                m.mat(f"{b}attn_{part}", inner, n)
            m.mat(f"{b}ssm_f_a", inner, n)
            m.mat(f"{b}ssm_beta", m.n_head, n)
            m.vec(f"{b}ssm_a", m.n_head, 1, mean=0.5)
            m.vec(f"{b}ssm_dt.bias", inner)
            m.mat(f"{b}ssm_g_a", inner, n)
            m.norm(f"{b}ssm_norm", head)
            m.mat(f"{b}attn_output", n, inner, gain=1.5)
        else:
            m.mat(f"{b}attn_q", m.n_head * (nope + rope), n, gain=1.5)
            m.mat(f"{b}attn_kv_a_mqa", rank + rope, n)
            m.norm(f"{b}attn_kv_a_norm", rank)
            m.mat(f"{b}attn_k_b", m.n_head, rank, nope)
            m.mat(f"{b}attn_v_b", m.n_head, v_head, rank)
            m.mat(f"{b}attn_gate", m.n_head, n)
            m.mat(f"{b}attn_output", n, m.n_head * v_head, gain=1.5)
        m.norm(f"{b}ffn_norm", n)
        m.late_moe(il)

    return block


def _nemotron_h_moe(m: TinyModel) -> Block:
    """One mixer a layer: state space, experts, attention, experts; experts of two matrices. The head has both."""
    state, groups, heads = 16, 1, m.n_head
    inner = 2 * m.n_embd
    kinds = ["ssm", "moe", "attention", "moe"][: m.n_layer]
    m.kv(attention__layer_norm_epsilon=1e-6, expert_shared_feed_forward_length=m.n_ff, expert_shared_count=1)
    m.kv(attention__head_count_kv=[m.n_head_kv if k == "attention" else 0 for k in [*kinds, "attention"]])
    m.kv(feed_forward_length=[m.n_ff if k == "moe" else 0 for k in [*kinds, ""]])
    m.kv(attention__key_length=m.head, attention__value_length=m.head, expert_weights_norm=True)
    m.kv(ssm__conv_kernel=4, ssm__state_size=state, ssm__inner_size=inner)
    m.kv(ssm__group_count=groups, ssm__time_step_rank=heads)

    def experts(il: int) -> None:
        m.router(il)
        m.vec(f"blk.{il}.exp_probs_b.bias", m.n_expert)
        for part, rows, cols in (("up", m.n_ff, m.n_embd), ("down", m.n_embd, m.n_ff)):
            m.mat(f"blk.{il}.ffn_{part}_exps", m.n_expert, rows, cols, gain=1.5, qname=m.quant)
            m.mat(f"blk.{il}.ffn_{part}_shexp", rows, cols, gain=1.5)

    def block(il: int) -> None:
        b, mixed = f"blk.{il}.", inner + 2 * groups * state
        kind = kinds[il] if il < m.n_layer else "head"
        if kind in ("attention", "head"):
            m.attention(il)
        else:
            m.norm(f"{b}attn_norm", m.n_embd)
        if kind == "ssm":
            m.mat(f"{b}ssm_in", inner + mixed + heads, m.n_embd)
            m.mat(f"{b}ssm_conv1d", mixed, 4, qname="F32")
            m.vec(f"{b}ssm_conv1d.bias", mixed)
            m.vec(f"{b}ssm_dt.bias", heads)
            m.vec(f"{b}ssm_a", heads, 1, mean=-0.5)
            m.vec(f"{b}ssm_d", heads, 1, mean=1.0)
            m.vec(f"{b}ssm_norm.weight", groups, inner // groups, mean=1.0)
            m.mat(f"{b}ssm_out", m.n_embd, inner, gain=1.5)
        if kind == "head":
            m.norm(f"{b}post_attention_norm", m.n_embd)
        if kind in ("moe", "head"):
            experts(il)

    return block


def _deepseek4(m: TinyModel) -> Block:
    """Four residual streams, keys compressed by 4 and by 128, and a first layer whose routes follow from the token."""
    streams, ratios, groups, rank, q_rank = 4, [0, 4, 128, 0], 2, 32, m.n_embd
    mix = (2 + streams) * streams
    m.kv(attention__head_count_kv=1, attention__key_length=m.head, attention__value_length=m.head)
    m.kv(rope__dimension_count=m.head // 2, attention__q_lora_rank=q_rank, attention__sliding_window=32)
    m.kv(attention__indexer__head_count=_INDEXER_HEADS, attention__indexer__key_length=_INDEXER_HEAD)
    m.kv(attention__indexer__top_k=16, attention__output_group_count=groups, attention__output_lora_rank=rank)
    m.kv(attention__compress_rope_freq_base=160000.0, attention__compress_ratios=ratios)
    m.kv(hyper_connection__count=streams, hyper_connection__sinkhorn_iterations=3, hyper_connection__epsilon=1e-6)
    m.kv(hash_layer_count=1, swiglu_clamp_exp=10.0, expert_shared_count=1, expert_gating_func=4)
    m.kv(expert_weights_scale=1.5, expert_weights_norm=True)
    m.mat("output_hc_fn", streams, streams * m.n_embd, qname="F32")
    m.vec("output_hc_base.weight", streams)
    m.vec("output_hc_scale.weight", 1, mean=1.0)

    def compressor(name: str, width: int, ratio: int, out: int) -> None:
        m.mat(f"{name}_kv", width, m.n_embd)
        m.mat(f"{name}_gate", width, m.n_embd)
        m.vec(f"{name}_ape.weight", ratio, width)
        m.norm(f"{name}_norm", out)

    def block(il: int) -> None:
        b, n = f"blk.{il}.", m.n_embd
        m.norm(f"{b}attn_norm", n)
        m.vec(f"{b}attn_sinks.weight", m.n_head)
        m.mat(f"{b}attn_q_a", q_rank, n)
        m.norm(f"{b}attn_q_a_norm", q_rank)
        m.mat(f"{b}attn_q_b", m.n_head * m.head, q_rank, gain=1.5)
        m.mat(f"{b}attn_kv", m.head, n)
        m.norm(f"{b}attn_kv_a_norm", m.head)
        m.mat(f"{b}attn_output_a", groups * rank, m.n_head * m.head // groups)
        m.mat(f"{b}attn_output_b", n, groups * rank, gain=1.5)
        for part in ("attn", "ffn"):
            m.mat(f"{b}hc_{part}_fn", mix, streams * n, qname="F32")
            m.vec(f"{b}hc_{part}_base.weight", mix)
            m.vec(f"{b}hc_{part}_scale.weight", 3, mean=1.0)
        if ratio := ratios[il]:
            width = 2 if ratio == 4 else 1
            compressor(f"{b}attn_compressor", width * m.head, ratio, m.head)
        if ratios[il] == 4:
            m.mat(f"{b}indexer.proj", _INDEXER_HEADS, n)
            m.mat(f"{b}indexer.attn_q_b", _INDEXER_HEADS * _INDEXER_HEAD, q_rank)
            compressor(f"{b}indexer_compressor", 2 * _INDEXER_HEAD, ratio, _INDEXER_HEAD)
        m.norm(f"{b}ffn_norm", n)
        m.router(il)
        if il == 0:
            m.expert_table(il)
        else:
            m.vec(f"{b}exp_probs_b.bias", m.n_expert)
        m.experts(il)
        m.mlp(il, m.n_ff, "_shexp")

    return block


BUILDERS: dict[str, tuple[Callable[[TinyModel], Block], int, bool]] = {
    "hy_v3": (_hy_v3, 2, False),
    "step35": (_step35, 2, False),
    "mimo2": (_mimo2, 2, False),
    "cohere2moe": (_cohere2moe, 3, False),
    "qwen3next": (_qwen3next, 3, False),
    "qwen35": (_qwen35, 3, False),
    "deepseek32": (_sparse, 3, True),
    "deepseek4": (_deepseek4, 3, True),
    "glm-dsa": (_sparse, 3, True),
    "bailingmoe3": (_bailingmoe3, 3, True),
    "nemotron_h_moe": (_nemotron_h_moe, 4, True),
}
"""What writes each, its layers, and whether it has keys of its own for its attention heads."""
