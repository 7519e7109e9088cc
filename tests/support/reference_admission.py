"""The votes policy in plain Python: tokens as objects, sums from scratch, candidates in sorted lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WINDOW, PROMPT_ROWS = 128, 32
EXPS = [math.floor(16 * math.exp(i / 16) + 0.5) for i in range(193)]
RECENCY = [math.floor(65536 * 0.15 / (age + 1) + 0.5) for age in range(WINDOW)]
SHARPNESS = 10 * 16


@dataclass(eq=False)
class PastToken:
    """A token of the window: its experts by layer, and how many of the newest token's it shares."""

    rows: dict[int, list[int]] = field(default_factory=dict)
    alike: int = 0


class PlainVotes:
    """As ExpertCache with policy "votes": `batch` is `route`, `prompt` and `reject` as there."""

    def __init__(
        self,
        layer_class: Sequence[int],
        class_slots: Sequence[int],
        n_expert: int,
        n_used: int,
        quotas: Sequence[int] | None = None,
    ) -> None:
        self.layer_class, self.class_slots, self.quotas = layer_class, class_slots, quotas
        self.n_used, self.n_layers = n_used, len(layer_class)
        self.scores: dict[tuple[int, int], int] = {}
        self.seen: set[tuple[int, int]] = set()
        self.tokens: list[PastToken] = []
        self.batch_tokens: list[PastToken] = []
        self.prompt_left = -1
        self.counted, self.weighed, self.total = 0, -1, 1
        self.voters: list[tuple[PastToken, int]] = []
        self.hits = self.misses = self.evictions = self.rereads = self.streamed = 0
        self.victims: list[tuple[int, int]] = []
        full = [sum(n_expert for k in layer_class if k == c) for c in range(len(class_slots))]
        self.scoring = any(0 < n < m for n, m in zip(class_slots, full, strict=True))

    def prompt(self, left: int) -> None:
        self.prompt_left = left

    def reject(self, n: int) -> None:
        for _ in range(min(n, len(self.batch_tokens)) if self.scoring else 0):
            self.batch_tokens.pop()
            self.tokens.pop().rows.clear()

    def batch(self, layer: int, tokens: Iterable[Iterable[int]]) -> tuple[list[int], list[int]]:
        """One layer's routed experts, token by token; the hits and the misses, latest token's first."""
        rows = [list(dict.fromkeys(token)) for token in tokens]
        votes = self._vote(layer, rows) if self.scoring else {}
        for la, e in self.scores:
            if la == layer:
                self.scores[la, e] = votes.get(e, 0)
        experts = list(dict.fromkeys(e for row in reversed(rows) for e in row))
        n_keep = len(experts)
        if self.quotas is not None and len(rows) > 1:
            n_keep = min(n_keep, self.quotas[layer])
        hits = [e for e in experts if (layer, e) in self.scores]
        misses = [e for e in experts if (layer, e) not in self.scores]
        pinned = {(layer, e) for e in hits}
        for e in misses:
            self.rereads += (layer, e) in self.seen
            self.seen.add((layer, e))
            if e in experts[:n_keep] and self._make_room(layer, votes.get(e, 0), pinned):
                self.scores[layer, e] = votes.get(e, 0)
                pinned.add((layer, e))
            else:
                self.streamed += 1
        self.hits += len(hits)
        self.misses += len(misses)
        return hits, misses

    def _vote(self, layer: int, rows: list[list[int]]) -> dict[int, int]:
        if layer == 0:
            keep = len(rows)
            if self.prompt_left >= 0:
                keep = max(0, min(keep, PROMPT_ROWS - self.prompt_left))
            self.batch_tokens = [PastToken() for _ in range(min(keep, WINDOW))]
            self.tokens = (self.tokens + self.batch_tokens)[-WINDOW:]
            for token in self.tokens:
                token.alike = 0
            self.counted, self.weighed = 0, -1
        recorded = min(len(rows), len(self.batch_tokens))
        for i in range(1, recorded + 1):
            self.batch_tokens[-i].rows[layer] = rows[-i][: self.n_used]
        newest = self.tokens[-1].rows.get(layer, []) if self.tokens else []
        for token in self.tokens:
            token.alike += len(set(newest) & set(token.rows.get(layer, [])))
        self.counted += len(newest)
        if self.weighed < 0 or self.counted * 4 >= self.weighed * 5:
            self._weigh()
        votes: dict[int, int] = {}
        for token, weight in self.voters:
            for e in token.rows.get(layer, []):
                votes[e] = votes.get(e, 0) + weight
        norm = (1 << 40) // self.total
        return {e: v * norm >> 20 for e, v in votes.items()}

    def _weigh(self) -> None:
        by_age = self.tokens[::-1]
        scale = (SHARPNESS << 20) // max(1, self.counted + self.n_used)
        x = [EXPS[min(token.alike * scale >> 20, 192)] for token in by_age]
        self.total = 6 * max(16, sum(x[1:]))
        x += [0, 0]
        self.voters = []
        for age, token in enumerate(by_age):
            weight = 4 * x[age + 1] + 2 * x[age + 2] + (self.total * RECENCY[age] >> 16)
            self.voters.append((token, weight))
        self.weighed = self.counted

    def _make_room(self, layer: int, score: int, pinned: set[tuple[int, int]]) -> bool:
        kind = self.layer_class[layer]
        kept = [key for key in self.scores if self.layer_class[key[0]] == kind]
        if len(kept) < self.class_slots[kind]:
            return True
        candidates = []
        for la in range(self.n_layers):
            own = [key for key in kept if key[0] == la and key not in pinned]
            if own:
                victim = min(own, key=lambda key: (self.scores[key], -key[1]))
                away = (la - layer) % self.n_layers or self.n_layers
                candidates.append((self.scores[victim] * (2 * self.n_layers - away), la, victim))
        if not candidates or score * self.n_layers < min(candidates)[0]:
            return False
        victim = min(candidates)[2]
        self.victims.append(victim)
        del self.scores[victim]
        self.evictions += 1
        return True

    def clear(self) -> None:
        self.scores.clear()

    def resident(self, layer: int) -> list[int]:
        return sorted(e for la, e in self.scores if la == layer)
