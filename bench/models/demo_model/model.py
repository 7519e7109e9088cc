"""The network in torch: `glm4moe` as llama.cpp computes it, with kernels arranged for a CPU.

The residual stream and all sums are float32, matrix products of training bfloat16 where the processor has them. Routed
experts are computed as three products over places in the experts' order, every token gathered to its experts' places
and back, so that neither direction scatters and both are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .shape import Shape

Params = dict[str, Tensor]
PLACES = 128  # the bfloat16 places of an expert are a multiple of this
QUERIES = 128


def init(shape: Shape, seed: int) -> Params:
    """Float32 parameters under their GGUF names ("blk.0.attn_q.weight"), each [out, in] or [experts, out, in]."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float | None = None) -> Tensor:
        return torch.randn(*size, generator=g) * (std if std is not None else size[-1] ** -0.5)

    e, ff, n = shape.embd, shape.ff, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    p: Params = {
        "token_embd.weight": normal(shape.vocab, e, std=0.5),
        "output_norm.weight": torch.ones(e),
        "output.weight": normal(shape.vocab, e, std=0.02),
    }
    small = (2 * shape.blocks) ** -0.5
    for i in range(shape.blocks):
        b = f"blk.{i}."
        p[b + "attn_norm.weight"] = torch.ones(e)
        p[b + "post_attention_norm.weight"] = torch.ones(e)
        p[b + "attn_q.weight"] = normal(q, e)
        p[b + "attn_k.weight"] = normal(kv, e)
        p[b + "attn_v.weight"] = normal(kv, e)
        p[b + "attn_output.weight"] = normal(e, q) * small
        p[b + "attn_q_norm.weight"] = torch.ones(shape.head_dim)
        p[b + "attn_k_norm.weight"] = torch.ones(shape.head_dim)
        p[b + "ffn_gate_inp.weight"] = normal(n, e)
        p[b + "exp_probs_b.bias"] = torch.zeros(n)
        for where, count in (("exps", (n,)), ("shexp", ())):
            p[b + f"ffn_gate_{where}.weight"] = normal(*count, ff, e)
            p[b + f"ffn_up_{where}.weight"] = normal(*count, ff, e)
            p[b + f"ffn_down_{where}.weight"] = normal(*count, e, ff) * small
    b = f"blk.{shape.layers}.nextn."
    p[b + "eh_proj.weight"] = normal(e, 2 * e)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        p[b + name + ".weight"] = torch.ones(e)
    return p


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, rotary / 2] of NeoX-style rotary positions."""
    half = shape.rotary // 2
    inverse = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions of each head, as many as there are angles for; the others stay."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [batch, heads, length, head_dim], a block of queries at a time: half of all scores."""
    out = []
    length, scale = q.shape[2], q.shape[3] ** -0.5
    for at in range(0, length, QUERIES):
        end = min(at + QUERIES, length)
        scores = (q[:, :, at:end] @ k[:, :, :end].transpose(-1, -2)).float() * scale
        ahead = torch.arange(at, end, device=q.device)[:, None] < torch.arange(end, device=q.device)
        out.append(torch.softmax(scores.masked_fill(ahead, -1e30), -1).to(q.dtype) @ v[:, :, :end])
    return torch.cat(out, 2)


def attend(
    shape: Shape, dtype: torch.dtype, x: Tensor, cos: Tensor, sin: Tensor, router_bias: Tensor, *w: Tensor
) -> tuple[Tensor, ...]:
    """The first part of a layer, up to its experts; x float32 [batch, length, embd].

    Returns the residual stream with the shared expert's output, the experts' input [tokens, embd] in `dtype`, and the
    routed experts' ids and weights [tokens, used].
    """
    a_norm, p_norm, wq, wk, wv, wo, q_norm, k_norm, router, gate, up, down = w
    batch, length, embd = x.shape
    h = norm(x, a_norm, shape.eps).to(dtype)

    def heads(weight: Tensor, count: int) -> Tensor:
        return (h @ weight.to(dtype).t()).view(batch, length, count, shape.head_dim).transpose(1, 2)

    q = rotate(norm(heads(wq, shape.heads).float(), q_norm, shape.eps), cos, sin).to(dtype)
    k = rotate(norm(heads(wk, shape.kv_heads).float(), k_norm, shape.eps), cos, sin).to(dtype)
    v = heads(wv, shape.kv_heads)
    groups = shape.heads // shape.kv_heads
    out = attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    out = out.transpose(1, 2).reshape(batch, length, shape.heads * shape.head_dim)
    x = x + (out @ wo.to(dtype).t()).float()
    flat = norm(x, p_norm, shape.eps).view(-1, embd)
    n = flat.to(dtype)
    shared = (F.silu((n @ gate.to(dtype).t()).float()) * (n @ up.to(dtype).t()).float()).to(dtype) @ down.to(dtype).t()
    scores = torch.sigmoid(flat @ router.t())
    ids = (scores.detach() + router_bias).topk(shape.used, -1).indices
    picked = scores.gather(1, ids)
    weights = picked / picked.sum(-1, keepdim=True).clamp(min=6.103515625e-5)  # llama.cpp's own guard
    return x + shared.float().view_as(x), n, ids, weights


def _silu_mul(g: Tensor, u: Tensor) -> Tensor:
    return (F.silu(g.float()) * u.float()).to(g.dtype)


def _silu_mul_back(g: Tensor, u: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    gf, d = g.float(), dh.float()
    s = torch.sigmoid(gf)
    return (d * u.float() * s * (1 + gf * (1 - s))).to(g.dtype), (d * gf * s).to(g.dtype)


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over a token's experts, written out: a sum over the middle axis would not be vectorised."""
    return sum(
        (rows[:, k].float() * weights[:, k : k + 1] for k in range(1, rows.shape[1])),
        rows[:, 0].float() * weights[:, :1],
    )


def _spread(dout: Tensor, token: Tensor, w: Tensor, source: Tensor, dtype: torch.dtype) -> Tensor:
    """Each place's share of its token's gradient; [places, embd] in `dtype`."""
    return (dout[token] * w[source][:, None]).to(dtype)


def _gather_back(rows: Tensor, drows: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    used = rows.shape[1]
    dweights = torch.stack([(rows[:, k].float() * dout).sum(-1) for k in range(used)], -1)
    return dweights, sum((drows[:, k].float() for k in range(1, used)), drows[:, 0].float())


def grouped(x: Tensor, w: Tensor, counts: list[int] | None) -> Tensor:
    """Each expert's rows times its matrix: x [rows, in], w [experts, in, out] -> [rows, out].

    The rows lie in the experts' order, as many of each as `counts` says, or equally many.
    """
    if counts is None:
        return torch.bmm(x.view(len(w), -1, x.shape[1]), w).view(len(x), -1)
    out = x.new_empty(len(x), w.shape[2])
    for rows, matrix, target in zip(torch.split(x, counts), w, torch.split(out, counts), strict=True):
        torch.mm(rows, matrix, out=target)
    return out


def grouped_gradient(x: Tensor, y: Tensor, experts: int, counts: list[int] | None) -> Tensor:
    """The same rows' outer products, summed: x [rows, n], y [rows, m] -> float32 [experts, n, m]."""
    if counts is None:
        return torch.bmm(x.view(experts, -1, x.shape[1]).transpose(1, 2), y.view(experts, -1, y.shape[1])).float()
    out = x.new_empty(experts, x.shape[1], y.shape[1])
    for rows, others, target in zip(torch.split(x, counts), torch.split(y, counts), out, strict=True):
        torch.mm(rows.t(), others, out=target)
    return out


class Experts(torch.autograd.Function):
    """The routed experts: n [tokens, embd], ids and weights [tokens, used] -> float32 [tokens, embd].

    In float32 an expert has as many places as tokens. In bfloat16 all have the same number, so that the matrix library
    compiles few kernels.
    """

    @staticmethod
    def forward(ctx: Any, n: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        tokens, used = ids.shape
        experts = len(gate)
        flat = ids.reshape(-1)
        counts = torch.bincount(flat, minlength=experts)
        order = flat.argsort(stable=True)
        slot = torch.empty_like(flat)
        if n.dtype == torch.float32:
            split: list[int] | None = counts.tolist()
            slot[order] = torch.arange(flat.numel())
            source = order
        else:
            split = None
            places = -(-int(counts.max()) // PLACES) * PLACES
            starts = counts.cumsum(0) - counts
            ranked = torch.arange(flat.numel()) - starts[flat[order]]
            slot[order] = flat[order] * places + ranked
            # What each place holds: (token, which of its experts); an empty one holds the zero row after the last.
            source = torch.full((experts * places,), tokens * used)
            source[slot] = torch.arange(flat.numel())
        token = source // used
        padded = torch.cat((n, n.new_zeros(1, n.shape[1])))
        x = padded.index_select(0, token)
        gate, up, down = gate.to(n.dtype), up.to(n.dtype), down.to(n.dtype)
        g, u = grouped(x, gate.transpose(1, 2), split), grouped(x, up.transpose(1, 2), split)
        h = silu_mul(g, u)
        y = grouped(h, down.transpose(1, 2), split)
        ctx.split = split
        ctx.save_for_backward(x, g, u, h, y, slot, source, token, weights, gate, up, down)
        return combine(y.index_select(0, slot).view(tokens, used, -1), weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, g, u, h, y, slot, source, token, weights, gate, up, down = ctx.saved_tensors
        (dout,) = grads
        tokens, used = weights.shape
        experts, split = len(gate), ctx.split
        padded = torch.cat((dout, dout.new_zeros(1, dout.shape[1])))
        w = torch.cat((weights.reshape(-1), weights.new_zeros(1)))
        dy = spread(padded, token, w, source, x.dtype)
        dg, du = silu_mul_back(g, u, grouped(dy, down, split))
        dx = grouped(dg, gate, split).add_(grouped(du, up, split))
        rows, drows = (t.index_select(0, slot).view(tokens, used, -1) for t in (y, dx))
        dweights, dn = gather_back(rows, drows, dout)
        return (
            dn.to(x.dtype),
            None,
            dweights,
            grouped_gradient(dg, x, experts, split),
            grouped_gradient(du, x, experts, split),
            grouped_gradient(dy, h, experts, split),
        )


def _softmax_loss(products: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    logits = products.float()
    top = logits.logsumexp(-1)
    loss = ((top - logits.gather(1, target[:, None])[:, 0]) * scale).sum()
    d = torch.exp(logits - top[:, None])
    hot = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    return loss, ((d - hot.float()) * scale[:, None]).to(products.dtype)


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy of `h @ output.T` (nats) over tokens of the given weights, a part of the tokens at a time:
    logits never exist as a whole."""

    ROWS = 1024

    @staticmethod
    def forward(ctx: Any, h: Tensor, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        w = output.to(h.dtype)
        scale = weight / weight.sum().clamp(min=1)
        dh, dw, total = torch.empty_like(h), torch.zeros_like(output), h.new_zeros((), dtype=torch.float32)
        for at in range(0, len(h), HeadLoss.ROWS):
            rows = slice(at, at + HeadLoss.ROWS)
            part, d = softmax_loss(h[rows] @ w.t(), target[rows], scale[rows])
            total = total + part
            torch.mm(d, w, out=dh[rows])
            dw += (d.t() @ h[rows]).float()
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return dh * grads[0].to(dh.dtype), dw * grads[0], None, None


def _head_input(
    e: Tensor, hidden: Tensor, e_norm: Tensor, h_norm: Tensor, proj: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    x = torch.cat((norm(e, e_norm, eps), norm(hidden, h_norm, eps)), -1).to(dtype)
    return (x @ proj.to(dtype).t()).float()


# What lies between the matrix products: as written, until `compile_parts` replaces it.
silu_mul, silu_mul_back, softmax_loss, first_part = _silu_mul, _silu_mul_back, _softmax_loss, attend
combine, spread, gather_back, last_norm, head_input = _combine, _spread, _gather_back, norm, _head_input


def compile_parts() -> None:
    """Compiles the parts above: needs a C++ compiler, and a minute the first time."""
    for name, function, dynamic in (
        ("silu_mul", _silu_mul, True),
        ("silu_mul_back", _silu_mul_back, True),
        ("combine", _combine, True),
        ("spread", _spread, True),
        ("gather_back", _gather_back, True),
        ("softmax_loss", _softmax_loss, False),
        ("first_part", attend, False),
        ("last_norm", norm, False),
        ("head_input", _head_input, False),
    ):
        globals()[name] = torch.compile(function, dynamic=dynamic)


NAMES = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "ffn_gate_inp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
]


class Network:
    """The model over one set of parameters. `dtype` is that of the matrix products."""

    def __init__(self, shape: Shape, params: Params, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.p, self.dtype = shape, params, dtype
        self.loads: list[Tensor] = []
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, i: int, x: Tensor) -> Tensor:
        """One layer of the trunk, or the MTP block; notes the load of its experts in `loads`."""
        p, b, dtype = self.p, f"blk.{i}.", self.dtype
        length = x.shape[1]
        if length not in self._rotary:
            self._rotary[length] = rotary(self.shape, length)
        cos, sin = self._rotary[length]
        first, *rest = (p[b + name + ".weight"] for name in NAMES)
        x, n, ids, weights = first_part(
            self.shape, dtype, x, cos, sin, p[b + "exp_probs_b.bias"], first, p[b + "post_attention_norm.weight"], *rest
        )
        self.loads.append(torch.bincount(ids.reshape(-1), minlength=self.shape.experts))
        w = (p[b + f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        routed: Tensor = Experts.apply(n, ids, weights, *w)  # type: ignore[no-untyped-call]
        return x + routed.view_as(x)

    def trunk(self, ids: Tensor) -> Tensor:
        """Hidden rows after the last norm, float32 [batch, length, embd]: what `output` and the MTP block read."""
        self.loads = []
        x = self.p["token_embd.weight"][ids]
        for i in range(self.shape.layers):
            x = self.layer(i, x)
        return last_norm(x, self.p["output_norm.weight"], self.shape.eps)

    def head(self, hidden: Tensor, following: Tensor) -> Tensor:
        """The MTP block's hidden rows: row t pairs `hidden` of token t with token t + 1, and predicts token t + 2."""
        b, p, eps = f"blk.{self.shape.layers}.", self.p, self.shape.eps
        norms = p[b + "nextn.enorm.weight"], p[b + "nextn.hnorm.weight"]
        proj = p[b + "nextn.eh_proj.weight"]
        x = head_input(p["token_embd.weight"][following], hidden, *norms, proj, eps, self.dtype)
        x = self.layer(self.shape.layers, x)
        return last_norm(x, p[b + "nextn.shared_head_norm.weight"], eps)

    def logits(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype) @ self.p["output.weight"].to(self.dtype).t()

    def losses(self, tokens: Tensor, weights: Tensor, head: bool = True) -> tuple[Tensor, Tensor]:
        """Mean nats per token of the trunk and of the MTP head, 0 without it; tokens int64 [batch, length + 2], weights
        float32 of the same shape: 0 for a token that is read but that nothing should learn to predict."""
        ids, one, two = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        hidden = self.trunk(ids)
        output = self.p["output.weight"]

        def loss(rows: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            flat = rows.reshape(-1, self.shape.embd).to(self.dtype)
            value: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
                flat, output, target.reshape(-1), weight.reshape(-1)
            )
            return value

        trunk = loss(hidden, one, weights[:, 1:-1])
        return trunk, loss(self.head(hidden, one), two, weights[:, 2:]) if head else trunk.new_zeros(())
