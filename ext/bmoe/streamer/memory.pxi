# Where slices lie: the slots' memory and the ring's staging areas. Included by _streamer.pyx.

cdef int _slots_init(Moe *m, list classes, list layer_class) except -1:
    # Slots and spares get places in the order of their classes, the spares' behind the slots'.
    cdef int i, j, at = 0, slot = 0, spare = 0
    cdef SlotMemory *s = &m.slots
    _slots_free(s)
    s.place = <int *>zeroed(m.cache.n_slots, sizeof(int))
    s.fresh = <unsigned char *>zeroed(m.cache.n_slots, 1)
    s.pending = <int *>zeroed(sum([slots + spares for _, slots, spares, _ in classes]) * MAX_PARTS, sizeof(int))
    for i, (address, slots, spares, stride) in enumerate(classes):
        for j in range(m.n_layers):
            if layer_class[j] == i:
                m.layers[j].base, m.layers[j].first, m.layers[j].stride = address, at, stride
                m.layers[j].cls = i
        for _ in range(slots):
            s.place[slot] = at
            slot += 1
            at += 1
        for _ in range(spares):
            m.ahead.spares[spare].cls = i
            m.ahead.spares[spare].place = at
            m.ahead.spares[spare].layer = -1
            spare += 1
            at += 1
    return 0


cdef void _slots_free(SlotMemory *s) noexcept nogil:
    free(s.place)
    free(s.fresh)
    free(s.pending)
    s.place = NULL
    s.fresh = NULL
    s.pending = NULL


cdef int _ring_init(Ring *r, int n, int64_t base, int64_t stride) except -1:
    _ring_free(r)
    r.pending = <int *>zeroed(n, sizeof(int))
    r.empty = <int *>zeroed(n, sizeof(int))
    r.n = n
    r.base = base
    r.stride = stride
    _ring_clear(r)
    return 0


cdef void _ring_clear(Ring *r) noexcept nogil:
    cdef int i
    for i in range(r.n):
        r.empty[i] = i
    r.n_empty = r.n


cdef void _ring_free(Ring *r) noexcept nogil:
    free(r.pending)
    free(r.empty)
    memset(r, 0, sizeof(Ring))


cdef inline int64_t _place_address(Moe *m, int layer, int place) noexcept nogil:
    cdef Layer *l = &m.layers[layer]
    return l.base + (place - l.first) * l.stride


cdef char *slice_area(Moe *m, Part *p, int slot) noexcept nogil:
    return <char *>(_place_address(m, p.layer, m.slots.place[slot]) + p.area)


cdef inline bint _ready(Moe *m, Part *p, int x) noexcept nogil:
    cdef int place = m.plan.place[x], r
    if place >= 0:
        return bm_load(&m.slots.pending[place * MAX_PARTS + p.slice_]) <= 0
    r = bm_load(&m.plan.area[p.order * m.plan.max_expert + x])
    return r >= 0 and bm_load(&m.ring.pending[r]) <= 0


cdef inline char *_slice(Moe *m, Part *p, int x) noexcept nogil:
    cdef int64_t at = (p.offset + m.plan.expert[x] * p.nbytes) & (PAGE - 1)
    if m.plan.place[x] >= 0:
        return <char *>(_place_address(m, p.layer, m.plan.place[x]) + p.area + at)
    return <char *>(m.ring.base + m.plan.area[p.order * m.plan.max_expert + x] * m.ring.stride + at)
