# The graph hook: turns expert matmuls into custom ops and notes where they stand. Included by _streamer.pyx.

cdef int _walk_init(Walk *w, int n_parts) except -1:
    _walk_free(w)
    w.n_segments = 2 * n_parts + 2
    w.segments = <Segment *>zeroed(w.n_segments, sizeof(Segment))
    w.layer = -1
    return 0


cdef void _walk_free(Walk *w) noexcept nogil:
    free(w.segments)
    memset(w, 0, sizeof(Walk))


cdef void _scratch_free(Scratch *s) noexcept nogil:
    free(s.q)
    free(s.tiled)
    memset(s, 0, sizeof(Scratch))


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


cdef bint _scratch_reserve(Scratch *s, bm_tensor *t, int n_threads) noexcept nogil:
    # Room for the quantized activations of this node; grows, never shrinks.
    cdef bm_tensor *a = t.src[1]
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(t.src[0].type)
    cdef size_t need = ggml().row_size(tr.vec_dot_type, a.ne[0]) * <size_t>(a.ne[1] * a.ne[2])
    cdef size_t one
    if need > s.q_size:
        free(s.q)
        s.q = <char *>malloc(need + 64)
        s.q_size = need if s.q != NULL else 0
    # Without this one, ggml's plain kernel computes.
    if ggml().tiled_wdata != NULL and s.tiled == NULL:
        one = ggml().tiled_wdata(2, t)
        one -= ggml().tiled_wdata(1, t) if one else 0
        if one:
            s.tiled_one = one
            s.tiled = <char *>malloc(one * n_threads + 64)
    return s.q_size >= need


cdef bint _reserve(Moe *m, bm_tensor *t) noexcept nogil:
    # Room for what the matmul of this node needs. Without it the node is left to ggml.
    cdef bm_tensor *ids = t.src[2]
    cdef int n_rows = <int>(ids.ne[0] * ids.ne[1])
    return (_plan_reserve(&m.plan, n_rows) and _positions_reserve(&m.positions, <int>ids.ne[1])
            and _scratch_reserve(&m.scratch, t, m.n_threads)
            and (m.drop.threshold <= 0 or drop_reserve(&m.drop, n_rows)))


cdef void _note(Moe *m, Part *p, bm_tensor *t) noexcept nogil:
    # Records where the node stands: which matmuls share one routing, and which is the first of them.
    cdef Walk *w = &m.walk
    cdef int vdt = ggml().cpu_traits(t.src[0].type).vec_dot_type
    cdef int bit = 1 << p.slice_
    p.first = (w.layer != p.layer or w.mask & bit or w.ids != t.src[2]
               or w.segments[w.next_segment].n >= MAX_PARTS)
    if p.first:
        if p.layer <= w.layer:
            w.graph += 1
        if m.ahead.on or m.ahead.scored:
            _note_router(m, p, t)
        w.next_segment = (w.next_segment + 1) % w.n_segments
        w.segments[w.next_segment].n = 0
        w.mask = 0
    p.segment = &w.segments[w.next_segment]
    p.order = p.segment.n
    p.segment.part[p.order] = <int>(p - m.parts)
    p.segment.n += 1
    p.keep_q = not p.first and w.src == t.src[1] and w.vdt == vdt
    w.layer = p.layer
    w.mask |= bit
    w.ids = t.src[2]
    w.src = t.src[1]
    w.vdt = vdt
    drop_matmul(&m.drop, t, &p.segment.weights, p.first)


cdef void _note_router(Moe *m, Part *p, bm_tensor *t) noexcept nogil:
    cdef Router *r = &m.ahead.routers[p.layer]
    router_walk(r, t.src[2], t.src[1])
    r.graph = m.walk.graph
    if r.state > 0 and not _ahead_reserve(&m.ahead, router_scratch(r)):
        r.state = -1


cdef c_bool _on_node(bm_tensor *t, c_bool ask, void *userdata) noexcept nogil:
    cdef Moe *m = <Moe *>userdata
    cdef bm_custom_params cp
    cdef Part *p
    m.time.mark = 0
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
    if m.time.mark:
        m.time.graph.compute_ns += now - m.time.mark
    elif m.time.begun_ns:
        m.time.graph.build_ns += now - m.time.begun_ns
        m.time.begun_ns = 0
    m.time.mark = now
    if now - m.stop.looked_ns > SIGNAL_NS:
        m.stop.looked_ns = now
        with gil:
            _check_signals(<object>m.stop.owner)
    return bm_load(&m.stop.requested) != 0 or bm_load(&m.pool.failed) != 0


cdef void _check_signals(Streamer s) noexcept:
    # Runs Python's signal handlers from inside the graph (only the main thread has any to run).
    try:
        PyErr_CheckSignals()
    except BaseException as e:
        s.interrupted = e
        bm_store(&s.m.stop.requested, 1)
