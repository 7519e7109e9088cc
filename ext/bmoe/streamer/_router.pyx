# cython: language_level=3
"""Routers read off a graph and run again, on another layer's input: which experts will be wanted next.

A router is a product with a weight of the file, then softmax, sigmoid or the like, a bias for the selection, perhaps
groups of experts, and a sort. What is found in the graph from the sorted experts back to the product is kept; a
router with anything else in it cannot be reproduced and is not guessed at.
"""

from libc.math cimport INFINITY, exp, expf, log1pf, sqrtf
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memcpy, strcmp

from bmoe.llama._ggml cimport bm_cpu_traits, bm_tensor, ggml

cdef enum:
    ADD_BIAS = 1
    SOFTMAX = 2
    SIGMOID = 3
    SOFTPLUS = 4
    SQRT = 5


cdef inline bint _is(const bm_tensor *t, const char *op) noexcept nogil:
    return t != NULL and strcmp(ggml().op_name(t.op), op) == 0


cdef inline bm_tensor *_root(bm_tensor *t) noexcept nogil:
    # What a chain of views is of.
    while t != NULL and (_is(t, b"RESHAPE") or _is(t, b"VIEW") or _is(t, b"PERMUTE") or _is(t, b"TRANSPOSE")):
        t = t.src[0]
    return t


cdef bm_tensor *_ungrouped(Router *r, bm_tensor *scores) noexcept nogil:
    # Scores whose losing groups are masked: the scores before that, or NULL where this is something else.
    cdef bm_tensor *rows = scores.src[0]
    cdef bm_tensor *groups
    if not _is(rows, b"SET_ROWS") or rows.src[1] == NULL or not _is(rows.src[2], b"FILL"):
        return NULL
    groups = rows.src[2].src[0]
    if not _is(groups, b"RESHAPE") or groups.ne[0] * groups.ne[1] != scores.ne[0] or groups.ne[0] < 2:
        return NULL
    r.n_groups = <int>groups.ne[1]
    r.n_group_used = <int>rows.src[1].ne[0]
    return groups.src[0] if 0 < r.n_group_used <= r.n_groups else NULL


cdef bint _read(Router *r, bm_tensor *ids) noexcept nogil:
    cdef int ops[ROUTER_OPS]
    cdef bm_tensor *args[ROUTER_OPS]
    cdef bm_tensor *t = ids
    cdef const char *name
    cdef int n = 0, i
    r.n_groups = 1
    r.n_group_used = 1
    while _is(t, b"VIEW") or _is(t, b"RESHAPE") or _is(t, b"CONT"):
        t = t.src[0]
    if not _is(t, b"ARGSORT") and not _is(t, b"TOP_K"):
        return False
    t = t.src[0]
    r.n_expert = <int>t.ne[0]
    r.n_used = <int>ids.ne[0]
    if _is(t, b"RESHAPE") and _is(t.src[0], b"SET_ROWS"):
        t = _ungrouped(r, t)
    while t != NULL and not _is(t, b"MUL_MAT"):
        if n == ROUTER_OPS:
            return False
        args[n] = NULL
        if _is(t, b"ADD"):
            if t.src[1] == NULL or not _is(t.src[1], b"NONE") or t.src[1].type != 0 or t.src[1].ne[0] != r.n_expert:
                return False
            ops[n] = ADD_BIAS
            args[n] = t.src[1]
        elif _is(t, b"SOFT_MAX"):
            if t.src[1] != NULL or (<float *>&t.op_params[0])[0] != 1.0:
                return False
            ops[n] = SOFTMAX
        elif _is(t, b"SQRT"):
            ops[n] = SQRT
        elif _is(t, b"UNARY"):
            name = ggml().unary_op_name(ggml().unary_op(t))
            if strcmp(name, b"SIGMOID") == 0:
                ops[n] = SIGMOID
            elif strcmp(name, b"SOFTPLUS") == 0:
                ops[n] = SOFTPLUS
            else:
                return False
        elif not (_is(t, b"RESHAPE") or _is(t, b"VIEW")):
            return False
        else:
            t = t.src[0]
            continue
        n += 1
        t = t.src[0]
    if t == NULL or not _is(t.src[0], b"NONE") or t.src[1] == NULL or t.src[1].type != 0 or t.src[1].nb[0] != 4:
        return False
    r.w = t.src[0]
    r.x = t.src[1]
    r.n_embd = <int>r.w.ne[0]
    if r.w.ne[1] != r.n_expert or ggml().cpu_traits(r.w.type) == NULL or ggml().cpu_traits(r.w.type).vec_dot == NULL:
        return False
    r.n_ops = n
    for i in range(n):
        r.op[i] = ops[n - 1 - i]
        r.arg[i] = args[n - 1 - i]
    return 0 < r.n_used <= r.n_expert


cdef void router_walk(Router *r, bm_tensor *ids, bm_tensor *input) noexcept nogil:
    r.state = 1 if _read(r, ids) else -1
    if r.state < 0:
        r.x = NULL
        return
    r.alive = _root(r.x) == _root(input)


cdef int64_t router_scratch(const Router *r) noexcept nogil:
    return (<int64_t>ggml().row_size(ggml().cpu_traits(r.w.type).vec_dot_type, r.n_embd) + 64
            + 8 * <int64_t>r.n_expert + 64)


cdef void _softmax(float *x, int n) noexcept nogil:
    cdef float top = -INFINITY
    cdef double total = 0
    cdef int i
    for i in range(n):
        top = x[i] if x[i] > top else top
    for i in range(n):
        x[i] = expf(x[i] - top)
        total += x[i]
    for i in range(n):
        x[i] = <float>(x[i] / total)


cdef void _mask_groups(const Router *r, float *scores) noexcept nogil:
    # Of each group the sum of its two best; the best groups stay.
    cdef int per = r.n_expert // r.n_groups, g, i, k, best
    cdef float a, b, s
    cdef float sums[256]
    cdef unsigned char kept[256]
    if r.n_groups > 256:
        return
    for g in range(r.n_groups):
        a = -INFINITY
        b = -INFINITY
        for i in range(g * per, (g + 1) * per):
            s = scores[i]
            if s > a:
                b = a
                a = s
            elif s > b:
                b = s
        sums[g] = a + b
        kept[g] = 0
    for k in range(r.n_group_used):
        best = -1
        for g in range(r.n_groups):
            if not kept[g] and (best < 0 or sums[g] > sums[best]):
                best = g
        kept[best] = 1
    for g in range(r.n_groups):
        if not kept[g]:
            for i in range(g * per, (g + 1) * per):
                scores[i] = -INFINITY


cdef void router_top(const Router *r, const float *x, char *scratch, int *out, float *share) noexcept nogil:
    cdef const bm_cpu_traits *tr = ggml().cpu_traits(r.w.type)
    cdef int64_t row = (ggml().row_size(tr.vec_dot_type, r.n_embd) + 63) & ~<int64_t>63
    cdef char *q = <char *>((<uintptr_t>scratch + 63) & ~<uintptr_t>63)
    cdef float *scores = <float *>(q + row)
    cdef float *probs = scores + r.n_expert
    cdef int e, i, k, best
    cdef bint activated = False
    cdef double total = 0
    cdef float top
    if tr.vec_dot_type == 0:
        memcpy(q, x, 4 * r.n_embd)
    else:
        ggml().cpu_traits(tr.vec_dot_type).from_float(x, q, r.n_embd)
    for e in range(r.n_expert):
        tr.vec_dot(r.n_embd, &scores[e], 0, <char *>r.w.data + e * r.w.nb[1], 0, q, 0, 1)
    memcpy(probs, scores, 4 * r.n_expert)
    for i in range(r.n_ops):
        if r.op[i] == ADD_BIAS:
            for e in range(r.n_expert):
                scores[e] += (<float *>r.arg[i].data)[e]
            if activated:
                continue  # a bias of the selection: the weights do not have it
        elif r.op[i] == SOFTMAX:
            _softmax(scores, r.n_expert)
            activated = True
        else:
            activated = True
            for e in range(r.n_expert):
                if r.op[i] == SIGMOID:
                    scores[e] = 1.0 / (1.0 + expf(-scores[e]))
                elif r.op[i] == SOFTPLUS:
                    scores[e] = scores[e] if scores[e] > 20 else log1pf(expf(scores[e]))
                else:
                    scores[e] = sqrtf(scores[e])
        memcpy(probs, scores, 4 * r.n_expert)
    if r.n_groups > 1:
        _mask_groups(r, scores)
    for k in range(r.n_used):
        best = 0
        for e in range(1, r.n_expert):
            if scores[e] > scores[best]:
                best = e
        out[k] = best
        scores[best] = -INFINITY
    # Without an activation before the sort, the weights are a softmax over the chosen.
    top = -INFINITY
    for k in range(r.n_used):
        top = probs[out[k]] if probs[out[k]] > top else top
    for k in range(r.n_used):
        share[k] = probs[out[k]] if activated else <float>exp(probs[out[k]] - top)
        total += share[k]
    for k in range(r.n_used):
        share[k] = <float>(share[k] / total) if total > 0 else 0
