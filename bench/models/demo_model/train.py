"""The training loop: reproducible from its seed, resumable, progress on stderr."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import model
from .batches import Batches
from .optim import Optimizer
from .shape import Plan, Shape

CHECKPOINT = "checkpoint.pt"
FINAL = "model.pt"


def keep_memory() -> None:
    """Keeps freed memory in the process: glibc would give every large tensor back and page it in again, which takes
    longer than much of the work on it (docs/demo-model.md). Linux with glibc; elsewhere nothing."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)):  # mmap max, trim threshold, top pad
                libc.mallopt(option, value)


def product_type() -> torch.dtype:
    """The type of matrix products: bfloat16 where the processor multiplies it, else float32, which is then faster."""
    can = torch.cpu.get_capabilities()
    return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32


def move_bias(bias: Tensor, load: Tensor, plan: Plan, rate: float) -> None:
    """Moves the selection bias of experts that are used too little or too much (Wang et al., 2024, loss-free).

    Between `load_low` and `load_high` of the mean load an expert is left alone: experts that are all used alike would
    leave a cache nothing to hold.
    """
    share = load.float() * len(load) / load.sum()
    bias.add_((share < plan.load_low).float(), alpha=rate).sub_((share > plan.load_high).float(), alpha=rate)


def run(work: Path, shape: Shape, plan: Plan, compiled: bool = True, every: float = 120.0) -> Iterator[dict[str, Any]]:
    """Trains from the last checkpoint in `work`, or from scratch; yields a report about every 20 steps.

    Writes a checkpoint every `every` seconds and the final model at the end. Raises ValueError if the checkpoint is
    of another shape or plan.
    """
    batches = Batches.of(work, plan, shape.vocab)
    params, step, dtype = model.init(shape, plan.seed), 0, product_type()
    optimizer = Optimizer(params, plan, dtype)
    spent, path = 0.0, work / CHECKPOINT
    if path.exists():
        saved = torch.load(path, weights_only=True)
        if saved["shape"] != repr(shape) or saved["plan"] != repr(plan):
            raise ValueError(f"{path} is of another shape or plan: remove it, or use another --work")
        params, step, spent = saved["params"], saved["step"], saved["spent"]
        optimizer = Optimizer(params, plan, dtype)
        optimizer.load(saved["optimizer"])
    if compiled:
        model.compile_parts()
    for name, value in params.items():
        value.requires_grad_(not name.endswith("exp_probs_b.bias"))
    net = model.Network(shape, params, dtype)
    started = saved_at = last = time.monotonic()
    done = sums = 0
    totals = torch.zeros(2)
    while step < plan.steps:
        tokens, weights = batches.at(step)
        loss, mtp = net.losses(torch.from_numpy(tokens), torch.from_numpy(weights), plan.heads_at(step))
        (loss + plan.mtp_weight * mtp).backward()  # type: ignore[no-untyped-call]
        rate = plan.rate_at(step)
        optimizer.step(rate)
        for i, load in enumerate(net.loads):
            move_bias(params[f"blk.{i}.exp_probs_b.bias"], load, plan, plan.bias_rate * rate / plan.rate)
        step, sums, done = step + 1, sums + 1, done + plan.batch_tokens
        totals += torch.stack((loss.detach(), mtp.detach()))
        now = time.monotonic()
        if sums == 20 or step == plan.steps:
            spread = max(float(load.max() / load.float().mean()) for load in net.loads)
            yield {
                "step": step,
                "of": plan.steps,
                "loss": float(totals[0] / sums),
                "mtp": float(totals[1] / sums),
                "tok_s": sums * plan.batch_tokens / (now - last),
                "minutes": (spent + now - started) / 60,
                "left": (plan.steps - step) * (now - started) / 60 / max(1, done // plan.batch_tokens),
                "load": spread,
            }
            totals, sums, last = torch.zeros(2), 0, now
        if now - saved_at > every or step == plan.steps:
            state = {
                "shape": repr(shape), "plan": repr(plan), "step": step, "spent": spent + now - started,
                "params": {k: v.detach() for k, v in params.items()}, "optimizer": optimizer.state(),
            }  # fmt: skip
            target = path if step < plan.steps else work / FINAL
            temporary = target.with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, target)
            saved_at = now
