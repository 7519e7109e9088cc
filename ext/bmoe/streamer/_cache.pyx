# cython: language_level=3
"""The expert cache's index: which expert is in which slot, and which slot is given up next.

No I/O, no ggml: the same code serves the engine (under nogil) and replays of recorded routes. Slots are
fixed; experts of one size share a class of slots, so that nothing is ever moved or resized. A slot that the
current layer needs is pinned by an epoch number. Within a class one of two policies chooses:

- votes (`cache_votes.pxi`): every expert of a layer is scored when the layer is routed (`_admission.pyx`). Given up is
  the lowest score of any layer of the class, weighed by how soon the layer comes round again; a miss that scores less
  gets no slot.
- lru (`cache_lru.pxi`): least recently used.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from bmoe.streamer._admission cimport (votes_begin, votes_compare, votes_constants, votes_free, votes_init, votes_note,
                                       votes_of, votes_reject)
from bmoe.streamer._alloc cimport zeroed

# Constants of the votes policy, chosen on recorded routes: docs/eviction.md.
SHARPNESS = 10.0    # exponent of a token with the same routes
RECENCY = 0.15      # of a vote by age alone, divided by the age + 1
SECOND = 0.5        # weight of the second token after an alike one

include "cache_lru.pxi"
include "cache_votes.pxi"
include "cache_index.pxi"


cdef struct Batch:        # a layer's batch that Python routes
    int *experts
    int *slots
    unsigned char *hit
    unsigned char *again


cdef int _batch_init(Batch *b, int n) except -1:
    memset(b, 0, sizeof(Batch))
    try:
        b.experts = <int *>zeroed(n, sizeof(int))
        b.slots = <int *>zeroed(n, sizeof(int))
        b.hit = <unsigned char *>zeroed(n, 1)
        b.again = <unsigned char *>zeroed(n, 1)
    except MemoryError:
        _batch_free(b)
        raise
    return 0


cdef void _batch_free(Batch *b) noexcept nogil:
    free(b.experts)
    free(b.slots)
    free(b.hit)
    free(b.again)
    memset(b, 0, sizeof(Batch))


cdef void _place(Cache *c, int layer, Batch *b, int n, int n_keep, int epoch) noexcept nogil:
    cdef int x
    cache_place(c, layer, b.experts, n, n_keep, epoch, b.slots, b.hit, b.again)
    for x in range(n):
        if not b.hit[x]:
            c.counts.rereads += b.again[x]


cdef class ExpertCache:
    """Index of the expert cache.

    `n_expert`: experts of each layer. `layer_class`: size class of each layer (0, 1, ...). `class_slots`:
    slots of each class. `policy`: "votes" or "lru". `n_used`: experts that a token routes in a layer, at most;
    more of them have no vote. Raises ValueError where they do not fit together.
    """

    def __cinit__(self, list n_expert, list layer_class, list class_slots, str policy="votes", int n_used=16):
        if policy not in ("votes", "lru"):
            raise ValueError(f"no cache policy {policy!r}")
        if len(n_expert) != len(layer_class):
            raise ValueError("n_expert and layer_class must have one entry for each layer")
        if layer_class and not 0 <= min(layer_class) <= max(layer_class) < len(class_slots):
            raise ValueError("layer_class names a class that class_slots does not have")
        if class_slots and min(class_slots) < 0:
            raise ValueError("class_slots must not be negative")
        if n_expert and not 0 < min(n_expert) <= max(n_expert) <= 1 << 16:
            raise ValueError("n_expert must be 1 to 65536")
        if not 0 < n_used < 256:
            raise ValueError("n_used must be 1 to 255")
        _cache_init(&self.c, n_expert, layer_class, class_slots, POLICY_VOTES if policy == "votes" else POLICY_LRU,
                    n_used)
        votes_constants(&self.c.votes, SHARPNESS, RECENCY, SECOND)

    def __dealloc__(self):
        _cache_free(&self.c)

    @property
    def policy(self):
        return "votes" if self.c.policy == POLICY_VOTES else "lru"

    def access(self, int layer, list experts, int epoch):
        """One token's routed experts of one layer: `(hits, misses)`, each a list of expert ids; see `route`."""
        return self.route(layer, [experts], epoch)

    def route(self, int layer, rows, int epoch, quota=None, routed=None):
        """One routed batch of one layer, a row of experts for each token: `(hits, misses)`, each expert once.

        The sequence that the engine follows, the latest token's experts first: pin the resident ones, admit the
        others while there are slots, and leave the first the most recently used, the last the least. A batch of
        several tokens with more than `quota` experts admits the first `quota` only. `routed`: what the router asked
        for, where some of it was dropped and `rows` is what remains.
        Raises ValueError for a layer or expert out of range.
        """
        cdef Cache *c = &self.c
        cdef int e, x, n, n_keep, tok, n_tok = len(rows)
        cdef Batch b
        if not 0 <= layer < c.n_layers:
            raise ValueError(f"no layer {layer}")
        asked = rows if routed is None else routed
        if len(asked) != n_tok:
            raise ValueError(f"{len(asked)} rows were routed, {n_tok} remain")
        for row in [*rows, *asked]:
            for e in row:
                if not 0 <= e < c.n_expert[layer]:
                    raise ValueError(f"no expert {e} in layer {layer}")
        experts = list(dict.fromkeys(e for row in reversed(rows) for e in row))
        n = len(experts)
        n_keep = n if quota is None or n_tok < 2 else min(n, quota)
        _batch_init(&b, n)
        try:
            for x in range(n):
                b.experts[x] = experts[x]
            cache_begin(c, layer, n_tok)
            for tok, row in enumerate(asked):
                for e in dict.fromkeys(row):
                    cache_note(c, layer, n_tok, tok, e)
            cache_score(c, layer)
            _place(c, layer, &b, n, n_keep, epoch)
            return ([e for x, e in enumerate(experts) if b.hit[x]], [e for x, e in enumerate(experts) if not b.hit[x]])
        finally:
            _batch_free(&b)

    def time_tokens(self, list batches):
        """Nanoseconds that the policy takes for single-token `batches` of `(layer, experts)`, in order.

        What the engine calls for each, without what Python adds. Raises ValueError for what is out of range.
        """
        cdef Cache *c = &self.c
        cdef int i, j, layer, n = len(batches), most = 0, total = 0
        cdef int *flat
        cdef int *at
        cdef Batch b
        cdef timespec t0, t1
        for layer, experts in batches:
            if not (0 <= layer < c.n_layers and all([0 <= e < c.n_expert[layer] for e in experts])):
                raise ValueError(f"layer {layer}, experts {experts}: out of range")
            if len(set(experts)) < len(experts):
                raise ValueError(f"layer {layer}, experts {experts}: one is there twice")
            most = max(most, len(experts))
            total += len(experts)
        _batch_init(&b, most)
        try:
            flat = at = <int *>zeroed(total + 2 * n, sizeof(int))
        except MemoryError:
            _batch_free(&b)
            raise
        for layer, experts in batches:
            at[0] = layer
            at[1] = len(experts)
            for j, e in enumerate(experts):
                at[2 + j] = e
            at += 2 + len(experts)
        at = flat
        with nogil:
            clock_gettime(CLOCK_MONOTONIC, &t0)
            for i in range(n):
                layer = at[0]
                cache_begin(c, layer, 1)
                for j in range(at[1]):
                    cache_note(c, layer, 1, 0, at[2 + j])
                    b.experts[j] = at[2 + j]
                cache_score(c, layer)
                _place(c, layer, &b, at[1], at[1], i)
                at += 2 + at[1]
            clock_gettime(CLOCK_MONOTONIC, &t1)
        free(flat)
        _batch_free(&b)
        return (t1.tv_sec - t0.tv_sec) * 1000000000 + t1.tv_nsec - t0.tv_nsec

    def prompt(self, int left):
        """Tells of the phase of the batches to come: `left` tokens of the prompt follow the next one; -1: decode.

        The last tokens of a prompt have votes, the others have not: a long prompt leaves decode's in place.
        """
        self.c.votes.prompt_left = left

    def reject(self, int n):
        """Takes back the votes of the last `n` tokens of the batch before: drafts that were not accepted."""
        if self.c.scoring:
            votes_reject(&self.c.votes, n)

    def constants(self, double sharpness=SHARPNESS, double recency=RECENCY, double second=SECOND):
        """Other constants of the votes policy, for measurements. Raises ValueError out of range."""
        if not (0 <= sharpness <= 12 and 0 <= recency <= 0.2 and 0 <= second <= 1):
            raise ValueError("sharpness is 0 to 12, recency 0 to 0.2, second 0 to 1")
        votes_constants(&self.c.votes, sharpness, recency, second)

    def hold(self, int layer):
        """Takes an empty slot of the class of `layer` out of the index, for an expert to be read ahead; -1: none."""
        return cache_hold(&self.c, layer) if 0 <= layer < self.c.n_layers else -1

    def fill(self, int layer, int expert, int slot):
        """Makes a held slot that of an expert, last in line to stay; False, and the slot empty, where it is resident.

        Raises ValueError for a layer, expert or slot that is out of range or not held.
        """
        self._check_held(layer, slot)
        if not 0 <= expert < self.c.n_expert[layer]:
            raise ValueError(f"no expert {expert} in layer {layer}")
        return bool(cache_fill(&self.c, layer, expert, slot))

    def release(self, int layer, int slot):
        """Gives a held slot back, empty. Raises ValueError as `fill` does."""
        self._check_held(layer, slot)
        cache_release(&self.c, layer, slot)

    def _check_held(self, int layer, int slot):
        cdef Class *k
        if not 0 <= layer < self.c.n_layers:
            raise ValueError(f"no layer {layer}")
        k = &self.c.classes[self.c.cls[layer]]
        if not (k.first <= slot < k.first + k.count and k.n_held > 0 and self.c.slots[slot].layer < 0):
            raise ValueError(f"slot {slot} is not held for layer {layer}")

    def forget(self, int layer, int expert):
        """Takes an expert out of the cache; nothing where it is not in it."""
        cdef int s = cache_find(&self.c, layer, expert)
        if s >= 0:
            cache_forget(&self.c, s)

    def scores(self, int layer):
        """Scores of the resident experts of `layer` when it was last routed, by expert, in 1/2^20 (for tests)."""
        cdef int i, first = self.c.base[layer]
        return {self.c.slots[self.c.kept[i]].expert: self.c.keys[i] >> 16
                for i in range(first, first + self.c.n_kept[layer])}

    def resident(self, int layer):
        """Experts of `layer` that are in the cache, ascending."""
        cdef int e
        return [e for e in range(self.c.n_expert[layer]) if self.c.table[self.c.base[layer] + e] >= 0]

    def clear(self):
        """Forgets every resident expert; counters stay."""
        cdef int s
        for s in range(self.c.n_slots):
            cache_forget(&self.c, s)

    @property
    def n_slots(self):
        return self.c.n_slots

    @property
    def n_resident(self):
        return self.c.n_resident

    def counters(self):
        """`(hits, misses, evictions, rereads)` since the start, in routed experts of a batch."""
        cdef CacheCounts *counts = &self.c.counts
        return counts.hits, counts.misses, counts.evictions, counts.rereads

    def check(self):
        """Raises AssertionError where table, slots and lists disagree (for tests)."""
        cdef Cache *c = &self.c
        cdef int i, j, s, n, resident = 0
        for i in range(c.n_layers):
            for e in range(c.n_expert[i]):
                s = c.table[c.base[i] + e]
                if s >= 0:
                    assert c.slots[s].layer == i and c.slots[s].expert == e, (i, e, s)
                    assert c.classes[c.cls[i]].first <= s < c.classes[c.cls[i]].first + c.classes[c.cls[i]].count
                    resident += 1
        assert resident == c.n_resident, (resident, c.n_resident)
        for i in range(c.n_classes):
            n, s = 0, c.classes[i].empty if c.policy == POLICY_VOTES else c.classes[i].head
            while s >= 0:
                n += 1
                assert n <= c.n_slots
                assert c.policy == POLICY_LRU or c.slots[s].layer == -1, s
                s = c.slots[s].next_empty if c.policy == POLICY_VOTES else c.slots[s].next
            if c.policy == POLICY_VOTES:
                n += sum(c.n_kept[j] for j in range(c.n_layers) if c.cls[j] == i)
            assert n + c.classes[i].n_held == c.classes[i].count
        if c.policy == POLICY_VOTES:
            for i in range(c.n_layers):
                n = c.base[i]
                kept = [(c.keys[j], c.slots[c.kept[j]].expert) for j in range(n, n + c.n_kept[i])]
                assert sorted(e for _, e in kept) == self.resident(i), i
                assert all(key & 0xffff == 0xffff - e for key, e in kept), i
                assert c.lowest[i] == (kept.index(min(kept)) if kept else -1), i
