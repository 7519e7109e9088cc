# The plan of a layer: which routed experts are there, where the others go, and the reads. Included by moe.pyx.

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


cdef void _make_plan(Moe *m, Part *p, bm_tensor *dst) noexcept nogil:
    cdef bm_tensor *ids = dst.src[2]
    cdef Layer *l = &m.layers[p.layer]
    cdef Cache *c = m.cache
    cdef int64_t n_used = ids.ne[0], n_tok = ids.ne[1], tok, i
    cdef int e, x, s, n_x = 0, n_keep, at, o, nc, r, ahead
    cdef bint wide
    cdef Part *q
    cdef int64_t t0 = bm_now_ns(), misses_before = c.misses
    if ((not m.n_spares and bm_load(&m.pool.in_flight) > 0)
            or (m.plan_segment != NULL and m.issue_order < m.plan_segment.n)):
        _settle(m)
    m.epoch += 1
    m.plan_layer = p.layer
    m.plan_segment = p.segment
    bm_spin_lock(&m.index_lock)
    if m.log.on:
        log_plan(&m.log, p.layer, ids, p.segment.weights)
    if m.drop.threshold > 0 and not drop_plan(&m.drop, c, p.layer, ids, p.segment.weights, m.x_of):
        bm_store(&m.abort, 1)  # nothing falls, and the graph ends with this node
    memset(m.count, 0, sizeof(int) * l.n_expert)
    cache_begin(c, p.layer, <int>n_tok)
    for tok in range(n_tok):
        for i in range(n_used):
            # Votes are for what the router asked for, dropped or not.
            cache_note(c, p.layer, <int>n_tok, <int>tok, _id(ids, i, tok))
            e = _wanted(m, ids, i, tok)
            if e >= 0:
                m.count[e] += 1
    cache_score(c, p.layer)
    # Experts by last use, the latest token's first: what a wide batch keeps, and the order of recency.
    for e in range(l.n_expert):
        m.x_of[e] = -1
    for tok in range(n_tok - 1, -1, -1):
        for i in range(n_used):
            e = _wanted(m, ids, i, tok)
            if e >= 0 and m.x_of[e] < 0:
                m.x_of[e] = n_x
                m.x_expert[n_x] = e
                n_x += 1
    m.n_x = n_x
    wide = n_tok > 1 and n_x > l.quota
    n_keep = l.quota if wide else n_x
    # Resident experts are pinned before any slot is given away.
    for x in range(n_x):
        s = cache_find(c, p.layer, m.x_expert[x])
        m.x_slot[x] = s
        m.x_place[x] = m.place[s] if s >= 0 else -1
        if s >= 0:
            c.slots[s].pin = m.epoch
            c.hits += 1
    if m.log.on:
        for x in range(n_x):
            m.x_fate[x] = 1 if m.x_slot[x] >= 0 else 0
            if m.n_spares and not m.x_fate[x] and _spare_find(m, p.layer, m.x_expert[x]) >= 0:
                m.x_fate[x] = 2
        log_outcome(&m.log, m.x_of, m.x_fate, m.drop.gone if m.drop.n_gone else NULL)
    # Where slots are short, the latest used are the first to be offered one.
    m.n_miss = 0
    for x in range(n_x):
        e = m.x_expert[x]
        s = m.x_slot[x]
        if s >= 0:
            m.fresh_used += m.slot_fresh[s]
            m.slot_fresh[s] = 0
            continue
        c.misses += 1
        ahead = _spare_find(m, p.layer, e) if m.n_spares else -1
        m.x_reread[x] = cache_seen(c, p.layer, e)
        if ahead < 0 or m.spares[ahead].open:
            c.rereads += m.x_reread[x]
        s = cache_admit(c, p.layer, e, m.epoch) if x < n_keep else -1
        m.x_slot[x] = s
        if s >= 0:
            m.slot_fresh[s] = 0
        if ahead >= 0:
            # On its way or there already, read as a guess.
            _prefetch_claim(m, ahead)
            m.x_place[x] = m.spares[ahead].place
            if s >= 0:
                _prefetch_swap(m, ahead, s)
            continue
        if s >= 0:
            m.x_place[x] = m.place[s]
            for o in range(p.segment.n):
                bm_store(&m.slot_pending[m.place[s] * MAX_PARTS + m.parts[p.segment.part[o]].slice_], 1)
        else:
            m.streamed += 1
        m.miss[m.n_miss] = x
        m.n_miss += 1
    if m.n_spares:
        _prefetch_leftovers(m, p.layer)
    if m.prefetch or m.predict_log:
        _note_routes(m, p.layer, ids, <int>(c.misses - misses_before))
    # Recency is that of use, whether an expert was read or not.
    for x in range(n_keep - 1, -1, -1):
        if m.x_slot[x] >= 0:
            cache_touch(c, m.x_slot[x])
    bm_spin_unlock(&m.index_lock)
    # Rows by expert, then those that fell.
    at = 0
    for x in range(n_x):
        m.x_start[x] = at
        m.fill_at[x] = at
        at += m.count[m.x_expert[x]]
        if m.uses != NULL:
            m.uses[c.base[p.layer] + m.x_expert[x]] += m.count[m.x_expert[x]]
    m.x_start[n_x] = at
    for tok in range(n_tok):
        for i in range(n_used):
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
    for o in range(p.segment.n):
        q = &m.parts[p.segment.part[o]]
        for x in range(n_x):
            nc = TILED_CHUNK_ROWS if m.x_start[x + 1] - m.x_start[x] >= 8 else CHUNK_ROWS
            nc = <int>((q.tensor.ne[1] + nc - 1) // nc)
            m.n_chunks[o * m.max_expert + x] = nc
            m.left_chunks[o * m.max_expert + x] = nc
            m.next_chunk[o * m.max_expert + x] = 0
            m.x_ring[o * m.max_expert + x] = -1
    m.issue_order = 0
    m.issue_at = 0
    m.routed += n_used * n_tok
    m.n_plans += 1
    m.plan_ns += bm_now_ns() - t0
    _issue(m)
    _spend(m, SPENT_MANAGE, &t0)
    if not m.overlap:
        pool_wait_idle(m.pool)
        bm_add64(&m.stall_ns, (bm_now_ns() - t0) * m.n_threads)
        _spend(m, SPENT_WAIT, &t0)
