# Reading ahead: what the next layer will route, guessed while this one computes. Included by _streamer.pyx.
#
# A guess is read into a spare: a slot that the cache's index does not know. Routed after all, it changes places with
# the slot that the cache gives the expert, so nothing is copied and a wrong guess evicts nothing. Reads ahead come
# after those that somebody waits for; what has not begun when the layer is routed, and is not wanted, is taken back.


cdef int _ahead_init(ReadAhead *a, int n_layers) except -1:
    # All but the spares: `_spares_init`.
    _ahead_free(a)
    a.routers = <Router *>zeroed(n_layers, sizeof(Router))
    a.guess = <int *>zeroed(n_layers * MAX_GUESSES, sizeof(int))
    a.n_guess = <int *>zeroed(n_layers, sizeof(int))
    a.scores = <int64_t *>zeroed(n_layers * SCORES * 2, sizeof(int64_t))
    return 0


cdef int _spares_init(ReadAhead *a, int n) except -1:
    free(a.spares)
    a.spares = NULL
    a.n_spares = 0
    a.spares = <Spare *>zeroed(n, sizeof(Spare))
    a.n_spares = n
    return 0


cdef void _ahead_free(ReadAhead *a) noexcept nogil:
    free(a.routers)
    free(a.spares)
    free(a.scratch)
    free(a.guess)
    free(a.n_guess)
    free(a.scores)
    a.routers = NULL
    a.spares = NULL
    a.n_spares = 0
    a.scratch = NULL
    a.room = 0
    a.guess = NULL
    a.n_guess = NULL
    a.scores = NULL


cdef bint _ahead_reserve(ReadAhead *a, int64_t need) noexcept nogil:
    # Room to run a router again; grows, never shrinks.
    if need > a.room:
        free(a.scratch)
        a.scratch = <char *>malloc(need)
        a.room = need if a.scratch != NULL else 0
    return a.room >= need


cdef int _spare_find(Moe *m, int layer, int expert) noexcept nogil:
    cdef int i
    for i in range(m.ahead.n_spares):
        if m.ahead.spares[i].layer == layer and m.ahead.spares[i].expert == expert and not m.ahead.spares[i].broken:
            return i
    return -1


cdef inline bint _loading(Moe *m, Spare *s) noexcept nogil:
    cdef int o
    for o in range(MAX_PARTS):
        if bm_load(&m.slots.pending[s.place * MAX_PARTS + o]) > 0:
            return True
    return False


cdef int _spare_take(Moe *m, int layer) noexcept nogil:
    # An empty spare of the layer's class, or the oldest that nothing is being read into; -1 for none.
    cdef int i, best = -1
    cdef Spare *s
    for i in range(m.ahead.n_spares):
        s = &m.ahead.spares[i]
        # Not one that the layer at work, or the one ahead, is using.
        if s.cls != m.layers[layer].cls or s.epoch == m.plan.epoch or _loading(m, s):
            continue
        if s.layer < 0:
            return i
        if best < 0 or s.epoch < m.ahead.spares[best].epoch:
            best = i
    return best


cdef void _prefetch_settle(Moe *m, Spare *s) noexcept nogil:
    # Takes back what has not been read for a guess that did not come true, and charges the rest.
    cdef int o, n
    cdef int64_t back = 0
    cdef Part *p
    for o in range(m.layers[s.layer].n_parts):
        n = pool_cancel_low(m.pool, s.place * MAX_PARTS + o)
        if n:
            p = &m.parts[m.layers[s.layer].first_part + o]
            back += p.nbytes
            m.counts.reads -= 1
            s.broken = 1
    m.counts.bytes -= back
    m.ahead.bytes.wasted += s.bytes - back
    if s.reread:
        m.ahead.bytes.wasted_rereads += s.bytes - back
    if not s.broken:
        cache_seen(m.cache, s.layer, s.expert)
    else:
        m.ahead.counts.guess_cancelled += 1
    s.open = 0


cdef void _prefetch_leftovers(Moe *m, int layer) noexcept nogil:
    # The layer is routed: guesses at it that were not wanted.
    cdef int i
    for i in range(m.ahead.n_spares):
        if m.ahead.spares[i].open and m.ahead.spares[i].layer == layer:
            _prefetch_settle(m, &m.ahead.spares[i])


cdef void _prefetch_forget(Moe *m) noexcept nogil:
    # After a graph that was stopped: nothing is under way, and nothing guessed is kept.
    cdef int i
    for i in range(m.ahead.n_spares):
        if m.ahead.spares[i].open:
            _prefetch_settle(m, &m.ahead.spares[i])
    pool_wait_idle(m.pool)
    for i in range(m.ahead.n_spares):
        m.ahead.spares[i].layer = -1
        m.ahead.spares[i].broken = 0


cdef void _prefetch_claim(Moe *m, int spare) noexcept nogil:
    # A miss that a spare has, or is getting: its reads become ordinary ones.
    cdef Spare *s = &m.ahead.spares[spare]
    cdef int o
    s.epoch = m.plan.epoch
    if s.open:
        s.open = 0
        m.ahead.bytes.used += s.bytes
        if s.reread:
            m.ahead.bytes.used_rereads += s.bytes
        for o in range(m.layers[s.layer].n_parts):
            pool_promote_low(m.pool, s.place * MAX_PARTS + o)
    m.ahead.counts.guess_hits += 1


cdef void _prefetch_swap(Moe *m, int spare, int slot) noexcept nogil:
    # The cache has given the expert `slot`: the spare's memory becomes that slot's.
    cdef int place = m.slots.place[slot]
    m.slots.place[slot] = m.ahead.spares[spare].place
    m.ahead.spares[spare].place = place
    m.ahead.spares[spare].layer = -1


cdef void _read_ahead(Moe *m, int layer, const int *experts, int n) noexcept nogil:
    # Reads those of `experts` that are neither resident nor on their way.
    cdef Read reads[MAX_PARTS * MAX_GUESSES]
    cdef int chosen[MAX_GUESSES]
    cdef int i, k, o, id, got, n_chosen = 0, n_reads = 0
    cdef Layer *l = &m.layers[layer]
    cdef Spare *s
    cdef Part *p
    for i in range(n):
        if cache_find(m.cache, layer, experts[i]) >= 0 or _spare_find(m, layer, experts[i]) >= 0:
            continue
        k = _spare_take(m, layer)
        if k < 0:
            break
        s = &m.ahead.spares[k]
        s.layer = layer
        s.expert = experts[i]
        s.broken = 0
        s.open = 1
        s.epoch = m.plan.epoch
        s.bytes = l.expert_bytes
        s.reread = m.cache.seen[m.cache.base[layer] + experts[i]]
        chosen[n_chosen] = k
        n_chosen += 1
    # All first slices before all second ones: the order in which they will be wanted.
    for o in range(l.n_parts):
        p = &m.parts[l.first_part + o]
        for i in range(n_chosen):
            s = &m.ahead.spares[chosen[i]]
            id = s.place * MAX_PARTS + p.slice_
            read_init(&reads[n_reads], p.file, p.offset + s.expert * p.nbytes, p.nbytes,
                      <char *>(_place_address(m, layer, s.place) + p.area), &m.slots.pending[id])
            reads[n_reads].id = id
            bm_store(&m.slots.pending[id], 1)
            n_reads += 1
    if n_reads == 0:
        return
    bm_spin_lock(&m.plan.issue_lock)
    m.counts.bytes += n_chosen * l.expert_bytes
    m.counts.reads += n_reads
    bm_spin_unlock(&m.plan.issue_lock)
    m.ahead.counts.guessed += n_chosen
    got = pool_submit_low(m.pool, reads, n_reads)
    if got < n_reads:
        # No room in the queue, which holds more than all spares: cannot be, and must not go unnoticed.
        bm_store(&m.stop.requested, 1)


cdef void _guess(Moe *m, Part *p, bm_tensor *dst) noexcept nogil:
    # Run by one thread at the first matmul of a layer, after its plan: guesses at the next layer and reads ahead.
    cdef int t = p.layer + 1, i, k, tok, n = 0, n_tok = <int>dst.src[2].ne[1]
    cdef Router *here = &m.ahead.routers[p.layer]
    cdef Router *next_
    cdef int top[MAX_GUESSES]
    cdef float share[MAX_GUESSES]
    cdef int wanted[MAX_GUESSES]
    cdef bint known
    cdef int64_t t0 = bm_now_ns()
    if n_tok > GUESS_TOKENS:
        return
    if m.ahead.scored and n_tok == 1 and here.state > 0 and here.alive and here.n_used <= MAX_GUESSES:
        router_top(here, <float *>here.x.data, m.ahead.scratch, top, share)
        _score(m, p.layer, SCORE_CONTROL, top, here.n_used, dst.src[2])
    if t >= m.n_layers:
        return
    next_ = &m.ahead.routers[t]
    m.ahead.n_guess[t] = 0
    if next_.graph != here.graph or next_.state <= 0 or next_.n_used > MAX_GUESSES:
        return
    # A layer that misses next to nothing is not worth the product.
    if m.layers[t].missing < 0.05 and not m.ahead.scored:
        return
    if not here.alive or here.n_embd != next_.n_embd:
        return
    for tok in range(n_tok):
        router_top(next_, <float *>(<char *>here.x.data + tok * here.x.nb[1]), m.ahead.scratch, top, share)
        if n_tok == 1:
            m.ahead.n_guess[t] = next_.n_used
            memcpy(m.ahead.guess + t * MAX_GUESSES, top, sizeof(int) * next_.n_used)
        if not m.ahead.on:
            continue
        for i in range(next_.n_used):
            # What would be dropped if it is missing is not worth reading.
            if m.drop.threshold > 0 and m.drop.active and i and share[i] < m.drop.threshold / next_.n_used:
                continue
            known = False
            for k in range(n):
                known = known or wanted[k] == top[i]
            if not known and n < MAX_GUESSES:
                wanted[n] = top[i]
                n += 1
    m.ahead.counts.guess_ns += bm_now_ns() - t0
    if m.ahead.lie:
        for i in range(n):
            wanted[i] = (wanted[i] + m.ahead.lie) % m.layers[t].n_expert
    if m.ahead.on and m.ahead.n_spares:
        _read_ahead(m, t, wanted, n)


cdef void _score(Moe *m, int layer, int kind, const int *guess, int n, bm_tensor *ids) noexcept nogil:
    # How many of a token's routed experts a guess has.
    cdef int i, k, right = 0
    for i in range(ids.ne[0]):
        for k in range(n):
            if guess[k] == _id(ids, i, 0):
                right += 1
                break
    m.ahead.scores[(layer * SCORES + kind) * 2] += right
    m.ahead.scores[(layer * SCORES + kind) * 2 + 1] += ids.ne[0]


cdef void _note_routes(Moe *m, int layer, bm_tensor *ids, int misses) noexcept nogil:
    # After a plan: scores the guess at this layer, and how much the layer misses.
    if m.ahead.scored and ids.ne[1] == 1 and m.ahead.n_guess[layer]:
        _score(m, layer, SCORE_NEXT, m.ahead.guess + layer * MAX_GUESSES, m.ahead.n_guess[layer], ids)
    m.ahead.n_guess[layer] = 0
    if ids.ne[1] <= GUESS_TOKENS:
        m.layers[layer].missing = 0.9 * m.layers[layer].missing + 0.1 * misses
