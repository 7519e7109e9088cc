"""Muon for matrices, AdamW for the rest. Muon: momentum made orthogonal by Newton-Schulz steps (K. Jordan, 2024), with
the update scaled to AdamW's size, 0.2 sqrt(max(rows, columns)) (J. Liu et al., "Muon is scalable", 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from .shape import Plan

# Coefficients of the quintic that drives singular values towards 1 fastest (same source).
NS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon trains it: weight matrices inside the blocks, but for the routers."""
    return value.ndim >= 2 and name.startswith("blk.") and "ffn_gate_inp" not in name


def orthogonal(m: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrices with all singular values near 1; m [n, rows, columns], products and result in `dtype`."""
    x = m.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2).contiguous()
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-7).to(dtype)
    a, b, c = NS
    for _ in range(NS_STEPS):
        s = torch.bmm(x, x.transpose(1, 2))
        s = torch.baddbmm(s, s, s, beta=b, alpha=c)
        x = torch.baddbmm(x, s, x, beta=a)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """State and step over one set of parameters; matrices of one shape are updated together."""

    def __init__(self, params: dict[str, Tensor], plan: Plan, dtype: torch.dtype) -> None:
        self.params, self.plan, self.dtype, self.count = params, plan, dtype, 0
        trained = {k: v for k, v in params.items() if not k.endswith("exp_probs_b.bias")}
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, value in trained.items():
            if is_matrix(name, value):
                self.groups.setdefault((value.shape[-2], value.shape[-1]), []).append(name)
        self.momentum = {
            k: torch.zeros(sum(params[n].numel() // (k[0] * k[1]) for n in names), *k)
            for k, names in self.groups.items()
        }
        self.others = [k for k, v in trained.items() if not is_matrix(k, v)]
        self.mean = {k: torch.zeros_like(params[k]) for k in self.others}
        self.square = {k: torch.zeros_like(params[k]) for k in self.others}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from the parameters' gradients, which are cleared."""
        self.count += 1
        p = self.plan
        for (rows, columns), names in self.groups.items():
            grad = torch.cat([self._grad(n).view(-1, rows, columns) for n in names])
            m = self.momentum[rows, columns]
            m.mul_(p.momentum).add_(grad, alpha=1 - p.momentum)
            update = orthogonal(grad.lerp_(m, p.momentum), self.dtype)
            scale = rate * 0.2 * max(rows, columns) ** 0.5
            at = 0
            for n in names:
                value = self.params[n].view(-1, rows, columns)
                value.mul_(1 - rate * p.weight_decay).add_(update[at : at + len(value)], alpha=-scale)
                at += len(value)
        b1, b2 = p.betas
        c1, c2 = 1 - b1**self.count, 1 - b2**self.count
        for n in self.others:
            value, grad = self.params[n], self._grad(n)
            self.mean[n].lerp_(grad, 1 - b1)
            self.square[n].mul_(b2).addcmul_(grad, grad, value=1 - b2)
            own = rate * (p.router_rate if "ffn_gate_inp" in n else 1)
            if value.ndim > 1:
                value.mul_(1 - own * p.weight_decay)
            value.addcdiv_(self.mean[n], (self.square[n] / c2).sqrt_().add_(1e-8), value=-own / c1)

    def _grad(self, name: str) -> Tensor:
        value = self.params[name]
        grad, value.grad = value.grad, None
        return torch.zeros_like(value) if grad is None else grad

    def state(self) -> dict[str, object]:
        return {"count": self.count, "momentum": self.momentum, "mean": self.mean, "square": self.square}

    def load(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
