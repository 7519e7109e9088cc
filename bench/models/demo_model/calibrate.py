"""One temperature for the trunk and one for the head: text that came more than once has left the model too sure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Network
from .text import WINDOW

TEMPERATURES = tuple(0.8 + 0.02 * i for i in range(41))  # 0.8 to 1.6


def nats(logits: Tensor, target: Tensor) -> list[float]:
    """Nats of `target` int64 [n] by logits float32 [n, vocab], for each of `TEMPERATURES`."""
    return [float(F.cross_entropy(logits / t, target, reduction="sum")) for t in TEMPERATURES]


def temperatures(net: Network, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """What the logits of trunk and head must be divided by to predict `texts`, token ids, best (Guo et al., 2017)."""
    totals = torch.zeros(2, len(TEMPERATURES), dtype=torch.float64)
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([list(text[: WINDOW + 1])])
            if ids.shape[1] < 4:
                continue
            hidden = net.trunk(ids[:, :-1])
            head = net.head(hidden[:, :-1], ids[:, 1:-1])
            for i, (rows, target) in enumerate(((hidden, ids[0, 1:]), (head, ids[0, 2:]))):
                totals[i] += torch.tensor(nats(net.logits(rows)[0].float(), target), dtype=torch.float64)
    trunk, head_ = (TEMPERATURES[int(i)] for i in totals.argmin(1))
    return trunk, head_


def apply(params: dict[str, Tensor], layers: int, trunk: float, head: float) -> dict[str, Tensor]:
    """`params` with the last norms of trunk and head divided by their temperatures; no choice changes by it.

    The head norms the rows that it reads, so that it sees no difference either.
    """
    names = {"output_norm.weight": trunk, f"blk.{layers}.nextn.shared_head_norm.weight": head}
    return {name: value / names[name] if name in names else value for name, value in params.items()}
