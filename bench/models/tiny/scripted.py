"""Models whose routes follow from the tokens: each class of tokens wants the experts in an order of its own."""

from __future__ import annotations

import random
from functools import cache

# How many classes of tokens, and how many columns of the embedding one has.
CLASSES, CLASS_WIDTH = 32, 4


def class_columns(kind: int) -> slice:
    return slice(kind * CLASS_WIDTH, (kind + 1) * CLASS_WIDTH)


@cache
def class_order(kind: int, il: int, n_expert: int) -> tuple[int, ...]:
    """All experts of a layer, the ones that a class of tokens wants most first."""
    rng = random.Random(kind * 1009 + il)
    return tuple(sorted(range(n_expert), key=lambda _: rng.random()))


def scripted_routes(token: int, il: int, n_expert: int, n_used: int) -> tuple[int, ...]:
    """The experts of layer `il` for `token` in a model written with `scripted`: on every machine, with every kernel."""
    return class_order(token % CLASSES, il, n_expert)[:n_used]
