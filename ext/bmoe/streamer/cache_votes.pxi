# Giving up slots by votes: scores of what each layer has, and empty slots aside. Included by _cache.pyx.

cdef inline int64_t _key(int score, int expert) noexcept nogil:
    # Of two equal scores the higher expert is given up first: one order, whatever the history.
    return (<int64_t>score << 16) | (0xffff - expert)


cdef void _find_lowest(Cache *c, int layer) noexcept nogil:
    cdef int64_t *keys = c.keys + c.base[layer]
    cdef int i, at = 0, n = c.n_kept[layer]
    for i in range(1, n):
        at = i if keys[i] < keys[at] else at
    c.lowest[layer] = at if n else -1


cdef void _take_out(Cache *c, int layer, int at) noexcept nogil:
    # The `at`-th of a layer's experts leaves; the last one takes its place.
    cdef int last = c.base[layer] + c.n_kept[layer] - 1
    c.kept[c.base[layer] + at] = c.kept[last]
    c.keys[c.base[layer] + at] = c.keys[last]
    c.n_kept[layer] -= 1
    _find_lowest(c, layer)


cdef void _score_by_votes(Cache *c, int layer) noexcept nogil:
    cdef int i, e
    votes_compare(&c.votes, layer)
    for i in range(c.base[layer], c.base[layer] + c.n_kept[layer]):
        e = c.slots[c.kept[i]].expert
        c.keys[i] = _key(votes_of(&c.votes, e), e)
    _find_lowest(c, layer)


cdef inline int _hold_by_votes(Cache *c, Class *k) noexcept nogil:
    cdef int s = k.empty
    if s >= 0:
        k.empty = c.slots[s].next_empty
    return s


cdef inline void _empty_by_votes(Cache *c, Class *k, int slot) noexcept nogil:
    c.slots[slot].next_empty = k.empty
    k.empty = slot


cdef void _fill_by_votes(Cache *c, int layer, int expert, int slot) noexcept nogil:
    # Nobody has voted for it yet; it is judged with the others when its layer is routed.
    cdef int at = c.base[layer] + c.n_kept[layer]
    c.kept[at] = slot
    c.keys[at] = _key(0, expert)
    c.n_kept[layer] += 1
    _find_lowest(c, layer)


cdef void _forget_by_votes(Cache *c, int layer, int slot) noexcept nogil:
    cdef int at = 0
    while c.kept[c.base[layer] + at] != slot:
        at += 1
    _take_out(c, layer, at)
    _empty_by_votes(c, &c.classes[c.cls[layer]], slot)


cdef int _unpinned(Cache *c, int layer, int epoch) noexcept nogil:
    # Place of the lowest of a layer that is not pinned, or -1.
    cdef int i, at = -1, first = c.base[layer]
    for i in range(c.n_kept[layer]):
        if c.slots[c.kept[first + i]].pin != epoch and (at < 0 or c.keys[first + i] < c.keys[first + at]):
            at = i
    return at


cdef int _give_up(Cache *c, int layer, int score, int epoch) noexcept nogil:
    # Empties the slot of least worth for an expert of `layer`, which is being routed; -1 where all are pinned or
    # worth more than `score`. A score weighs once for a layer that has just passed, twice for the next.
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int i, l, at, s, from_layer = -1, from_at = -1
    cdef int64_t worth, least = 0
    for i in range(k.first_member, k.first_member + k.n_layers):
        l = c.members[i]
        at = c.lowest[l]
        if l == layer:
            if at >= 0 and c.slots[c.kept[c.base[l] + at]].pin == epoch:
                at = _unpinned(c, l, epoch)
        if at < 0:
            continue
        worth = (c.keys[c.base[l] + at] >> 16) * (2 * c.n_layers - (l - layer if l > layer else l - layer + c.n_layers))
        if from_layer < 0 or worth < least:
            from_layer = l
            from_at = at
            least = worth
    if from_layer < 0 or <int64_t>score * c.n_layers < least:
        return -1
    s = c.kept[c.base[from_layer] + from_at]
    _take_out(c, from_layer, from_at)
    c.table[c.base[from_layer] + c.slots[s].expert] = -1
    c.counts.evictions += 1
    return s


cdef int _admit_by_votes(Cache *c, int layer, int expert, int epoch) noexcept nogil:
    cdef Class *k = &c.classes[c.cls[layer]]
    cdef int s = _hold_by_votes(c, k), score = votes_of(&c.votes, expert) if c.scoring else 0
    cdef int at
    if s >= 0:
        c.n_resident += 1
    else:
        s = _give_up(c, layer, score, epoch)
        if s < 0:
            return -1
    at = c.base[layer] + c.n_kept[layer]
    c.slots[s].layer = layer
    c.slots[s].expert = expert
    c.slots[s].pin = epoch
    c.table[c.base[layer] + expert] = s
    c.kept[at] = s
    c.keys[at] = _key(score, expert)
    if c.lowest[layer] < 0 or c.keys[at] < c.keys[c.base[layer] + c.lowest[layer]]:
        c.lowest[layer] = c.n_kept[layer]
    c.n_kept[layer] += 1
    return s
