# cython: language_level=3
"""Expert matmuls from slots: the graph hook, the plan of a layer, and the kernel that waits per expert.

llama.cpp shows every graph node to `cb_eval` before it runs. A `MUL_MAT_ID` over a routed-expert tensor is
turned into a custom op there; ggml's own compute threads then call `_expert_matmul`. The first of a layer's
matmuls plans: it looks the routed experts up in the cache, gives slots to the misses and queues their reads,
all slices of the first matmul before those of the second. Each matmul computes what is resident and waits
only for slices still under way. One `vec_dot` per weight row and activation row, or ggml's tiled kernel where
ggml would use it: the same functions on the same operands as the resident graph, hence the same bits.

A batch that routes more experts than the cache may take (a prefill) streams the others through a ring of
staging areas, each slice once, and admits only the experts of its last tokens.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from bmoe._cache cimport (Cache, ExpertCache, cache_admit, cache_begin, cache_find, cache_forget, cache_note,
                          cache_score, cache_seen, cache_touch)
from bmoe._drop cimport drop_matmul, drop_plan, drop_reserve, drop_walk, drop_zero
from bmoe._ggml cimport (bm_compute_params, bm_cpu_traits, bm_custom_params, bm_tensor, c_bool, ggml)
from bmoe._lanes cimport (Lanes, Pool, Read, bm_add, bm_add64, bm_barrier_wait, bm_load, bm_load64, bm_now_ns,
                          bm_spin_lock, bm_spin_unlock, bm_store, pool_cancel_low, pool_promote_low, pool_submit,
                          pool_submit_low, pool_wait_idle, pool_wait_progress)
from bmoe._predict cimport Router, router_scratch, router_top, router_walk
from bmoe._routelog cimport LOG_CLEAR, LOG_FORGET, log_event, log_free, log_outcome, log_plan, log_take

DEF PAGE = 4096
DEF BATCH = 32
# Weight rows of one unit of work: about 10 us of dot products, small against a layer, large against an atomic.
DEF CHUNK_ROWS = 64
# Expert rows from which a chunk is worth widening for the tiled kernel, which works on groups of rows.
DEF TILED_CHUNK_ROWS = 256
# How often a running graph looks for Ctrl-C.
DEF SIGNAL_NS = 50000000


# ---- the graph hook -----------------------------------------------------------------------------

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


# ---- the plan -----------------------------------------------------------------------------------

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
    cdef int64_t start, first
    cdef char *dst
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
            reads[n].pending = &m.slot_pending[place * MAX_PARTS + p.slice_]
        else:
            if m.n_ring_free == 0:
                break
            m.n_ring_free -= 1
            r = m.ring_free[m.n_ring_free]
            bm_store(&m.ring_pending[r], 1)
            dst = <char *>(m.ring_base + r * m.ring_stride)
            reads[n].pending = &m.ring_pending[r]
            bm_store(&m.x_ring[p.order * m.max_expert + x], r)
        start = p.offset + m.x_expert[x] * p.nbytes
        first = start & ~<int64_t>(PAGE - 1)
        reads[n].file = p.file
        reads[n].offset = first
        reads[n].need = start - first + p.nbytes
        reads[n].length = (reads[n].need + PAGE - 1) & ~<int64_t>(PAGE - 1)
        reads[n].dst = dst
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


include "moe_prefetch.pxi"


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
    if not m.overlap:
        t0 = bm_now_ns()
        pool_wait_idle(m.pool)
        bm_add64(&m.stall_ns, (bm_now_ns() - t0) * m.n_threads)


# ---- the kernel ---------------------------------------------------------------------------------

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
                          m.q + (i2 * a.ne[1] + i1) * row + b0 * ts, (b1 - b0) * bs)


cdef void _rows(Moe *m, Part *p, bm_tensor *dst, int x, int c, int nc, int ith) noexcept nogil:
    # Chunk c of nc of expert x: its share of the weight rows, for all its activation rows.
    cdef bm_tensor *w = dst.src[0]
    cdef bm_tensor *a = dst.src[1]
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(w.type)
    cdef int32_t *rows = m.rows + 2 * m.x_start[x]
    cdef int n_rows = m.x_start[x + 1] - m.x_start[x]
    cdef char *weights = _slice(m, p, x)
    cdef bint raw = a.type == tr.vec_dot_type
    cdef char *acts = <char *>a.data if raw else m.q
    cdef size_t row_size = ggml().row_size(tr.vec_dot_type, a.ne[0])
    cdef size_t s1 = a.nb[1] if raw else row_size
    cdef size_t s2 = a.nb[2] if raw else row_size * <size_t>a.ne[1]
    cdef bm_tensor shadow
    cdef bm_tensor shadow_w
    cdef bm_compute_params params
    cdef int64_t r0, r1, r, top, k
    cdef char *col
    cdef float *out
    if m.tiled != NULL and n_rows >= 2:
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
                           <char *>((<uintptr_t>m.tiled + 63) & ~<uintptr_t>63)
                           + (<int64_t>ith - c) * <int64_t>m.tiled_one):
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


cdef void _expert_matmul(bm_tensor *dst, int ith, int nth, void *userdata) noexcept nogil:
    cdef Part *p = <Part *>userdata
    cdef Moe *m = <Moe *>p.moe
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(dst.src[0].type)
    cdef bint quantize = not p.keep_q and dst.src[1].type != tr.vec_dot_type
    cdef int *next_chunk
    cdef int *n_chunks
    cdef int *left
    cdef int seq, x, c, r
    cdef bint progress, unread
    cdef int64_t t0 = bm_now_ns(), t
    if m.skip:
        if ith == 0:
            memset(dst.data, 0, sizeof(float) * <size_t>(dst.ne[0] * dst.ne[1] * dst.ne[2]))
        return
    if p.first and ith == 0:
        _make_plan(m, p, dst)
    if quantize:
        _quantize(m, dst.src[1], tr.vec_dot_type, ith, nth)
    if p.first or quantize:
        bm_barrier_wait(&m.barrier, nth)
    if p.first and ith == nth - 1 and (m.prefetch or m.predict_log):
        _guess(m, p, dst)
    if m.drop.n_gone:
        drop_zero(&m.drop, dst, m.rows + 2 * m.x_start[m.n_x], ith, nth)
    next_chunk = m.next_chunk + p.order * m.max_expert
    n_chunks = m.n_chunks + p.order * m.max_expert
    left = m.left_chunks + p.order * m.max_expert
    while True:
        seq = bm_load(&m.pool.done_seq)
        progress = False
        unread = False
        for x in range(m.n_x):
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
                if m.x_place[x] < 0 and bm_add(&left[x], -1) == 1:
                    r = m.x_ring[p.order * m.max_expert + x]
                    bm_spin_lock(&m.issue_lock)
                    m.ring_free[m.n_ring_free] = r
                    m.n_ring_free += 1
                    bm_spin_unlock(&m.issue_lock)
                    _issue(m)
        # An expert that was ready but whose last chunk another thread took is nothing to wait for.
        if not unread or bm_load(&m.pool.failed):
            break
        if not progress:
            t = bm_now_ns()
            pool_wait_progress(m.pool, seq)
            bm_add64(&m.stall_ns, bm_now_ns() - t)
    if ith == 0:
        m.moe_ns += bm_now_ns() - t0


# ---- the Python face ----------------------------------------------------------------------------

cdef class Streamer:
    """Serves the expert matmuls of one model from slots filled by `lanes`.

    `layers`: for each layer with routed experts a list of `(tensor address, file, offset, bytes of one
    expert, area offset)` and its number of experts. Hook it up with `callback`, `abort_callback` and
    `userdata` (addresses); it does nothing until `start()`.
    """

    def __cinit__(self, Lanes lanes, list layers, int n_threads, bint overlap):
        cdef Moe *m = &self.m
        cdef int i, j, k = 0
        cdef Part *p
        self.lanes = lanes
        m.pool = &lanes.pool
        m.owner = <void *>self
        m.n_threads = n_threads
        m.overlap = overlap
        m.n_layers = len(layers)
        m.n_parts = sum(len(parts) for parts, _ in layers)
        m.n_segments = 2 * m.n_parts + 2
        m.layers = <Layer *>calloc(m.n_layers + 1, sizeof(Layer))
        m.parts = <Part *>calloc(m.n_parts + 1, sizeof(Part))
        m.segments = <Segment *>calloc(m.n_segments, sizeof(Segment))
        m.max_expert = max([n for _, n in layers], default=1)
        m.walk_layer = -1
        for i, (parts, n_expert) in enumerate(layers):
            if len(parts) > MAX_PARTS:
                raise ValueError(f"layer {i} has {len(parts)} expert tensors, at most {MAX_PARTS} are served")
            m.layers[i].n_expert = n_expert
            m.layers[i].n_parts = len(parts)
            m.layers[i].first_part = k
            m.layers[i].expert_bytes = sum([nbytes for _, _, _, nbytes, _ in parts])
            # Until something is known: a layer that misses.
            m.layers[i].missing = 1.0
            for j, (tensor, file, offset, nbytes, area) in enumerate(parts):
                p = &m.parts[k]
                k += 1
                p.moe = m
                p.layer = i
                p.slice_ = j
                p.file = file
                p.offset = offset
                p.nbytes = nbytes
                p.area = area
                p.tensor = <bm_tensor *><uintptr_t>tensor
        n = m.max_expert
        m.x_expert = <int *>calloc(n, sizeof(int))
        m.x_slot = <int *>calloc(n, sizeof(int))
        m.x_place = <int *>calloc(n, sizeof(int))
        m.x_fate = <unsigned char *>calloc(n, 1)
        m.routers = <Router *>calloc(m.n_layers + 1, sizeof(Router))
        m.guess = <int *>calloc(m.n_layers * MAX_GUESSES + 1, sizeof(int))
        m.n_guess = <int *>calloc(m.n_layers + 1, sizeof(int))
        m.last = <int *>calloc(m.n_layers * MAX_GUESSES + 1, sizeof(int))
        m.n_last = <int *>calloc(m.n_layers + 1, sizeof(int))
        m.scores = <int64_t *>calloc(m.n_layers * SCORES * 2 + 1, sizeof(int64_t))
        m.x_start = <int *>calloc(n + 1, sizeof(int))
        m.x_of = <int *>calloc(n, sizeof(int))
        m.count = <int *>calloc(n, sizeof(int))
        m.fill_at = <int *>calloc(n, sizeof(int))
        m.miss = <int *>calloc(n, sizeof(int))
        m.x_reread = <unsigned char *>calloc(n, 1)
        m.x_ring = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.next_chunk = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.left_chunks = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.n_chunks = <int *>calloc(MAX_PARTS * n, sizeof(int))

    def start(self, ExpertCache cache, list classes, list layer_class, list quotas, int n_ring, int64_t ring_address,
              int64_t ring_stride):
        """Begins to serve. `classes`: per size class `(address of its memory, slots, spares, stride)`, the spares'
        memory behind the slots'; `layer_class`: the class of each layer.

        `quotas`: experts a wide batch may admit, per layer. The ring: `n_ring` areas of `ring_stride` bytes.
        Spares take what is read ahead; without any, nothing is.
        """
        cdef Moe *m = &self.m
        cdef int i, j, k, places = sum([slots + spares for _, slots, spares, _ in classes]), at = 0, slot = 0
        if m.running:
            raise RuntimeError("already started")
        self.cache = cache
        m.cache = &cache.c
        m.place = <int *>calloc(m.cache.n_slots + 1, sizeof(int))
        m.slot_pending = <int *>calloc(places * MAX_PARTS + 1, sizeof(int))
        m.n_spares = sum([spares for _, _, spares, _ in classes])
        m.spares = <Spare *>calloc(m.n_spares + 1, sizeof(Spare))
        k = 0
        for i, (address, slots, spares, stride) in enumerate(classes):
            for j in range(m.n_layers):
                if layer_class[j] == i:
                    m.layers[j].base, m.layers[j].first, m.layers[j].stride = address, at, stride
                    m.layers[j].cls = i
            for _ in range(slots):
                m.place[slot] = at
                slot += 1
                at += 1
            for _ in range(spares):
                m.spares[k].cls = i
                m.spares[k].place = at
                m.spares[k].layer = -1
                k += 1
                at += 1
        for i in range(m.n_layers):
            m.layers[i].quota = quotas[i]
        m.slot_fresh = <unsigned char *>calloc(m.cache.n_slots + 1, 1)
        m.n_ring = n_ring
        m.ring_base = ring_address
        m.ring_stride = ring_stride
        m.ring_pending = <int *>calloc(n_ring + 1, sizeof(int))
        m.ring_free = <int *>calloc(n_ring + 1, sizeof(int))
        m.n_ring_free = n_ring
        for i in range(n_ring):
            m.ring_free[i] = i
        m.running = 1

    @property
    def callback(self):
        """Address for `llama_context_params.cb_eval`."""
        return <uintptr_t><void *>_on_node

    @property
    def abort_callback(self):
        """Address for `llama_context_params.abort_callback`."""
        return <uintptr_t><void *>_on_abort

    @property
    def userdata(self):
        """Address for both callbacks."""
        return <uintptr_t>&self.m

    def request_abort(self):
        """Makes the running graph stop at its next node; safe from any thread and from a signal handler."""
        bm_store(&self.m.abort, 1)

    @property
    def abort_requested(self):
        return bm_load(&self.m.abort) != 0

    @property
    def interrupt_pending(self):
        """True where a signal handler raised inside a graph and nobody has taken the exception yet."""
        return self.interrupted is not None

    @property
    def skip(self):
        """True: the experts of the graphs that run now are neither read nor computed, their results are zeros.

        For a batch without outputs through a single layer, of which only keys and values are kept: these come
        before the experts. Set it between graphs.
        """
        return self.m.skip != 0

    @skip.setter
    def skip(self, bint value):
        self.m.skip = value

    def take_interrupt(self):
        """The exception a signal handler raised inside the last graph, or None; clears it and the abort."""
        e, self.interrupted = self.interrupted, None
        bm_store(&self.m.abort, 0)
        return e

    def reset(self, bint forget):
        """After a graph that was stopped: waits for reads under way; `forget`: empties the cache as well."""
        cdef Moe *m = &self.m
        if not m.running:
            return
        with nogil:
            _settle(m)
        if forget:
            with nogil:
                bm_spin_lock(&m.index_lock)
                log_event(&m.log, LOG_CLEAR, 0, 0)
            self.cache.clear()
            bm_spin_unlock(&m.index_lock)

    def counters(self):
        """Running totals as a tuple: plans, routed, hits, misses, evictions, rereads, streamed, reads, bytes,
        plan_ns, stall_ns (over all compute threads), moe_ns. Bytes are of slices, alignment excluded."""
        cdef Moe *m = &self.m
        if not m.running:
            return (0,) * 12
        return (m.n_plans, m.routed, m.cache.hits, m.cache.misses, m.cache.evictions, m.cache.rereads, m.streamed,
                m.reads, m.bytes, m.plan_ns, bm_load64(&m.stall_ns), m.moe_ns)

    def count_uses(self):
        """Counts the routed rows of each expert from now on; see `uses`."""
        cdef Moe *m = &self.m
        if m.running and m.uses == NULL:
            m.uses = <int64_t *>calloc(sum(m.layers[i].n_expert for i in range(m.n_layers)) + 1, sizeof(int64_t))

    def uses(self):
        """Routed rows of each expert since `count_uses`, a list for each layer; empty where nothing is counted."""
        cdef Moe *m = &self.m
        if m.uses == NULL:
            return []
        return [[m.uses[m.cache.base[i] + e] for e in range(m.layers[i].n_expert)] for i in range(m.n_layers)]

    def log_routes(self, bint on):
        """Whether plans are recorded from now on; see `take_routes`."""
        self.m.log.on = on

    def take_routes(self):
        """The records since the last call, as bytes of int32 (`bmoe.tracing` reads them), and how many were lost."""
        cdef Moe *m = &self.m
        with nogil:
            bm_spin_lock(&m.index_lock)
        try:
            return log_take(&m.log)
        finally:
            bm_spin_unlock(&m.index_lock)

    def drop_cold(self, double threshold):
        """Graphs for which `set_dropping` is on leave out cold experts below `threshold` / top-k; 0: none do."""
        self.m.drop.threshold = threshold

    def set_dropping(self, bint on):
        """Whether the graphs from now on drop."""
        self.m.drop.active = on

    def take_drop_fault(self):
        """The layer that stopped a graph because its routing weights were not found, or None; clears it."""
        layer, self.m.drop.fault = self.m.drop.fault - 1, 0
        return layer if layer >= 0 else None

    def drop_counters(self):
        """Running totals as a tuple: (layer, position) pairs that were decided, routed experts of these, dropped
        ones, and the sum over the pairs of the share of the weights that fell."""
        return (self.m.drop.positions, self.m.drop.routed, self.m.drop.dropped, self.m.drop.mass)

    def read_ahead(self, str how="off", bint log=False):
        """What is read before its layer is routed: "next-layer" (what the layer's router makes of the input of the
        router before it), "previous-token" or "off". `log`: guesses are scored, whether they are acted on or not."""
        self.m.prefetch = {"off": 0, "next-layer": PREFETCH_NEXT, "previous-token": PREFETCH_PREVIOUS}[how]
        self.m.predict_log = log

    def unpredictable(self):
        """Layers seen so far whose router could not be read off the graph, or whose input is gone when the experts
        run: nothing is guessed from or for them."""
        return [i for i in range(self.m.n_layers)
                if self.m.routers[i].state < 0 or (self.m.routers[i].state > 0 and not self.m.routers[i].alive)]

    def prefetch_counters(self):
        """Running totals as a tuple: experts read ahead, routed experts found among them, guesses taken back before
        they were read whole, ns spent guessing; then bytes that were used and of these re-reads, bytes that were
        not, and of these re-reads."""
        cdef Moe *m = &self.m
        return (m.prefetch_guesses, m.prefetch_hits, m.prefetch_cancelled, m.guess_ns, m.prefetch_used,
                m.prefetch_used_rereads, m.prefetch_wasted, m.prefetch_wasted_rereads)

    def scores(self):
        """Of the routed experts of decoded tokens, how many were guessed: per layer `{guess: (right, all)}`, for
        "control" (the layer's own router run again), "next-layer" and "previous-token"."""
        names = ("control", "next-layer", "previous-token")
        return [{name: (self.m.scores[(i * SCORES + k) * 2], self.m.scores[(i * SCORES + k) * 2 + 1])
                 for k, name in enumerate(names)} for i in range(self.m.n_layers)]

    def lie(self, int shift):
        """Adds `shift` to every guessed expert, modulo their number: for the test that output does not depend on it."""
        self.m.lie = shift

    def take_positions(self, int n):
        """Bytes read since the last call, by the batch position that was the first to want them: two lists of `n`
        numbers, all bytes and the part of experts that had been read before. Later positions count with the last.
        """
        cdef Moe *m = &self.m
        cdef int i
        total = [0] * n
        again = [0] * n
        for i in range(m.n_positions):
            total[min(i, n - 1)] += m.position_bytes[i]
            again[min(i, n - 1)] += m.position_rereads[i]
            m.position_bytes[i] = 0
            m.position_rereads[i] = 0
        return total, again

    def corrupt(self, int byte=0):
        """Flips a byte of every filled slot: for the test that shows that the identity gate can fail."""
        cdef Moe *m = &self.m
        cdef int i
        for i in range(m.cache.n_slots):
            if m.cache.slots[i].layer >= 0:
                # The middle of the first slice's area: weights, whatever the alignment.
                (<char *>_place_address(m, m.cache.slots[i].layer, m.place[i]))[PAGE + byte] ^= 0x3f

    def close(self):
        """Lets go of everything; the lanes must be idle or closed, the context freed."""
        cdef Moe *m = &self.m
        if self.closed:
            return
        self.closed = 1
        m.running = 0
        for ptr in (<uintptr_t>m.parts, <uintptr_t>m.layers, <uintptr_t>m.segments, <uintptr_t>m.slot_pending,
                    <uintptr_t>m.slot_fresh, <uintptr_t>m.uses, <uintptr_t>m.x_fate,
                    <uintptr_t>m.ring_pending, <uintptr_t>m.ring_free, <uintptr_t>m.q, <uintptr_t>m.tiled,
                    <uintptr_t>m.x_expert, <uintptr_t>m.x_slot, <uintptr_t>m.x_start, <uintptr_t>m.x_of,
                    <uintptr_t>m.count, <uintptr_t>m.fill_at, <uintptr_t>m.rows, <uintptr_t>m.x_ring,
                    <uintptr_t>m.next_chunk, <uintptr_t>m.left_chunks, <uintptr_t>m.n_chunks,
                    <uintptr_t>m.miss, <uintptr_t>m.x_reread, <uintptr_t>m.position_bytes,
                    <uintptr_t>m.position_rereads, <uintptr_t>m.drop.gone, <uintptr_t>m.x_place,
                    <uintptr_t>m.place, <uintptr_t>m.spares, <uintptr_t>m.routers, <uintptr_t>m.guess_scratch,
                    <uintptr_t>m.guess, <uintptr_t>m.n_guess, <uintptr_t>m.last, <uintptr_t>m.n_last,
                    <uintptr_t>m.scores):
            free(<void *><uintptr_t>ptr)
        log_free(&m.log)

    def __dealloc__(self):
        self.close()
