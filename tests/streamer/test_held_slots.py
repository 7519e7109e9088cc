"""Slots of the cache that are held for what is read ahead: nobody else's, and behind what is used."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe.streamer import _cache


@pytest.mark.parametrize("policy", ["votes", "lru"])
def test_a_held_slot_is_nobodys(policy: str) -> None:
    cache = _cache.ExpertCache([8, 8], [0, 0], [4], policy, 2)
    slots = [cache.hold(0), cache.hold(1)]
    assert len(set(slots)) == 2
    cache.check()
    for epoch in range(4):  # two slots are left for what is routed
        cache.route(0, [[2 * epoch, 2 * epoch + 1]], epoch)
        assert cache.n_resident == 2
        cache.check()
    assert cache.hold(0) == -1
    assert cache.fill(1, 5, slots[1])
    assert cache.resident(1) == [5]
    cache.release(0, slots[0])
    cache.check()
    assert cache.hold(1) == slots[0]
    # What has become resident meanwhile is not there twice.
    assert not cache.fill(1, 5, slots[0])
    assert cache.resident(1) == [5]
    cache.check()
    with pytest.raises(ValueError, match="not held"):
        cache.fill(1, 6, slots[0])
    with pytest.raises(ValueError, match="not held"):
        cache.release(0, 99)


@pytest.mark.parametrize("policy", ["votes", "lru"])
def test_what_is_read_ahead_never_displaces_what_is_used(policy: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        cache = _cache.ExpertCache([8, 8], [0, 0], [6], policy, 2)
        held: list[tuple[int, int]] = []
        for epoch in range(40):
            before = [cache.resident(i) for i in range(2)]
            layer, e = int(rng.integers(2)), int(rng.integers(8))
            if held and rng.random() < 0.5:
                at, slot = held.pop()
                cache.fill(at, e, slot)
            elif (slot := cache.hold(layer)) >= 0:
                held.append((layer, slot))
            assert all(set(b) <= set(cache.resident(i)) for i, b in enumerate(before))
            cache.route(layer, [rng.permutation(8)[:2].tolist()], epoch)
            cache.check()


def test_of_equals_what_was_used_stays_longer() -> None:
    """lru: experts that were read ahead go first, the last one read before the others."""
    cache = _cache.ExpertCache([16], [0], [4], "lru", 1)
    for e in (1, 2):
        cache.fill(0, e, cache.hold(0))
    cache.access(0, [3], 0)
    cache.fill(0, 4, cache.hold(0))
    for epoch, (new, left) in enumerate(
        [(5, [1, 2, 3, 5]), (6, [1, 3, 5, 6]), (7, [3, 5, 6, 7]), (8, [5, 6, 7, 8])], 1
    ):
        cache.access(0, [new], epoch)
        assert cache.resident(0) == left
