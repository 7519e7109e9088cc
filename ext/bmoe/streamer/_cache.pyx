# cython: language_level=3
"""The expert cache's index: which expert is in which slot, and which slot is given up next.

No I/O, no ggml: the same code serves the engine (under nogil) and replays of recorded routes. Slots are
fixed; experts of one size share a class of slots, so that nothing is ever moved or resized. A slot that the
current layer needs is pinned by an epoch number. Within a class one of two policies chooses:

- votes: every expert of a layer is scored when the layer is routed (`votes.pyx`). Given up is the lowest score of any
  layer of the class, weighed by how soon the layer comes round again; a miss that scores less gets no slot.
- lru: least recently used.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from bmoe.streamer._admission cimport (votes_begin, votes_constants, votes_free, votes_init, votes_note, votes_of, votes_reject,
                          votes_compare)

# Constants of the votes policy, chosen on recorded routes: docs/eviction.md.
SHARPNESS = 10.0    # exponent of a token with the same routes
RECENCY = 0.15      # of a vote by age alone, divided by the age + 1
SECOND = 0.5        # weight of the second token after an alike one

cdef void _unlink(Cache *c, Class *k, int s) noexcept nogil:
    cdef Slot *x = &c.slots[s]
    if x.prev >= 0:
        c.slots[x.prev].next = x.next
    else:
        k.head = x.next
    if x.next >= 0:
        c.slots[x.next].prev = x.prev
    else:
        k.tail = x.prev


cdef void _push_front(Cache *c, Class *k, int s) noexcept nogil:
    cdef Slot *x = &c.slots[s]
    x.prev = -1
    x.next = k.head
    if k.head >= 0:
        c.slots[k.head].prev = s
    else:
        k.tail = s
    k.head = s


include "cache_votes.pxi"


# ---- what the plan of a layer calls -----------------------------------------------------------------

cdef void cache_begin(Cache *c, int layer, int n_tok) noexcept nogil:
    if c.scoring:
        votes_begin(&c.votes, layer, n_tok)


cdef void cache_note(Cache *c, int layer, int n_tok, int tok, int expert) noexcept nogil:
    if c.scoring:
        votes_note(&c.votes, layer, n_tok, tok, expert)


cdef void cache_score(Cache *c, int layer) noexcept nogil:
    cdef int i, e
    if not c.scoring:
        return
    votes_compare(&c.votes, layer)
    for i in range(c.base[layer], c.base[layer] + c.n_kept[layer]):
        e = c.slots[c.kept[i]].expert
        c.keys[i] = _key(votes_of(&c.votes, e), e)
    _find_lowest(c, layer)


cdef int cache_find(Cache *c, int layer, int expert) noexcept nogil:
    return c.table[c.base[layer] + expert]


cdef void cache_touch(Cache *c, int slot) noexcept nogil:
    cdef Class *k
    if c.policy == POLICY_VOTES:
        return
    k = &c.classes[c.cls[c.slots[slot].layer]]
    if k.head != slot:
        _unlink(c, k, slot)
        _push_front(c, k, slot)


cdef int cache_admit(Cache *c, int layer, int expert, int epoch) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int s = k.tail
    cdef Slot *x
    if c.policy == POLICY_VOTES:
        return _admit_by_votes(c, layer, expert, epoch)
    while s >= 0 and c.slots[s].pin == epoch:
        s = c.slots[s].prev
    if s < 0:
        return -1
    x = &c.slots[s]
    if x.layer >= 0:
        c.table[c.base[x.layer] + x.expert] = -1
        c.evictions += 1
    else:
        c.n_resident += 1
    x.layer = layer
    x.expert = expert
    x.pin = epoch
    c.table[c.base[layer] + expert] = s
    if k.head != s:
        _unlink(c, k, s)
        _push_front(c, k, s)
    return s


cdef void cache_forget(Cache *c, int slot) noexcept nogil:
    cdef Slot *x = &c.slots[slot]
    cdef int at
    if x.layer >= 0:
        c.table[c.base[x.layer] + x.expert] = -1
        if c.policy == POLICY_VOTES:
            at = 0
            while c.kept[c.base[x.layer] + at] != slot:
                at += 1
            _take_out(c, x.layer, at)
            x.next = c.classes[c.cls[x.layer]].head
            c.classes[c.cls[x.layer]].head = slot
        x.layer = -1
        c.n_resident -= 1


cdef void _push_back(Cache *c, Class *k, int s, int after) noexcept nogil:
    # Behind slot `after`, or as the first where that is -1.
    cdef Slot *x = &c.slots[s]
    if after < 0:
        _push_front(c, k, s)
        return
    x.prev = after
    x.next = c.slots[after].next
    c.slots[after].next = s
    if x.next >= 0:
        c.slots[x.next].prev = s
    else:
        k.tail = s


cdef int cache_hold(Cache *c, int layer) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int s
    if c.policy == POLICY_VOTES:
        s = k.head
        if s < 0:
            return -1
        k.head = c.slots[s].next
    else:
        s = k.tail
        if s < 0 or c.slots[s].layer >= 0:
            return -1
        _unlink(c, k, s)
    k.n_held += 1
    return s


cdef void cache_release(Cache *c, int layer, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    k.n_held -= 1
    if c.policy == POLICY_VOTES:
        c.slots[slot].next = k.head
        k.head = slot
    else:
        _push_back(c, k, slot, k.tail)


cdef bint cache_fill(Cache *c, int layer, int expert, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef Slot *x = &c.slots[slot]
    cdef int s, at
    if c.table[c.base[layer] + expert] >= 0:
        cache_release(c, layer, slot)
        return False
    k.n_held -= 1
    x.layer = layer
    x.expert = expert
    x.pin = -1
    c.table[c.base[layer] + expert] = slot
    c.n_resident += 1
    c.seen[c.base[layer] + expert] = 1
    if c.policy == POLICY_VOTES:
        # Nobody has voted for it yet; it is judged with the others when its layer is routed.
        at = c.base[layer] + c.n_kept[layer]
        c.kept[at] = slot
        c.keys[at] = _key(0, expert)
        c.n_kept[layer] += 1
        _find_lowest(c, layer)
    else:
        s = k.tail
        while s >= 0 and c.slots[s].layer < 0:
            s = c.slots[s].prev
        _push_back(c, k, slot, s)
    return True


cdef int cache_seen(Cache *c, int layer, int expert) noexcept nogil:
    cdef unsigned char *b = &c.seen[c.base[layer] + expert]
    cdef int before = b[0]
    b[0] = 1
    return before


cdef class ExpertCache:
    """Index of the expert cache.

    `n_expert`: experts of each layer. `layer_class`: size class of each layer (0, 1, ...). `class_slots`:
    slots of each class. `policy`: "votes" or "lru". `n_used`: experts that a token routes in a layer, at most;
    more of them have no vote. Raises ValueError where they do not fit together.
    """

    def __cinit__(self, list n_expert, list layer_class, list class_slots, str policy="votes", int n_used=16):
        cdef int i, j, total = 0
        cdef Cache *c = &self.c
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
        c.policy = POLICY_VOTES if policy == "votes" else POLICY_LRU
        c.n_layers = len(n_expert)
        c.n_classes = len(class_slots)
        c.n_slots = sum(class_slots)
        votes_init(&c.votes, n_expert, n_used)
        votes_constants(&c.votes, SHARPNESS, RECENCY, SECOND)
        c.base = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.n_expert = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.cls = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.members = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.n_kept = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.lowest = <int *>malloc(sizeof(int) * (c.n_layers + 1))
        c.classes = <Class *>calloc(c.n_classes + 1, sizeof(Class))
        c.slots = <Slot *>calloc(c.n_slots + 1, sizeof(Slot))
        for i in range(c.n_layers):
            c.base[i] = total
            c.n_expert[i] = n_expert[i]
            c.lowest[i] = -1
            c.cls[i] = layer_class[i]
            c.classes[c.cls[i]].n_layers += 1
            c.classes[c.cls[i]].n_experts += c.n_expert[i]
            total += c.n_expert[i]
        j = 0
        for i in range(c.n_classes):
            c.classes[i].first_member = j
            for layer in range(c.n_layers):
                if c.cls[layer] == i:
                    c.members[j] = layer
                    j += 1
        c.table = <int *>malloc(sizeof(int) * (total + 1))
        c.kept = <int *>malloc(sizeof(int) * (total + 1))
        c.keys = <int64_t *>malloc(sizeof(int64_t) * (total + 1))
        c.seen = <unsigned char *>calloc(total + 1, 1)
        for i in range(total):
            c.table[i] = -1
        j = 0
        for i in range(c.n_classes):
            c.classes[i].first = j
            c.classes[i].count = class_slots[i]
            c.classes[i].head = -1
            c.classes[i].tail = -1
            # With a slot for every expert, or none at all, there is nothing to choose.
            if c.policy == POLICY_VOTES and 0 < c.classes[i].count < c.classes[i].n_experts:
                c.scoring = 1
            for j in range(j, j + c.classes[i].count):
                c.slots[j].layer = -1
                c.slots[j].pin = -1
                if c.policy == POLICY_LRU:
                    _push_front(c, &c.classes[i], j)
                else:
                    c.slots[j].next = c.classes[i].head
                    c.classes[i].head = j
            j = c.classes[i].first + c.classes[i].count

    def __dealloc__(self):
        votes_free(&self.c.votes)
        free(self.c.base)
        free(self.c.n_expert)
        free(self.c.cls)
        free(self.c.members)
        free(self.c.n_kept)
        free(self.c.lowest)
        free(self.c.kept)
        free(self.c.keys)
        free(self.c.classes)
        free(self.c.slots)
        free(self.c.table)
        free(self.c.seen)

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
        cdef int e, s, tok, n_tok = len(rows)
        if not 0 <= layer < c.n_layers:
            raise ValueError(f"no layer {layer}")
        asked = rows if routed is None else routed
        if len(asked) != n_tok:
            raise ValueError(f"{len(asked)} rows were routed, {n_tok} remain")
        for row in [*rows, *asked]:
            for e in row:
                if not 0 <= e < c.n_expert[layer]:
                    raise ValueError(f"no expert {e} in layer {layer}")
        cache_begin(c, layer, n_tok)
        for tok, row in enumerate(asked):
            for e in dict.fromkeys(row):
                cache_note(c, layer, n_tok, tok, e)
        cache_score(c, layer)
        experts = list(dict.fromkeys(e for row in reversed(rows) for e in row))
        kept = experts if quota is None or n_tok < 2 else experts[:quota]
        hits = []
        misses = []
        for e in experts:
            s = cache_find(c, layer, e)
            if s >= 0:
                c.slots[s].pin = epoch
                c.hits += 1
                hits.append(e)
            else:
                misses.append(e)
        keep = set(kept)
        for e in misses:
            c.misses += 1
            c.rereads += cache_seen(c, layer, e)
            if e in keep:
                cache_admit(c, layer, e, epoch)
        for e in reversed(kept):
            s = cache_find(c, layer, e)
            if s >= 0:
                cache_touch(c, s)
        return hits, misses

    def time_tokens(self, list batches):
        """Nanoseconds that the policy takes for single-token `batches` of `(layer, experts)`, in order.

        What the engine calls for each, without what Python adds. Raises ValueError for what is out of range.
        """
        cdef Cache *c = &self.c
        cdef int i, j, s, layer, n = len(batches), total = sum(len(experts) for _, experts in batches)
        cdef int *flat = <int *>malloc(sizeof(int) * (total + 2 * n + 2))
        cdef int *at = flat
        cdef timespec t0, t1
        try:
            for layer, experts in batches:
                at[0] = layer
                at[1] = len(experts)
                for j, e in enumerate(experts):
                    at[2 + j] = e
                if not (0 <= layer < c.n_layers and all(0 <= e < c.n_expert[layer] for e in experts)):
                    raise ValueError(f"layer {layer}, experts {experts}: out of range")
                at += 2 + len(experts)
            at = flat
            with nogil:
                clock_gettime(CLOCK_MONOTONIC, &t0)
                for i in range(n):
                    layer = at[0]
                    cache_begin(c, layer, 1)
                    for j in range(at[1]):
                        cache_note(c, layer, 1, 0, at[2 + j])
                    cache_score(c, layer)
                    for j in range(at[1]):
                        s = cache_find(c, layer, at[2 + j])
                        if s >= 0:
                            c.slots[s].pin = i
                            c.hits += 1
                    for j in range(at[1]):
                        if cache_find(c, layer, at[2 + j]) < 0:
                            c.misses += 1
                            c.rereads += cache_seen(c, layer, at[2 + j])
                            cache_admit(c, layer, at[2 + j], i)
                    for j in range(at[1] - 1, -1, -1):
                        s = cache_find(c, layer, at[2 + j])
                        if s >= 0:
                            cache_touch(c, s)
                    at += 2 + at[1]
                clock_gettime(CLOCK_MONOTONIC, &t1)
        finally:
            free(flat)
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
        return self.c.hits, self.c.misses, self.c.evictions, self.c.rereads

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
            n, s = 0, c.classes[i].head
            while s >= 0:
                n += 1
                assert n <= c.n_slots
                assert c.policy == POLICY_LRU or c.slots[s].layer == -1, s
                s = c.slots[s].next
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
