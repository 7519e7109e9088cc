# The graph hook: turns expert matmuls into custom ops and notes where they stand. Included by _streamer.pyx.

cdef Part *_find_part(Moe *m, bm_tensor *w) noexcept nogil:
    cdef int i
    for i in range(m.n_parts):
        if m.parts[i].tensor == w:
            return &m.parts[i]
    return NULL


cdef bint _can_serve(bm_tensor *t) noexcept nogil:
    cdef bm_tensor *w = t.src[0]
    cdef bm_tensor *a = t.src[1]
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(w.type)
    if tr == NULL or tr.vec_dot == NULL:
        return False
    if a.type != tr.vec_dot_type and (a.type != 0 or ggml().cpu_traits(tr.vec_dot_type).from_float == NULL):
        return False
    return t.type == 0 and t.nb[0] == 4 and a.ne[3] == 1 and w.ne[3] == 1


cdef bint _reserve(Moe *m, bm_tensor *t) noexcept nogil:
    # Room for the rows and the quantized activations of this node; grows, never shrinks.
    cdef bm_tensor *a = t.src[1]
    cdef bm_tensor *ids = t.src[2]
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(t.src[0].type)
    cdef int n_rows = <int>(ids.ne[0] * ids.ne[1])
    cdef size_t need = ggml().row_size(tr.vec_dot_type, a.ne[0]) * <size_t>(a.ne[1] * a.ne[2])
    cdef size_t one
    if n_rows > m.n_rows_max:
        free(m.rows)
        m.rows = <int32_t *>malloc(sizeof(int32_t) * 2 * n_rows)
        m.n_rows_max = n_rows if m.rows != NULL else 0
    if ids.ne[1] > m.n_positions:
        free(m.position_bytes)
        free(m.position_rereads)
        m.position_bytes = <int64_t *>calloc(ids.ne[1], sizeof(int64_t))
        m.position_rereads = <int64_t *>calloc(ids.ne[1], sizeof(int64_t))
        m.n_positions = <int>ids.ne[1] if m.position_bytes != NULL and m.position_rereads != NULL else 0
    if need > m.q_size:
        free(m.q)
        m.q = <char *>malloc(need + 64)
        m.q_size = need if m.q != NULL else 0
    if ggml().tiled_wdata != NULL and m.tiled == NULL:
        one = ggml().tiled_wdata(2, t)
        one -= ggml().tiled_wdata(1, t) if one else 0
        if one:
            m.tiled_one = one
            m.tiled = <char *>malloc(one * m.n_threads + 64)
    if m.drop.threshold > 0 and not drop_reserve(&m.drop, n_rows):
        return False
    return m.n_rows_max >= n_rows and m.q_size >= need and m.n_positions >= ids.ne[1]


cdef void _note(Moe *m, Part *p, bm_tensor *t) noexcept nogil:
    # Records where the node stands: which matmuls share one routing, and which is the first of them.
    cdef int vdt = ggml().cpu_traits(t.src[0].type).vec_dot_type
    cdef int bit = 1 << p.slice_
    p.first = (m.walk_layer != p.layer or m.walk_mask & bit or m.walk_ids != t.src[2]
               or m.segments[m.next_segment].n >= MAX_PARTS)
    if p.first:
        if p.layer <= m.walk_layer:
            m.graph += 1
        if m.prefetch or m.predict_log:
            _note_router(m, p, t)
        m.next_segment = (m.next_segment + 1) % m.n_segments
        m.segments[m.next_segment].n = 0
        m.walk_mask = 0
    p.segment = &m.segments[m.next_segment]
    p.order = p.segment.n
    p.segment.part[p.order] = <int>(p - m.parts)
    p.segment.n += 1
    p.keep_q = not p.first and m.walk_src == t.src[1] and m.walk_vdt == vdt
    m.walk_layer = p.layer
    m.walk_mask |= bit
    m.walk_ids = t.src[2]
    m.walk_src = t.src[1]
    m.walk_vdt = vdt
    drop_matmul(&m.drop, t, &p.segment.weights, p.first)


cdef void _note_router(Moe *m, Part *p, bm_tensor *t) noexcept nogil:
    cdef Router *r = &m.routers[p.layer]
    cdef int64_t need
    router_walk(r, t.src[2], t.src[1])
    r.graph = m.graph
    if r.state > 0:
        need = router_scratch(r)
        if need > m.guess_room:
            free(m.guess_scratch)
            m.guess_scratch = <char *>malloc(need)
            m.guess_room = need if m.guess_scratch != NULL else 0
        if m.guess_room < need:
            r.state = -1


cdef c_bool _on_node(bm_tensor *t, c_bool ask, void *userdata) noexcept nogil:
    cdef Moe *m = <Moe *>userdata
    cdef bm_custom_params cp
    cdef Part *p
    m.node_mark = 0
    if not ask or not m.running:
        return not ask
    if t.op == ggml().op_custom:
        memcpy(&cp, &t.op_params[0], sizeof(cp))
        if cp.fun == _expert_matmul:
            _note(m, <Part *>cp.userdata, t)
    elif t.op == ggml().op_mul_mat_id:
        p = _find_part(m, t.src[0])
        if p != NULL and _can_serve(t) and _reserve(m, t):
            cp.fun = _expert_matmul
            cp.n_tasks = ggml().n_tasks_max
            cp.userdata = p
            t.op = ggml().op_custom
            memcpy(&t.op_params[0], &cp, sizeof(cp))
            _note(m, p, t)
    elif m.drop.threshold > 0 or m.log.on:
        drop_walk(&m.drop, t)
    return False


cdef c_bool _on_abort(void *userdata) noexcept nogil:
    cdef Moe *m = <Moe *>userdata
    cdef int64_t now = bm_now_ns()
    # Called by thread 0, after each node.
    if m.node_mark:
        m.spent[m.account][SPENT_COMPUTE] += now - m.node_mark
    elif m.begun_ns:
        m.spent[m.account][SPENT_BUILD] += now - m.begun_ns
        m.begun_ns = 0
    m.node_mark = now
    if now - m.last_signal_ns > SIGNAL_NS:
        m.last_signal_ns = now
        with gil:
            _check_signals(<object>m.owner)
    return bm_load(&m.abort) != 0 or bm_load(&m.pool.failed) != 0


cdef void _check_signals(Streamer s) noexcept:
    # Runs Python's signal handlers from inside the graph (only the main thread has any to run).
    try:
        PyErr_CheckSignals()
    except BaseException as e:
        s.interrupted = e
        bm_store(&s.m.abort, 1)
