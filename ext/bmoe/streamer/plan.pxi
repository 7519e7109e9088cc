# The plan of a layer: which routed experts are there, where the others go, and the reads. Included by _streamer.pyx.

cdef inline int64_t _place_address(Moe *m, int layer, int place) noexcept nogil:
    cdef Layer *l = &m.layers[layer]
    return l.base + (place - l.first) * l.stride


cdef char *slice_area(Moe *m, Part *p, int slot) noexcept nogil:
    return <char *>(_place_address(m, p.layer, m.place[slot]) + p.area)


cdef inline bint _ready(Moe *m, Part *p, int x) noexcept nogil:
    cdef int place = m.x_place[x], r
    if place >= 0:
        return bm_load(&m.slot_pending[place * MAX_PARTS + p.slice_]) <= 0
    r = bm_load(&m.x_ring[p.order * m.max_expert + x])
    return r >= 0 and bm_load(&m.ring_pending[r]) <= 0


cdef inline char *_slice(Moe *m, Part *p, int x) noexcept nogil:
    cdef int64_t at = (p.offset + m.x_expert[x] * p.nbytes) & (PAGE - 1)
    if m.x_place[x] >= 0:
        return <char *>(_place_address(m, p.layer, m.x_place[x]) + p.area + at)
    return <char *>(m.ring_base + m.x_ring[p.order * m.max_expert + x] * m.ring_stride + at)


cdef void _issue(Moe *m) noexcept nogil:
    # Queues the next reads of the layer, in the order in which the graph will want them, until one has to
    # wait for a staging area.
    cdef Read reads[BATCH]
    cdef int n = 0, x, place, r, at
    cdef Part *p
    cdef char *dst
    cdef int *pending
    bm_spin_lock(&m.issue_lock)
    while m.issue_order < m.plan_segment.n:
        if m.issue_at == m.n_miss:
            m.issue_order += 1
            m.issue_at = 0
            continue
        x = m.miss[m.issue_at]
        p = &m.parts[m.plan_segment.part[m.issue_order]]
        place = m.x_place[x]
        if place >= 0:
            dst = <char *>(_place_address(m, p.layer, place) + p.area)
            pending = &m.slot_pending[place * MAX_PARTS + p.slice_]
        else:
            if m.n_ring_free == 0:
                break
            m.n_ring_free -= 1
            r = m.ring_free[m.n_ring_free]
            bm_store(&m.ring_pending[r], 1)
            dst = <char *>(m.ring_base + r * m.ring_stride)
            pending = &m.ring_pending[r]
            bm_store(&m.x_ring[p.order * m.max_expert + x], r)
        read_init(&reads[n], p.file, p.offset + m.x_expert[x] * p.nbytes, p.nbytes, dst, pending)
        m.bytes += p.nbytes
        m.reads += 1
        # An expert wanted by several positions is charged to the earliest, whose row comes first.
        at = m.rows[2 * m.x_start[x] + 1]
        m.position_bytes[at] += p.nbytes
        if m.x_reread[x]:
            m.position_rereads[at] += p.nbytes
        m.issue_at += 1
        n += 1
        if n == BATCH:
            pool_submit(m.pool, reads, n)
            n = 0
    pool_submit(m.pool, reads, n)
    bm_spin_unlock(&m.issue_lock)


cdef void _settle(Moe *m) noexcept nogil:
    # Ends a plan that was left in the middle (an abort, an error): no read is under way afterwards and no
    # slot claims an expert that was not read.
    cdef int o, i, x
    if m.plan_segment != NULL and m.issue_order < m.plan_segment.n:
        for o in range(m.issue_order, m.plan_segment.n):
            for i in range(m.issue_at if o == m.issue_order else 0, m.n_miss):
                x = m.miss[i]
                if m.x_slot[x] >= 0:
                    bm_spin_lock(&m.index_lock)
                    if m.cache.slots[m.x_slot[x]].layer >= 0:
                        log_event(&m.log, LOG_FORGET, m.plan_layer, m.x_expert[x])
                    cache_forget(m.cache, m.x_slot[x])
                    bm_spin_unlock(&m.index_lock)
        m.issue_order = m.plan_segment.n
    _prefetch_forget(m)
    m.n_ring_free = m.n_ring
    for i in range(m.n_ring):
        m.ring_free[i] = i


cdef inline int32_t _id(bm_tensor *ids, int64_t i, int64_t token) noexcept nogil:
    return (<int32_t *>(<char *>ids.data + token * ids.nb[1] + i * ids.nb[0]))[0]


cdef inline int32_t _wanted(Moe *m, bm_tensor *ids, int64_t i, int64_t token) noexcept nogil:
    # The expert, or -1 where it has fallen.
    if m.drop.n_gone and m.drop.gone[token * ids.ne[0] + i]:
        return -1
    return _id(ids, i, token)


cdef inline void _note_votes(Moe *m, int layer, bm_tensor *ids) noexcept nogil:
    # What the router asked for, dropped or not.
    cdef int64_t tok, i
    cache_begin(m.cache, layer, <int>ids.ne[1])
    for tok in range(ids.ne[1]):
        for i in range(ids.ne[0]):
            cache_note(m.cache, layer, <int>ids.ne[1], <int>tok, _id(ids, i, tok))
    cache_score(m.cache, layer)


cdef inline void _select_experts(Moe *m, int layer, bm_tensor *ids) noexcept nogil:
    # Distinct experts by last use, the latest token's first: what a wide batch keeps, and the order of recency.
    cdef int64_t tok, i
    cdef int e, n = 0
    memset(m.count, 0, sizeof(int) * m.layers[layer].n_expert)
    for e in range(m.layers[layer].n_expert):
        m.x_of[e] = -1
    for tok in range(ids.ne[1] - 1, -1, -1):
        for i in range(ids.ne[0]):
            e = _wanted(m, ids, i, tok)
            if e < 0:
                continue
            m.count[e] += 1
            if m.x_of[e] < 0:
                m.x_of[e] = n
                m.x_expert[n] = e
                n += 1
    m.n_x = n


cdef inline void _place_experts(Moe *m, int layer, int n_tok) noexcept nogil:
    # Slots: of a batch that routes more than its quota, only the first experts are offered one.
    cdef int quota = m.layers[layer].quota
    cdef bint wide = n_tok > 1 and m.n_x > quota
    cdef int x, s
    cache_place(m.cache, layer, m.x_expert, m.n_x, quota if wide else m.n_x, m.epoch, m.x_slot, m.x_fate, m.x_reread)
    for x in range(m.n_x):
        s = m.x_slot[x]
        m.x_place[x] = m.place[s] if s >= 0 else -1
        if s >= 0:
            if m.x_fate[x]:
                m.fresh_used += m.slot_fresh[s]
            m.slot_fresh[s] = 0


cdef inline void _log_outcome(Moe *m, int layer) noexcept nogil:
    cdef int x
    for x in range(m.n_x):
        if m.n_spares and not m.x_fate[x] and _spare_find(m, layer, m.x_expert[x]) >= 0:
            m.x_fate[x] = 2
    log_outcome(&m.log, m.x_of, m.x_fate, m.drop.gone if m.drop.n_gone else NULL)


cdef inline void _find_misses(Moe *m, Segment *g, int layer) noexcept nogil:
    # What has to be read: misses that no guess has read, or is reading, ahead.
    cdef int x, s, o, ahead
    m.n_miss = 0
    for x in range(m.n_x):
        if m.x_fate[x] == 1:
            continue
        s = m.x_slot[x]
        ahead = _spare_find(m, layer, m.x_expert[x]) if m.n_spares else -1
        if ahead < 0 or m.spares[ahead].open:
            m.cache.counts.rereads += m.x_reread[x]
        if ahead >= 0:
            _prefetch_claim(m, ahead)
            m.x_place[x] = m.spares[ahead].place
            if s >= 0:
                _prefetch_swap(m, ahead, s)
            continue
        if s >= 0:
            for o in range(g.n):
                bm_store(&m.slot_pending[m.x_place[x] * MAX_PARTS + m.parts[g.part[o]].slice_], 1)
        else:
            m.streamed += 1
        m.miss[m.n_miss] = x
        m.n_miss += 1
    if m.n_spares:
        _prefetch_leftovers(m, layer)


cdef inline void _sort_rows(Moe *m, int layer, bm_tensor *ids) noexcept nogil:
    # Rows by expert, then those that fell.
    cdef int64_t tok, i
    cdef int x, e, r, at = 0
    for x in range(m.n_x):
        m.x_start[x] = at
        m.fill_at[x] = at
        at += m.count[m.x_expert[x]]
        if m.uses != NULL:
            m.uses[m.cache.base[layer] + m.x_expert[x]] += m.count[m.x_expert[x]]
    m.x_start[m.n_x] = at
    for tok in range(ids.ne[1]):
        for i in range(ids.ne[0]):
            e = _wanted(m, ids, i, tok)
            if e >= 0:
                x = m.x_of[e]
                r = m.fill_at[x]
                m.fill_at[x] += 1
            else:
                r = at
                at += 1
            m.rows[2 * r] = <int32_t>i
            m.rows[2 * r + 1] = <int32_t>tok


cdef inline void _cut_chunks(Moe *m, Segment *g) noexcept nogil:
    # Units of work of each matmul and expert, for whichever thread takes them.
    cdef int o, x, at
    cdef int64_t height, n_rows
    for o in range(g.n):
        n_rows = m.parts[g.part[o]].tensor.ne[1]
        for x in range(m.n_x):
            height = TILED_CHUNK_ROWS if m.x_start[x + 1] - m.x_start[x] >= 8 else CHUNK_ROWS
            at = o * m.max_expert + x
            m.n_chunks[at] = <int>((n_rows + height - 1) // height)
            m.left_chunks[at] = m.n_chunks[at]
            m.next_chunk[at] = 0
            m.x_ring[at] = -1


cdef void _make_plan(Moe *m, Part *p, bm_tensor *dst) noexcept nogil:
    # Run by thread 0 at the first matmul of a layer: who computes what from where, and the reads for it.
    cdef bm_tensor *ids = dst.src[2]
    cdef int n_tok = <int>ids.ne[1]
    cdef int64_t t0 = bm_now_ns(), misses_before = m.cache.counts.misses
    if ((not m.n_spares and bm_load(&m.pool.in_flight) > 0)
            or (m.plan_segment != NULL and m.issue_order < m.plan_segment.n)):
        _settle(m)
    m.epoch += 1
    m.plan_layer = p.layer
    m.plan_segment = p.segment
    bm_spin_lock(&m.index_lock)
    if m.log.on:
        log_plan(&m.log, p.layer, ids, p.segment.weights)
    if m.drop.threshold > 0 and not drop_plan(&m.drop, m.cache, p.layer, ids, p.segment.weights, m.x_of):
        bm_store(&m.abort, 1)  # nothing falls, and the graph ends with this node
    _note_votes(m, p.layer, ids)
    _select_experts(m, p.layer, ids)
    _place_experts(m, p.layer, n_tok)
    if m.log.on:
        _log_outcome(m, p.layer)
    _find_misses(m, p.segment, p.layer)
    if m.prefetch or m.predict_log:
        _note_routes(m, p.layer, ids, <int>(m.cache.counts.misses - misses_before))
    bm_spin_unlock(&m.index_lock)
    _sort_rows(m, p.layer, ids)
    _cut_chunks(m, p.segment)
    m.issue_order = 0
    m.issue_at = 0
    m.routed += ids.ne[0] * ids.ne[1]
    m.n_plans += 1
    m.plan_ns += bm_now_ns() - t0
    _issue(m)
    _spend(m, SPENT_MANAGE, &t0)
    if not m.overlap:
        pool_wait_idle(m.pool)
        bm_add64(&m.stall_ns, (bm_now_ns() - t0) * m.n_threads)
        _spend(m, SPENT_WAIT, &t0)
