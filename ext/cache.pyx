# cython: language_level=3
"""The expert cache's index: which expert is in which slot, and which slot is given up next.

No I/O, no ggml: the same code serves the engine (under nogil) and replays of recorded routes. Slots are
fixed; experts of one size share a class of slots, so that nothing is ever moved or resized. Within a class
the policy is least-recently-used; a slot that the current layer needs is pinned by an epoch number.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset


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




cdef int cache_find(Cache *c, int layer, int expert) noexcept nogil:
    return c.table[c.base[layer] + expert]


cdef void cache_touch(Cache *c, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[c.slots[slot].layer]]
    if k.head != slot:
        _unlink(c, k, slot)
        _push_front(c, k, slot)


cdef int cache_admit(Cache *c, int layer, int expert, int epoch) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int s = k.tail
    cdef Slot *x
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
    if x.layer >= 0:
        c.table[c.base[x.layer] + x.expert] = -1
        x.layer = -1
        c.n_resident -= 1


cdef int cache_seen(Cache *c, int layer, int expert) noexcept nogil:
    cdef unsigned char *b = &c.seen[c.base[layer] + expert]
    cdef int before = b[0]
    b[0] = 1
    return before


cdef class ExpertCache:
    """Index of the expert cache.

    `n_expert`: experts of each layer. `layer_class`: size class of each layer (0, 1, ...). `class_slots`:
    slots of each class. Raises ValueError where the three do not fit together.
    """

    def __cinit__(self, list n_expert, list layer_class, list class_slots):
        cdef int i, j, total = 0
        cdef Cache *c = &self.c
        if len(n_expert) != len(layer_class):
            raise ValueError("n_expert and layer_class must have one entry for each layer")
        if layer_class and not 0 <= min(layer_class) <= max(layer_class) < len(class_slots):
            raise ValueError("layer_class names a class that class_slots does not have")
        if class_slots and min(class_slots) < 0:
            raise ValueError("class_slots must not be negative")
        c.n_layers = len(n_expert)
        c.n_classes = len(class_slots)
        c.n_slots = sum(class_slots)
        c.base = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.n_expert = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.cls = <int *>calloc(c.n_layers + 1, sizeof(int))
        c.classes = <Class *>calloc(c.n_classes + 1, sizeof(Class))
        c.slots = <Slot *>calloc(c.n_slots + 1, sizeof(Slot))
        for i in range(c.n_layers):
            c.base[i] = total
            c.n_expert[i] = n_expert[i]
            c.cls[i] = layer_class[i]
            c.classes[c.cls[i]].n_layers += 1
            total += c.n_expert[i]
        c.table = <int *>malloc(sizeof(int) * (total + 1))
        c.seen = <unsigned char *>calloc(total + 1, 1)
        for i in range(total):
            c.table[i] = -1
        j = 0
        for i in range(c.n_classes):
            c.classes[i].first = j
            c.classes[i].count = class_slots[i]
            c.classes[i].head = -1
            c.classes[i].tail = -1
            for j in range(j, j + c.classes[i].count):
                c.slots[j].layer = -1
                c.slots[j].pin = -1
                _push_front(c, &c.classes[i], j)
            j = c.classes[i].first + c.classes[i].count

    def __dealloc__(self):
        free(self.c.base)
        free(self.c.n_expert)
        free(self.c.cls)
        free(self.c.classes)
        free(self.c.slots)
        free(self.c.table)
        free(self.c.seen)

    def access(self, int layer, list experts, int epoch):
        """One routed batch of one layer: `(hits, misses)`, each a list of expert ids.

        The sequence the engine follows for one token: pin the resident ones, admit the others while there are
        slots, and leave the first of the list the most recently used, the last the least. Each expert counts once.
        Raises ValueError for a layer or expert out of range.
        """
        cdef Cache *c = &self.c
        cdef int e, s
        if not 0 <= layer < c.n_layers:
            raise ValueError(f"no layer {layer}")
        hits = []
        misses = []
        for e in dict.fromkeys(experts):
            if not 0 <= e < c.n_expert[layer]:
                raise ValueError(f"no expert {e} in layer {layer}")
            s = cache_find(c, layer, e)
            if s >= 0:
                c.slots[s].pin = epoch
                c.hits += 1
                hits.append(e)
            else:
                misses.append(e)
        for e in misses:
            c.misses += 1
            c.rereads += cache_seen(c, layer, e)
            cache_admit(c, layer, e, epoch)
        for e in reversed(dict.fromkeys(experts)):
            s = cache_find(c, layer, e)
            if s >= 0:
                cache_touch(c, s)
        return hits, misses

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
        cdef int i, s, n, resident = 0
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
                s = c.slots[s].next
            assert n == c.classes[i].count
