"""What each drafter must draft, in plain Python that is checked by eye: lists, dicts and scans, no index.

Every class takes the settings of `bmoe.drafting.make` and has `begin(prompt)`, `draft(history, last)` and
`accept(n)`. `compat=True` is llama.cpp's behaviour (common/ngram-map, common/ngram-mod and the driver around it),
`compat=False` the mended one of docs/drafting.md. Histories are lists of int.
"""

from __future__ import annotations


class HistoryShrank(Exception):
    """Where llama.cpp aborts."""


class Reference:
    """Notices a history that no longer continues the last one: by default that starts a new request."""

    def __init__(self, compat: bool = False) -> None:
        self.compat = compat
        self.known: list[int] = []
        self.drafted = 0

    def begin(self, prompt: list[int]) -> None:
        self.known = list(prompt)
        self.drafted = 0
        self.forget()
        self.prompt(list(prompt))

    def draft(self, history: list[int], last: int, n_max: int | None = None) -> list[int]:
        text = [*history, last]
        if text[: len(self.known)] != self.known and not self.compat:
            self.begin(history)
        self.known = text
        tokens = self.propose(text)[:n_max]
        self.drafted = len(tokens)
        return tokens

    def accept(self, n: int) -> None:
        if self.drafted:
            self.settle(n)
        self.drafted = 0

    def forget(self) -> None:
        """Drops what was learnt from the last request."""

    def prompt(self, tokens: list[int]) -> None:
        """Learns a prompt."""

    def propose(self, text: list[int]) -> list[int]:
        raise NotImplementedError

    def settle(self, n: int) -> None:
        """Learns how many of `drafted` tokens were accepted."""


class Ngram(Reference):
    def __init__(self, *, min_match: int = 3, max_match: int = 16, n_max: int = 3, compat: bool = False) -> None:
        super().__init__(compat)
        self.min_match, self.max_match, self.n_max = min_match, max_match, n_max

    def propose(self, text: list[int]) -> list[int]:
        best, place = 0, 0
        for end in range(1, len(text)):
            size = 0
            while size < min(end, self.max_match) and text[end - 1 - size] == text[-1 - size]:
                size += 1
            if size >= best:
                best, place = size, end
        return text[place : place + self.n_max] if best >= self.min_match else []


class NgramSimple(Reference):
    def __init__(self, *, size_n: int = 12, size_m: int = 48, min_hits: int = 1, compat: bool = False) -> None:
        super().__init__(compat)
        self.n, self.m, self.min_hits = size_n, size_m, min_hits

    def propose(self, text: list[int]) -> list[int]:
        n, m = self.n, self.m
        key, first = text[len(text) - n :], 0
        shortest = min(n, m)
        if self.compat:
            if len(text) - 1 <= n + m + 1:
                return []
            # The last token is no part of the history: one possible match less, and its continuation is one shorter.
            text, first, shortest = text[:-1], 1, n
        found = [p for p in range(first, len(text) - n) if text[p : p + n] == key]
        if not found or (len(found) < self.min_hits and not self.compat):
            return []
        follow = text[found[-1] + n :][:m]
        return follow if len(follow) >= shortest else []


class Key:
    """What is known of one n-gram: where it was found, its lookups, up to four continuations."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.counted = 0
        self.hits = 0
        self.values: list[list[int]] = []  # [place, count, limit]
        self.limit: int | None = None  # ngram-map-k: of its only continuation


class NgramMap(Reference):
    def __init__(
        self,
        *,
        size_n: int = 12,
        size_m: int = 48,
        min_hits: int = 1,
        four_values: bool = False,
        compat: bool = False,
    ) -> None:
        super().__init__(compat)
        self.n, self.m, self.min_hits = size_n, size_m, min_hits
        self.four_values = four_values
        self.clear()
        self.n_begin = self.n_checked = 0

    def clear(self) -> None:
        self.slots: dict[int, int] = {}
        self.slots_last = 0
        self.keys: list[Key] = []
        self.used: tuple[Key, int] | None = None

    def forget(self) -> None:
        if not self.compat:
            self.clear()

    def prompt(self, tokens: list[int]) -> None:
        size, self.used = len(tokens), None
        if self.compat and size < self.n_checked:
            first = self.n_begin
            if first > size:
                first = max(size - self.n - self.m, 0)
            self.slots = {slot: p for slot, p in self.slots.items() if p < first}
            self.slots_last = max(first - 1, 0)
            kept = []
            for key in self.keys:
                if key.at >= first:
                    continue
                if self.four_values:
                    key.values = [v for v in key.values if v[0] < first]
                    if not key.values:
                        continue
                kept.append(key)
            self.keys = kept
        self.n_begin = self.n_checked = size

    def slot(self, gram: list[int]) -> int:
        value = 0
        for token in gram:
            value = (value * 2654435761 + token) % 2**32
        return value % 262144

    def propose(self, text: list[int]) -> list[int]:
        self.used = None
        n, m, cur = self.n, self.m, len(text) - 1
        if cur < 2 * n + m:
            return []
        if self.compat and max(self.n_checked, self.n_begin) > cur:
            raise HistoryShrank
        self.n_checked = cur
        gram, end = text[len(text) - n :], cur - n - m - 1

        # An earlier place: the one in the slot, else the last in the prompt, else the last generated; of
        # positions that the slots have not seen, and without the prompt's last n + m + 1.
        match = self.slots.get(self.slot(gram), 0)
        if not (0 < match < end and text[match : match + n] == gram):
            match = 0
        ranges = [
            range(self.n_begin - n - m - 1, self.slots_last, -1),
            range(end, max(self.n_begin, self.slots_last), -1),
        ]
        for places in ranges:
            for p in places:
                if match == 0 and text[p : p + n] == gram:
                    match = p
                self.slots.setdefault(self.slot(text[p : p + n]), p)
        self.slots_last = max(self.slots_last, end)
        if match == 0:
            return []

        key = self.key(text, gram, match)
        key.hits = min(key.hits + 1, 16380)
        if not self.four_values:
            if key.limit is None:
                key.limit = m
            if key.hits < self.min_hits and not self.compat:
                return []
            self.used = (key, 0)
            return text[match + n :][: min(m, key.limit)]
        if key.hits < self.min_hits:
            return []
        for p in range(key.counted, match + 1):
            if text[p : p + n] == gram:
                self.count(text, key, p + n)
        key.counted = match
        return self.choose(key, text[match + n :])

    def key(self, text: list[int], gram: list[int], at: int) -> Key:
        for key in self.keys:
            if text[key.at : key.at + self.n] == gram:
                return key
        self.keys.append(Key(at))
        return self.keys[-1]

    def count(self, text: list[int], key: Key, at: int) -> None:
        for value in key.values:
            if text[value[0] : value[0] + self.m] == text[at : at + self.m]:
                value[1] = min(value[1] + 1, 16380)
                return
        if len(key.values) < 4:
            key.values.append([at, 1, self.m])

    def choose(self, key: Key, follow: list[int]) -> list[int]:
        counts = [value[1] for value in key.values]
        best = counts.index(max(counts))
        others = sum(counts) - counts[best]
        if others and counts[best] < 2 * others:
            return []
        self.used = (key, best)
        return follow[: min(self.m, key.values[best][2])]

    def settle(self, n: int) -> None:
        if self.used is None:
            return
        key, v = self.used
        limit = key.values[v][2] if self.four_values else key.limit
        assert limit is not None
        if self.compat:
            limit = n
        elif n < self.drafted:
            limit = max(n, 1)
        else:
            limit = min(self.m, max(limit, 2 * n))
        if self.four_values:
            key.values[v][2] = limit
        else:
            key.limit = limit


class NgramMod(Reference):
    def __init__(
        self,
        *,
        n_match: int = 24,
        n_min: int = 48,
        n_max: int = 64,
        table_size: int = 4194304,
        compat: bool = False,
    ) -> None:
        super().__init__(compat)
        self.n, self.n_min, self.n_max = n_match, n_min, n_max
        self.size = table_size
        self.table: dict[int, int] = {}
        self.added = 0
        self.low = 0
        self.whole = 0
        self.catch_up = False

    def hash(self, gram: list[int]) -> int:
        value = 0
        for token in gram:
            value = (value * 6364136223846793005 + token) % 2**64
        return value

    def forget(self) -> None:
        if not self.compat:
            self.table, self.low, self.catch_up = {}, 0, False

    def prompt(self, tokens: list[int]) -> None:
        self.added = self.whole = 0
        if len(tokens) >= self.n:
            self.add(tokens)
            if self.compat and len(self.table) / self.size > 0.25:
                self.table = {}

    def add(self, tokens: list[int]) -> None:
        for p in range(self.added, len(tokens) - self.n):
            self.table[self.hash(tokens[p : p + self.n]) % self.size] = tokens[p + self.n]
        self.added = len(tokens) - self.n

    def propose(self, text: list[int]) -> list[int]:
        self.whole = 0
        cur = len(text) - 1
        if cur < self.n:
            return []
        if self.added + 32 < cur or (self.catch_up and cur > 32):
            self.add(text[:-1])
            self.catch_up = False
        window = text[len(text) - self.n :]
        for k in range(self.n_max):
            token = self.table.get(self.hash(window[k:]) % self.size, -1)
            if token == -1:
                if k < self.n_min:
                    return []
                break
            window.append(token)
        self.whole = len(window) - self.n
        return window[self.n :]

    def settle(self, n: int) -> None:
        if n >= 0.25 * (self.whole if self.compat else self.drafted):
            self.low = 0
            return
        self.low += 1
        if self.low == 5:
            self.low = 0
            if self.compat:
                self.table, self.added = {}, 0
            else:
                self.catch_up = True


def make(name: str, **config) -> Reference:  # type: ignore[no-untyped-def]
    """The reference of `bmoe.drafting.make`."""
    if name in ("ngram-map-k", "ngram-map-k4v"):
        return NgramMap(four_values=name == "ngram-map-k4v", **config)
    return {"ngram": Ngram, "ngram-simple": NgramSimple, "ngram-mod": NgramMod}[name](**config)
