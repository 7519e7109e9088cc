# The plan of a layer: which routed experts are there, where the others go, and the reads. Included by _streamer.pyx.

cdef int _plan_init(Plan *plan, int max_expert) except -1:
    _plan_free(plan)
    plan.max_expert = max_expert
    plan.expert = <int *>zeroed(max_expert, sizeof(int))
    plan.slot = <int *>zeroed(max_expert, sizeof(int))
    plan.place = <int *>zeroed(max_expert, sizeof(int))
    plan.residency = <unsigned char *>zeroed(max_expert, 1)
    plan.reread = <unsigned char *>zeroed(max_expert, 1)
    plan.miss = <int *>zeroed(max_expert, sizeof(int))
    plan.index_of = <int *>zeroed(max_expert, sizeof(int))
    plan.count = <int *>zeroed(max_expert, sizeof(int))
    plan.start = <int *>zeroed(max_expert + 1, sizeof(int))
    plan.fill_at = <int *>zeroed(max_expert, sizeof(int))
    plan.area = <int *>zeroed(MAX_PARTS * max_expert, sizeof(int))
    plan.next_chunk = <int *>zeroed(MAX_PARTS * max_expert, sizeof(int))
    plan.left_chunks = <int *>zeroed(MAX_PARTS * max_expert, sizeof(int))
    plan.n_chunks = <int *>zeroed(MAX_PARTS * max_expert, sizeof(int))
    return 0


cdef void _plan_free(Plan *plan) noexcept nogil:
    free(plan.expert)
    free(plan.slot)
    free(plan.place)
    free(plan.residency)
    free(plan.reread)
    free(plan.miss)
    free(plan.index_of)
    free(plan.count)
    free(plan.start)
    free(plan.fill_at)
    free(plan.rows)
    free(plan.area)
    free(plan.next_chunk)
    free(plan.left_chunks)
    free(plan.n_chunks)
    free(plan.uses)
    memset(plan, 0, sizeof(Plan))


cdef bint _plan_reserve(Plan *plan, int n_rows) noexcept nogil:
    # Room for the rows of a batch; grows, never shrinks.
    if n_rows > plan.room:
        free(plan.rows)
        plan.rows = <int32_t *>malloc(sizeof(int32_t) * 2 * n_rows)
        plan.room = n_rows if plan.rows != NULL else 0
    return plan.room >= n_rows


cdef bint _positions_reserve(Positions *p, int n) noexcept nogil:
    if n > p.n:
        _positions_free(p)
        p.bytes = <int64_t *>calloc(n, sizeof(int64_t))
        p.rereads = <int64_t *>calloc(n, sizeof(int64_t))
        p.n = n if p.bytes != NULL and p.rereads != NULL else 0
    return p.n >= n


cdef void _positions_free(Positions *p) noexcept nogil:
    free(p.bytes)
    free(p.rereads)
    memset(p, 0, sizeof(Positions))


cdef void _issue(Moe *m) noexcept nogil:
    # Queues the next reads of the layer, in the order in which the graph will want them, until one has to
    # wait for a staging area.
    cdef Plan *plan = &m.plan
    cdef Read reads[BATCH]
    cdef int n = 0, x, place, r, at
    cdef Part *p
    cdef char *dst
    cdef int *pending
    bm_spin_lock(&plan.issue_lock)
    while plan.issue_order < plan.segment.n:
        if plan.issue_at == plan.n_miss:
            plan.issue_order += 1
            plan.issue_at = 0
            continue
        x = plan.miss[plan.issue_at]
        p = &m.parts[plan.segment.part[plan.issue_order]]
        place = plan.place[x]
        if place >= 0:
            dst = <char *>(_place_address(m, p.layer, place) + p.area)
            pending = &m.slots.pending[place * MAX_PARTS + p.slice_]
        else:
            if m.ring.n_empty == 0:
                break
            m.ring.n_empty -= 1
            r = m.ring.empty[m.ring.n_empty]
            bm_store(&m.ring.pending[r], 1)
            dst = <char *>(m.ring.base + r * m.ring.stride)
            pending = &m.ring.pending[r]
            bm_store(&plan.area[p.order * plan.max_expert + x], r)
        read_init(&reads[n], p.file, p.offset + plan.expert[x] * p.nbytes, p.nbytes, dst, pending)
        m.counts.bytes += p.nbytes
        m.counts.reads += 1
        # An expert wanted by several positions is charged to the earliest, whose row comes first.
        at = plan.rows[2 * plan.start[x] + 1]
        m.positions.bytes[at] += p.nbytes
        if plan.reread[x]:
            m.positions.rereads[at] += p.nbytes
        plan.issue_at += 1
        n += 1
        if n == BATCH:
            pool_submit(m.pool, reads, n)
            n = 0
    pool_submit(m.pool, reads, n)
    bm_spin_unlock(&plan.issue_lock)


cdef void _settle(Moe *m) noexcept nogil:
    # Ends a plan that was left in the middle (an abort, an error): no read is under way afterwards and no
    # slot claims an expert that was not read.
    cdef Plan *plan = &m.plan
    cdef int o, i, x
    if plan.segment != NULL and plan.issue_order < plan.segment.n:
        for o in range(plan.issue_order, plan.segment.n):
            for i in range(plan.issue_at if o == plan.issue_order else 0, plan.n_miss):
                x = plan.miss[i]
                if plan.slot[x] >= 0:
                    bm_spin_lock(&m.index_lock)
                    if m.cache.slots[plan.slot[x]].layer >= 0:
                        log_event(&m.log, LOG_FORGET, plan.layer, plan.expert[x])
                    cache_forget(m.cache, plan.slot[x])
                    bm_spin_unlock(&m.index_lock)
        plan.issue_order = plan.segment.n
    _prefetch_forget(m)
    _ring_clear(&m.ring)


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
    cdef Plan *plan = &m.plan
    cdef int64_t tok, i
    cdef int e, n = 0
    memset(plan.count, 0, sizeof(int) * m.layers[layer].n_expert)
    for e in range(m.layers[layer].n_expert):
        plan.index_of[e] = -1
    for tok in range(ids.ne[1] - 1, -1, -1):
        for i in range(ids.ne[0]):
            e = _wanted(m, ids, i, tok)
            if e < 0:
                continue
            plan.count[e] += 1
            if plan.index_of[e] < 0:
                plan.index_of[e] = n
                plan.expert[n] = e
                n += 1
    plan.n = n


cdef inline void _place_experts(Moe *m, int layer, int n_tok) noexcept nogil:
    # Slots: of a batch that routes more than its quota, only the first experts are offered one.
    cdef Plan *plan = &m.plan
    cdef int quota = m.layers[layer].quota
    cdef bint wide = n_tok > 1 and plan.n > quota
    cdef int x, s
    cache_place(m.cache, layer, plan.expert, plan.n, quota if wide else plan.n, plan.epoch, plan.slot,
                plan.residency, plan.reread)
    for x in range(plan.n):
        s = plan.slot[x]
        plan.place[x] = m.slots.place[s] if s >= 0 else -1
        if s >= 0:
            if plan.residency[x]:
                m.slots.fresh_used += m.slots.fresh[s]
            m.slots.fresh[s] = 0


cdef inline void _log_outcome(Moe *m, int layer) noexcept nogil:
    cdef Plan *plan = &m.plan
    cdef int x
    for x in range(plan.n):
        if m.ahead.n_spares and not plan.residency[x] and _spare_find(m, layer, plan.expert[x]) >= 0:
            plan.residency[x] = 2
    log_outcome(&m.log, plan.index_of, plan.residency, m.drop.gone if m.drop.n_gone else NULL)


cdef inline void _find_misses(Moe *m, Segment *g, int layer) noexcept nogil:
    # What has to be read: misses that no guess has read, or is reading, ahead.
    cdef Plan *plan = &m.plan
    cdef int x, s, o, ahead
    plan.n_miss = 0
    for x in range(plan.n):
        if plan.residency[x] == 1:
            continue
        s = plan.slot[x]
        ahead = _spare_find(m, layer, plan.expert[x]) if m.ahead.n_spares else -1
        if ahead < 0 or m.ahead.spares[ahead].open:
            m.cache.counts.rereads += plan.reread[x]
        if ahead >= 0:
            _prefetch_claim(m, ahead)
            plan.place[x] = m.ahead.spares[ahead].place
            if s >= 0:
                _prefetch_swap(m, ahead, s)
            continue
        if s >= 0:
            for o in range(g.n):
                bm_store(&m.slots.pending[plan.place[x] * MAX_PARTS + m.parts[g.part[o]].slice_], 1)
        else:
            m.counts.streamed += 1
        plan.miss[plan.n_miss] = x
        plan.n_miss += 1
    if m.ahead.n_spares:
        _prefetch_leftovers(m, layer)


cdef inline void _sort_rows(Moe *m, int layer, bm_tensor *ids) noexcept nogil:
    # Rows by expert, then those that fell.
    cdef Plan *plan = &m.plan
    cdef int64_t tok, i
    cdef int x, e, r, at = 0
    for x in range(plan.n):
        plan.start[x] = at
        plan.fill_at[x] = at
        at += plan.count[plan.expert[x]]
        if plan.uses != NULL:
            plan.uses[m.cache.base[layer] + plan.expert[x]] += plan.count[plan.expert[x]]
    plan.start[plan.n] = at
    for tok in range(ids.ne[1]):
        for i in range(ids.ne[0]):
            e = _wanted(m, ids, i, tok)
            if e >= 0:
                x = plan.index_of[e]
                r = plan.fill_at[x]
                plan.fill_at[x] += 1
            else:
                r = at
                at += 1
            plan.rows[2 * r] = <int32_t>i
            plan.rows[2 * r + 1] = <int32_t>tok


cdef inline void _cut_chunks(Moe *m, Segment *g) noexcept nogil:
    # Units of work of each matmul and expert, for whichever thread takes them.
    cdef Plan *plan = &m.plan
    cdef int o, x, at
    cdef int64_t height, n_rows
    for o in range(g.n):
        n_rows = m.parts[g.part[o]].tensor.ne[1]
        for x in range(plan.n):
            height = TILED_CHUNK_ROWS if plan.start[x + 1] - plan.start[x] >= 8 else CHUNK_ROWS
            at = o * plan.max_expert + x
            plan.n_chunks[at] = <int>((n_rows + height - 1) // height)
            plan.left_chunks[at] = plan.n_chunks[at]
            plan.next_chunk[at] = 0
            plan.area[at] = -1


cdef void _make_plan(Moe *m, Part *p, bm_tensor *dst) noexcept nogil:
    # Run by thread 0 at the first matmul of a layer: who computes what from where, and the reads for it.
    cdef Plan *plan = &m.plan
    cdef bm_tensor *ids = dst.src[2]
    cdef int n_tok = <int>ids.ne[1]
    cdef int64_t t0 = bm_now_ns(), misses_before = m.cache.counts.misses
    if ((not m.ahead.n_spares and bm_load(&m.pool.in_flight) > 0)
            or (plan.segment != NULL and plan.issue_order < plan.segment.n)):
        _settle(m)
    plan.epoch += 1
    plan.layer = p.layer
    plan.segment = p.segment
    bm_spin_lock(&m.index_lock)
    if m.log.on:
        log_plan(&m.log, p.layer, ids, p.segment.weights)
    if m.drop.threshold > 0 and not drop_plan(&m.drop, m.cache, p.layer, ids, p.segment.weights, plan.index_of):
        bm_store(&m.stop.requested, 1)  # nothing falls, and the graph ends with this node
    _note_votes(m, p.layer, ids)
    _select_experts(m, p.layer, ids)
    _place_experts(m, p.layer, n_tok)
    if m.log.on:
        _log_outcome(m, p.layer)
    _find_misses(m, p.segment, p.layer)
    if m.ahead.on or m.ahead.scored:
        _note_routes(m, p.layer, ids, <int>(m.cache.counts.misses - misses_before))
    bm_spin_unlock(&m.index_lock)
    _sort_rows(m, p.layer, ids)
    _cut_chunks(m, p.segment)
    plan.issue_order = 0
    plan.issue_at = 0
    m.counts.routed += ids.ne[0] * ids.ne[1]
    m.counts.plans += 1
    m.counts.plan_ns += bm_now_ns() - t0
    _issue(m)
    _spend(&m.time.graph.manage_ns, &t0)
    if not m.overlap:
        pool_wait_idle(m.pool)
        bm_add64(&m.counts.stall_ns, (bm_now_ns() - t0) * m.n_threads)
        _spend(&m.time.graph.wait_ns, &t0)
