"""The architectures that the tests stream: each adds its own keys, then returns what writes one block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .model import Block, TinyModel


def _llama(m: TinyModel) -> Block:
    m.kv(rope__dimension_count=m.head)

    def block(il: int) -> None:
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.mlp(il, 2 * m.n_ff)

    return block


def _qwen2moe(m: TinyModel) -> Block:
    m.kv(expert_shared_feed_forward_length=2 * m.n_ff)

    def block(il: int) -> None:
        m.attention(il, bias=True)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)
        m.gated_shared(il, 2 * m.n_ff)

    return block


def _qwen3moe(m: TinyModel) -> Block:
    def block(il: int) -> None:
        m.attention(il, qk_norm=True)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)

    return block


def delta_net_kv(m: TinyModel) -> tuple[int, int, int, int]:
    """Value heads, key heads, state and convolution of a gated delta net, whose every second layer is attention."""
    n_v, n_k, state, conv = m.n_head, m.n_head // 2, m.head, 4
    m.kv(rope__dimension_count=m.head // 2, full_attention_interval=2)
    m.kv(ssm__conv_kernel=conv, ssm__state_size=state, ssm__inner_size=n_v * state)
    m.kv(ssm__group_count=n_k, ssm__time_step_rank=n_v)
    return n_v, n_k, state, conv


def delta_net(m: TinyModel, il: int, sizes: tuple[int, int, int, int], joint: bool) -> None:
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


def hybrid(m: TinyModel, *, joint: bool, rest: Block) -> Block:
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


def rotate_sections(m: TinyModel) -> None:
    """The sections of a multimodal rotation, of which text uses the first."""
    third = m.head // 12
    m.kv(rope__dimension_sections=[m.head // 4 - 2 * third, third, third, 0])


def gated_experts(m: TinyModel) -> Block:
    """Routed experts and a shared one with a gate."""
    m.kv(expert_shared_feed_forward_length=m.n_ff)

    def block(il: int) -> None:
        m.router(il)
        m.experts(il)
        m.gated_shared(il, m.n_ff)

    return block


def _qwen35moe(m: TinyModel) -> Block:
    rotate_sections(m)
    return hybrid(m, joint=False, rest=gated_experts(m))


def _gemma4(m: TinyModel) -> Block:
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


def _gpt_oss(m: TinyModel) -> Block:
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


def _glm4moe(m: TinyModel) -> Block:
    m.kv(rope__dimension_count=m.head // 2)
    m.late_moe_kv(gating=2)  # sigmoid

    def block(il: int) -> None:
        m.attention(il, bias=True, qk_norm=True)
        m.norm(f"blk.{il}.post_attention_norm", m.n_embd)
        m.late_moe(il)

    return block


def deepseek2(m: TinyModel) -> Block:
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


BUILDERS: dict[str, Callable[[TinyModel], Block]] = {
    "llama": _llama,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen35moe": _qwen35moe,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4moe,
    "deepseek2": deepseek2,
}
