# The index: which expert is in which slot, and the order in which a batch uses it. Included by _cache.pyx.

cdef int _cache_init(Cache *c, list n_expert, list layer_class, list class_slots, int policy, int n_used) except -1:
    cdef int i, total = 0
    _cache_free(c)
    c.policy = policy
    c.n_layers = len(n_expert)
    c.n_classes = len(class_slots)
    c.n_slots = sum(class_slots)
    votes_init(&c.votes, n_expert, n_used)
    c.base = <int *>zeroed(c.n_layers, sizeof(int))
    c.n_expert = <int *>zeroed(c.n_layers, sizeof(int))
    c.cls = <int *>zeroed(c.n_layers, sizeof(int))
    c.members = <int *>zeroed(c.n_layers, sizeof(int))
    c.n_kept = <int *>zeroed(c.n_layers, sizeof(int))
    c.lowest = <int *>zeroed(c.n_layers, sizeof(int))
    c.classes = <Class *>zeroed(c.n_classes, sizeof(Class))
    c.slots = <Slot *>zeroed(c.n_slots, sizeof(Slot))
    for i in range(c.n_layers):
        c.base[i] = total
        c.n_expert[i] = n_expert[i]
        c.lowest[i] = -1
        c.cls[i] = layer_class[i]
        total += c.n_expert[i]
    c.table = <int *>zeroed(total, sizeof(int))
    c.kept = <int *>zeroed(total, sizeof(int))
    c.keys = <int64_t *>zeroed(total, sizeof(int64_t))
    c.seen = <unsigned char *>zeroed(total, 1)
    for i in range(total):
        c.table[i] = -1
    _classes_init(c, class_slots)
    return 0


cdef int _classes_init(Cache *c, list class_slots) except -1:
    cdef int i, j, layer, member = 0, slot = 0
    cdef Class *k
    for i in range(c.n_classes):
        k = &c.classes[i]
        k.first_member = member
        for layer in range(c.n_layers):
            if c.cls[layer] == i:
                c.members[member] = layer
                member += 1
                k.n_experts += c.n_expert[layer]
        k.n_layers = member - k.first_member
        k.first = slot
        k.count = class_slots[i]
        k.head = k.tail = k.empty = -1
        # With a slot for every expert, or none at all, there is nothing to choose.
        if c.policy == POLICY_VOTES and 0 < k.count < k.n_experts:
            c.scoring = 1
        for j in range(k.count):
            c.slots[slot].layer = -1
            c.slots[slot].pin = -1
            if c.policy == POLICY_LRU:
                _push_front(c, k, slot)
            else:
                _empty_by_votes(c, k, slot)
            slot += 1
    return 0


cdef void _cache_free(Cache *c) noexcept nogil:
    votes_free(&c.votes)
    free(c.base)
    free(c.n_expert)
    free(c.cls)
    free(c.members)
    free(c.n_kept)
    free(c.lowest)
    free(c.kept)
    free(c.keys)
    free(c.classes)
    free(c.slots)
    free(c.table)
    free(c.seen)
    memset(c, 0, sizeof(Cache))


# ---- a batch of a layer -----------------------------------------------------------------------------

cdef void cache_begin(Cache *c, int layer, int n_tok) noexcept nogil:
    if c.scoring:
        votes_begin(&c.votes, layer, n_tok)


cdef void cache_note(Cache *c, int layer, int n_tok, int tok, int expert) noexcept nogil:
    if c.scoring:
        votes_note(&c.votes, layer, n_tok, tok, expert)


cdef void cache_score(Cache *c, int layer) noexcept nogil:
    if c.scoring:
        _score_by_votes(c, layer)


cdef int cache_find(Cache *c, int layer, int expert) noexcept nogil:
    return c.table[c.base[layer] + expert]


cdef void cache_place(Cache *c, int layer, const int *experts, int n, int n_keep, int epoch, int *slots,
                      unsigned char *hit, unsigned char *again) noexcept nogil:
    cdef int x, s
    # Resident experts are pinned before any slot is given away.
    for x in range(n):
        s = cache_find(c, layer, experts[x])
        slots[x] = s
        hit[x] = s >= 0
        if s >= 0:
            c.slots[s].pin = epoch
            c.counts.hits += 1
    # Where slots are short, the first experts are the first to be offered one.
    for x in range(n):
        if hit[x]:
            continue
        c.counts.misses += 1
        again[x] = cache_seen(c, layer, experts[x])
        if x >= n_keep:
            continue
        if c.policy == POLICY_VOTES:
            slots[x] = _admit_by_votes(c, layer, experts[x], epoch)
        else:
            slots[x] = _admit_by_use(c, layer, experts[x], epoch)
    # Recency is that of use, whether an expert was read or not.
    if c.policy == POLICY_LRU:
        for x in range(n_keep - 1, -1, -1):
            if slots[x] >= 0:
                _touch_by_use(c, slots[x])


cdef void cache_forget(Cache *c, int slot) noexcept nogil:
    cdef Slot *x = &c.slots[slot]
    if x.layer >= 0:
        c.table[c.base[x.layer] + x.expert] = -1
        if c.policy == POLICY_VOTES:
            _forget_by_votes(c, x.layer, slot)
        x.layer = -1
        c.n_resident -= 1


cdef int cache_seen(Cache *c, int layer, int expert) noexcept nogil:
    cdef unsigned char *b = &c.seen[c.base[layer] + expert]
    cdef int before = b[0]
    b[0] = 1
    return before


# ---- reading ahead ----------------------------------------------------------------------------------

cdef int cache_hold(Cache *c, int layer) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int s = _hold_by_votes(c, k) if c.policy == POLICY_VOTES else _hold_by_use(c, k)
    k.n_held += s >= 0
    return s


cdef void cache_release(Cache *c, int layer, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    k.n_held -= 1
    if c.policy == POLICY_VOTES:
        _empty_by_votes(c, k, slot)
    else:
        _push_behind(c, k, slot, k.tail)


cdef bint cache_fill(Cache *c, int layer, int expert, int slot) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef Slot *x = &c.slots[slot]
    if c.table[c.base[layer] + expert] >= 0:
        cache_release(c, layer, slot)
        return False
    k.n_held -= 1
    x.layer = layer
    x.expert = expert
    x.pin = -1
    c.table[c.base[layer] + expert] = slot
    c.n_resident += 1
    c.seen[c.base[layer] + expert] = 1
    if c.policy == POLICY_VOTES:
        _fill_by_votes(c, layer, expert, slot)
    else:
        _fill_by_use(c, k, slot)
    return True
