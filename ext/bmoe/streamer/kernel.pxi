# The kernel: a matmul of experts in slots, each computed as soon as it is there. Included by _streamer.pyx.

cdef void _quantize(Moe *m, bm_tensor *a, int vdt, int ith, int nth) noexcept nogil:
    # Each thread takes its share of the blocks of every row; blocks are independent, so the bits do not
    # depend on the split.
    cdef int64_t bs = ggml().blck_size(vdt), ts = ggml().type_size(vdt)
    cdef int64_t n = a.ne[0] // bs, b0 = ith * n // nth, b1 = (ith + 1) * n // nth, i1, i2
    cdef size_t row = ggml().row_size(vdt, a.ne[0])
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(vdt)
    if b1 <= b0:
        return
    for i2 in range(a.ne[2]):
        for i1 in range(a.ne[1]):
            tr.from_float(<const float *>(<char *>a.data + i2 * a.nb[2] + i1 * a.nb[1] + b0 * bs * a.nb[0]),
                          m.scratch.q + (i2 * a.ne[1] + i1) * row + b0 * ts, (b1 - b0) * bs)


cdef void _rows(Moe *m, Part *p, bm_tensor *dst, int x, int c, int nc, int ith) noexcept nogil:
    # Chunk c of nc of expert x: its share of the weight rows, for all its activation rows.
    cdef Plan *plan = &m.plan
    cdef bm_tensor *w = dst.src[0]
    cdef bm_tensor *a = dst.src[1]
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(w.type)
    cdef int32_t *rows = plan.rows + 2 * plan.start[x]
    cdef int n_rows = plan.start[x + 1] - plan.start[x]
    cdef char *weights = _slice(m, p, x)
    cdef bint raw = a.type == tr.vec_dot_type
    cdef char *acts = <char *>a.data if raw else m.scratch.q
    cdef size_t row_size = ggml().row_size(tr.vec_dot_type, a.ne[0])
    cdef size_t s1 = a.nb[1] if raw else row_size
    cdef size_t s2 = a.nb[2] if raw else row_size * <size_t>a.ne[1]
    cdef bm_tensor shadow
    cdef bm_tensor shadow_w
    cdef bm_compute_params params
    cdef int64_t r0, r1, r, top, k
    cdef char *col
    cdef float *out
    if m.scratch.tiled != NULL and n_rows >= 2:
        # ggml decides by itself whether its tiled kernel serves this type and this many rows.
        memcpy(&shadow, dst, sizeof(bm_tensor))
        memcpy(&shadow_w, w, sizeof(bm_tensor))
        shadow_w.data = weights
        shadow.src[0] = &shadow_w
        memset(&params, 0, sizeof(params))
        params.ith = c
        params.nth = nc
        params.wdata = acts
        if ggml().tiled_id(&params, &shadow, 0, n_rows, rows,
                           <char *>((<uintptr_t>m.scratch.tiled + 63) & ~<uintptr_t>63)
                           + (<int64_t>ith - c) * <int64_t>m.scratch.tiled_one):
            return
    r0 = w.ne[1] * c // nc
    r1 = w.ne[1] * (c + 1) // nc
    r = r0
    while r < r1:
        top = r + 16 if r + 16 < r1 else r1
        for k in range(n_rows):
            col = acts + (rows[2 * k] % a.ne[1]) * s1 + rows[2 * k + 1] * s2
            out = <float *>(<char *>dst.data + rows[2 * k] * dst.nb[1] + rows[2 * k + 1] * dst.nb[2])
            for r0 in range(r, top):
                tr.vec_dot(<int>w.ne[0], out + r0, 0, weights + r0 * w.nb[1], 0, col, 0, 1)
        r = top


cdef inline void _spend(int64_t *account, int64_t *since) noexcept nogil:
    # Charges what has passed on thread 0.
    cdef int64_t now = bm_now_ns()
    account[0] += now - since[0]
    since[0] = now


cdef void _expert_matmul(bm_tensor *dst, int ith, int nth, void *userdata) noexcept nogil:
    cdef Part *p = <Part *>userdata
    cdef Moe *m = <Moe *>p.moe
    cdef Plan *plan = &m.plan
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(dst.src[0].type)
    cdef bint quantize = not p.keep_q and dst.src[1].type != tr.vec_dot_type
    cdef int *next_chunk
    cdef int *n_chunks
    cdef int *left
    cdef int seq, x, c, r
    cdef bint progress, unread
    cdef int64_t t0 = bm_now_ns(), t, since = t0
    if ith == 0 and m.time.mark:
        m.time.graph.compute_ns += t0 - m.time.mark
    if m.skip:
        if ith == 0:
            m.time.mark = t0
            memset(dst.data, 0, sizeof(float) * <size_t>(dst.ne[0] * dst.ne[1] * dst.ne[2]))
        return
    if p.first and ith == 0:
        _make_plan(m, p, dst)
        since = bm_now_ns()
    if quantize:
        _quantize(m, dst.src[1], tr.vec_dot_type, ith, nth)
    if p.first or quantize:
        bm_barrier_wait(&m.barrier, nth)
    if p.first and ith == nth - 1 and (m.ahead.on or m.ahead.scored):
        if ith == 0:
            _spend(&m.time.graph.compute_ns, &since)
        _guess(m, p, dst)
        if ith == 0:
            _spend(&m.time.graph.manage_ns, &since)
    if m.drop.n_gone:
        drop_zero(&m.drop, dst, plan.rows + 2 * plan.start[plan.n], ith, nth)
    next_chunk = plan.next_chunk + p.order * plan.max_expert
    n_chunks = plan.n_chunks + p.order * plan.max_expert
    left = plan.left_chunks + p.order * plan.max_expert
    while True:
        seq = bm_load(&m.pool.done_seq)
        progress = False
        unread = False
        for x in range(plan.n):
            if bm_load(&next_chunk[x]) >= n_chunks[x]:
                continue
            if not _ready(m, p, x):
                unread = True
                continue
            while not bm_load(&m.pool.failed):
                c = bm_add(&next_chunk[x], 1)
                if c >= n_chunks[x]:
                    break
                _rows(m, p, dst, x, c, n_chunks[x], ith)
                progress = True
                if plan.place[x] < 0 and bm_add(&left[x], -1) == 1:
                    r = plan.area[p.order * plan.max_expert + x]
                    if ith == 0:
                        _spend(&m.time.graph.compute_ns, &since)
                    bm_spin_lock(&plan.issue_lock)
                    m.ring.empty[m.ring.n_empty] = r
                    m.ring.n_empty += 1
                    bm_spin_unlock(&plan.issue_lock)
                    _issue(m)
                    if ith == 0:
                        _spend(&m.time.graph.manage_ns, &since)
        # An expert that was ready but whose last chunk another thread took is nothing to wait for.
        if not unread or bm_load(&m.pool.failed):
            break
        if not progress:
            if ith == 0:
                _spend(&m.time.graph.compute_ns, &since)
            t = bm_now_ns()
            pool_wait_progress(m.pool, seq)
            bm_add64(&m.counts.stall_ns, bm_now_ns() - t)
            if ith == 0:
                _spend(&m.time.graph.wait_ns, &since)
    if ith == 0:
        _spend(&m.time.graph.compute_ns, &since)
        m.time.mark = since
        m.counts.moe_ns += since - t0
