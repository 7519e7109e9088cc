# Giving up slots by last use: all slots of a class in one line. Included by _cache.pyx.

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


cdef void _push_behind(Cache *c, Class *k, int s, int after) noexcept nogil:
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


cdef void _touch_by_use(Cache *c, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[c.slots[slot].layer]]
    if k.head != slot:
        _unlink(c, k, slot)
        _push_front(c, k, slot)


cdef int _admit_by_use(Cache *c, int layer, int expert, int epoch) noexcept nogil:
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
        c.counts.evictions += 1
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


cdef int _hold_by_use(Cache *c, Class *k) noexcept nogil:
    cdef int s = k.tail
    if s < 0 or c.slots[s].layer >= 0:
        return -1
    _unlink(c, k, s)
    return s


cdef void _fill_by_use(Cache *c, Class *k, int slot) noexcept nogil:
    # The least recently used, in front of the empty ones at the end of the line.
    cdef int s = k.tail
    while s >= 0 and c.slots[s].layer < 0:
        s = c.slots[s].prev
    _push_behind(c, k, slot, s)
