"""What the gates run: token streams and routes that are the same on every machine and with every release of numpy."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def _ids(rng: random.Random, n: int, below: int) -> list[int]:
    # random() is the one method whose stream Python promises to keep.
    return [int(rng.random() * below) for _ in range(n)]


def edited_copy(n: int, seed: int = 1, below: int = 32000) -> Tokens:
    """A text of n / 4 tokens, then three copies of it, in which one token of thirty is another."""
    rng = random.Random(seed)
    part = _ids(rng, n // 4, below)
    text = part + [int(rng.random() * below) if rng.random() < 1 / 30 else t for t in part * 3]
    return np.array(text, np.int32)


def loops(n: int, seed: int = 2, below: int = 32000) -> Tokens:
    """Phrases of 5 to 40 tokens, each repeated a few times before the next: what a model that lists things writes."""
    rng = random.Random(seed)
    text: list[int] = []
    while len(text) < n:
        phrase = _ids(rng, 5 + int(rng.random() * 36), below)
        for _ in range(2 + int(rng.random() * 4)):
            text += [*phrase, int(rng.random() * below)]
    return np.array(text[:n], np.int32)


def noise(n: int, seed: int = 3, below: int = 32000) -> Tokens:
    """Nothing to draft from."""
    return np.array(_ids(random.Random(seed), n, below), np.int32)


STREAMS: dict[str, Callable[[int], Tokens]] = {"edited copy": edited_copy, "loops": loops, "noise": noise}


def routes(n_tokens: int, n_layers: int, n_expert: int, k: int, seed: int = 4) -> Tokens:
    """Routed experts, int32 [tokens, layers, k]: a topic that changes now and then prefers a part of the experts."""
    rng = random.Random(seed)
    out = np.empty((n_tokens, n_layers, k), np.int32)
    liked: list[list[int]] = []
    for token in range(n_tokens):
        if token % 24 == 0:
            liked = [_ids(rng, n_expert // 3, n_expert) for _ in range(n_layers)]
        for layer in range(n_layers):
            row: list[int] = []
            while len(row) < k:
                pool = liked[layer] if rng.random() < 0.7 else range(n_expert)
                e = pool[int(rng.random() * len(pool))]
                if e not in row:
                    row.append(e)
            out[token, layer] = row
    return out


LAYERS, EXPERTS, USED, SLOTS = 8, 64, 6, 160
"""Of the planning step's script: slots for a third of the experts."""


def rows(routed: Tokens) -> Tokens:
    """`routes` as one row for each token and layer: int32 [tokens * layers, 1 + k], the layer first."""
    return np.array([[layer, *row] for token in routed for layer, row in enumerate(token)], np.int32)


def batches(rows: Tokens) -> list[tuple[int, list[int]]]:
    """The same as `ExpertCache.time_tokens` takes it."""
    return [(int(row[0]), row[1:].tolist()) for row in rows]
