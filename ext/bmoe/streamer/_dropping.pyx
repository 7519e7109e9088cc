# cython: language_level=3
"""Dropping cold experts: which routed experts of a batch are left out, and where a graph keeps their weights.

An expert falls at a position if it is in no slot, no earlier position of the batch has it read, its weight is below
`threshold / n_used` of the sum of that position's weights, and it is not the position's top one. The share of the
sum is what is compared, so that `1 / n_used` is the mean weight whatever the gating. What remains is scaled to the
same sum. A position's outcome depends on itself and earlier ones only: the drafts behind it change nothing.

The weights are the `[1, n_used, n_tokens]` operand that multiplies what the layer's last expert matmul has become.
They are looked for by that structure, not by the name of an architecture.
"""

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset, strcmp

from bmoe.streamer._cache cimport Cache
from bmoe.llama._ggml cimport bm_tensor, ggml

# From the weights back to the router's product: normalising, scaling and reshapes lie between.
DEF ROUTER_DEPTH = 24


cdef int drop_positions(char *weights, int64_t weight_stride, const char *ids, int64_t id_stride, int n_used, int n_tok,
                        const int *slot_of, int *wanted, double threshold, unsigned char *gone,
                        double *mass) noexcept nogil:
    cdef int tok, i, top, n, n_gone = 0
    cdef double total, kept, limit
    cdef float *w
    cdef const int32_t *e
    cdef unsigned char *g
    for tok in range(n_tok):
        w = <float *>(weights + tok * weight_stride)
        e = <const int32_t *>(ids + tok * id_stride)
        g = gone + tok * n_used
        total = 0
        top = 0
        for i in range(n_used):
            total += w[i]
            if w[i] > w[top]:
                top = i
        # Weights that are no weights (a NaN, a sum of nothing) are left as they are.
        limit = threshold * total / n_used if isfinite(total) and total > 0 else -INFINITY
        n = 0
        kept = 0
        for i in range(n_used):
            g[i] = i != top and w[i] < limit and slot_of[e[i]] < 0 and wanted[e[i]] < 0
            n += g[i]
            if not g[i]:
                kept += w[i]
        for i in range(n_used):
            if not g[i]:
                wanted[e[i]] = 0
        if n == 0:
            continue
        n_gone += n
        mass[0] += (total - kept) / total
        for i in range(n_used):
            w[i] = 0 if g[i] else <float>(w[i] * (total / kept))
    return n_gone


cdef bint drop_reserve(Drop *d, int n_rows) noexcept nogil:
    if n_rows > d.size:
        free(d.gone)
        d.gone = <unsigned char *>malloc(n_rows)
        d.size = n_rows if d.gone != NULL else 0
    return d.size >= n_rows


cdef void drop_free(Drop *d) noexcept nogil:
    free(d.gone)
    d.gone = NULL
    d.size = 0


# ---- the walk -----------------------------------------------------------------------------------

cdef bint _from_router(bm_tensor *w) noexcept nogil:
    # Weights come from a product with the activations; a scale of the experts comes from the file.
    cdef int i
    for i in range(ROUTER_DEPTH):
        if w == NULL:
            return False
        if strcmp(ggml().op_name(w.op), "MUL_MAT") == 0:
            return True
        w = w.src[0]
    return False


cdef bint _computed_before(Drop *d, bm_tensor *w) noexcept nogil:
    cdef int64_t i
    for i in range(d.before - 1, max(<int64_t>-1, d.n_recent - RECENT - 1), -1):
        if d.recent[i % RECENT] == w:
            return True
    return False


cdef void drop_walk(Drop *d, bm_tensor *t) noexcept nogil:
    cdef bm_tensor *w = t.src[1]
    d.recent[d.n_recent % RECENT] = t
    d.n_recent += 1
    if d.tail == NULL or t.src[0] != d.tail:
        return
    if t.ne[0] != d.tail.ne[0] or t.ne[1] != d.tail.ne[1] or t.ne[2] != d.tail.ne[2]:
        return  # a view of one expert's rows
    if (w != NULL and w.type == 0 and w.ne[0] == 1 and w.ne[1] == t.ne[1] and w.ne[2] == t.ne[2] and w.ne[3] == 1
            and w.nb[1] == sizeof(float) and strcmp(ggml().op_name(t.op), "MUL") == 0
            and _from_router(w) and _computed_before(d, w)):
        d.found[0] = w
    d.tail = t


cdef void drop_matmul(Drop *d, bm_tensor *t, bm_tensor **found, bint first) noexcept nogil:
    found[0] = NULL
    d.found = found
    d.tail = t
    if first:
        d.before = d.n_recent


# ---- a batch ------------------------------------------------------------------------------------

cdef bint drop_plan(Drop *d, Cache *c, int layer, bm_tensor *ids, bm_tensor *weights, int *wanted) noexcept nogil:
    cdef int n_used = <int>ids.ne[0], n_tok = <int>ids.ne[1], e
    d.n_gone = 0
    if weights == NULL or weights.data == NULL or weights.ne[1] != n_used or weights.ne[2] != n_tok:
        d.fault = layer + 1
        return False
    if not d.active:
        return True
    for e in range(c.n_expert[layer]):
        wanted[e] = -1
    d.n_gone = drop_positions(<char *>weights.data, weights.nb[2], <const char *>ids.data, ids.nb[1], n_used, n_tok,
                              c.table + c.base[layer], wanted, d.threshold, d.gone, &d.counts.drop_mass)
    d.counts.drop_positions += n_tok
    d.counts.drop_routed += n_used * n_tok
    d.counts.dropped += d.n_gone
    return True


cdef void drop_zero(Drop *d, bm_tensor *dst, const int32_t *rows, int ith, int nth) noexcept nogil:
    # Its weight is 0, but 0 times what lies in the memory could be NaN.
    cdef int k = ith
    while k < d.n_gone:
        memset(<char *>dst.data + rows[2 * k] * dst.nb[1] + rows[2 * k + 1] * dst.nb[2], 0, dst.ne[0] * sizeof(float))
        k += nth


def select(float[:, ::1] weights not None, int32_t[:, ::1] ids not None, int[::1] slot_of not None, double threshold):
    """The decision alone, for a batch of one layer: `(dropped, weights, mass)`.

    `weights`: float32 [n_tokens, n_used], final routing weights. `ids`: int32 of the same shape. `slot_of`: int32
    [n_expert], -1 for an expert that is not resident. Returns uint8 [n_tokens, n_used], 1 where an expert falls; new
    float32 weights; and the sum over tokens of the share of the weights that fell. Raises ValueError for shapes that
    do not fit, or an id out of range.
    """
    import numpy as np

    cdef int n_tok = <int>weights.shape[0], n_used = <int>weights.shape[1]
    cdef double mass = 0
    if (ids.shape[0], ids.shape[1]) != (n_tok, n_used):
        raise ValueError("weights and ids must have one shape")
    out = np.array(weights, np.float32)
    dropped = np.zeros((n_tok, n_used), np.uint8)
    wanted = np.full(slot_of.shape[0] + 1, -1, np.int32)
    if n_tok == 0 or n_used == 0:
        return dropped, out, 0.0
    flat = np.asarray(ids)
    if flat.min() < 0 or flat.max() >= slot_of.shape[0]:
        raise ValueError("ids names an expert that slot_of does not have")
    drop_positions(<char *><uintptr_t>out.ctypes.data, n_used * sizeof(float), <const char *>&ids[0, 0],
                   n_used * sizeof(int32_t), n_used, n_tok, &slot_of[0],
                   <int *><uintptr_t>wanted.ctypes.data, threshold,
                   <unsigned char *><uintptr_t>dropped.ctypes.data, &mass)
    return dropped, out, mass
