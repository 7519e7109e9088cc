# cython: language_level=3
"""What each layer's plan routed, and what befell the cache between plans: records in memory, taken after each batch.

A log that finds no memory loses whole records and counts them; the plan goes on. Nothing is written while it is off.
"""

from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_FromStringAndSize

from bmoe.llama._ggml cimport bm_tensor

DEF FIRST = 1 << 14   # words at first: some tokens of a large model


cdef int32_t *_room(RouteLog *g, int64_t words) noexcept nogil:
    cdef int64_t size = g.size
    cdef int32_t *more
    if g.n + words > size:
        size = max(2 * size, g.n + words, FIRST)
        more = <int32_t *>realloc(g.words, size * sizeof(int32_t))
        if more == NULL:
            g.lost += 1
            return NULL
        g.words = more
        g.size = size
    more = g.words + g.n
    g.n += words
    return more


cdef void log_plan(RouteLog *g, int layer, bm_tensor *ids, bm_tensor *weights) noexcept nogil:
    cdef int n_used = <int>ids.ne[0], n_tok = <int>ids.ne[1], tok, i
    cdef int32_t *out = _room(g, LOG_HEAD + 2 * <int64_t>n_used * n_tok)
    cdef float w
    g.at = -1
    if out == NULL:
        return
    if weights != NULL and (weights.data == NULL or weights.ne[1] != n_used or weights.ne[2] != n_tok):
        weights = NULL
    out[0] = LOG_PLAN
    out[1] = layer
    out[2] = n_tok
    out[3] = n_used
    out += LOG_HEAD
    g.at = out - g.words
    for tok in range(n_tok):
        for i in range(n_used):
            out[0] = (<int32_t *>(<char *>ids.data + tok * ids.nb[1] + i * ids.nb[0]))[0]
            w = <float>NAN
            if weights != NULL:
                w = (<float *>(<char *>weights.data + tok * weights.nb[2] + i * weights.nb[1]))[0]
            memcpy(&out[1], &w, sizeof(float))
            out += 2


cdef void log_outcome(RouteLog *g, const int *x_of, const unsigned char *residency,
                      const unsigned char *gone) noexcept nogil:
    cdef int64_t i, n
    cdef int32_t *at
    if g.at < 0:
        return
    n = (g.n - g.at) // 2
    at = g.words + g.at
    for i in range(n):
        if gone != NULL and gone[i]:
            at[2 * i] |= 1 << LOG_DROPPED
            continue
        at[2 * i] |= <int32_t>residency[x_of[at[2 * i]]] << LOG_RESIDENT
    g.at = -1


cdef void log_event(RouteLog *g, int kind, int layer, int expert) noexcept nogil:
    cdef int32_t *out
    if not g.on:
        return
    out = _room(g, LOG_HEAD)
    if out == NULL:
        return
    out[0] = kind
    out[1] = layer
    out[2] = expert
    out[3] = 0


cdef void log_free(RouteLog *g) noexcept nogil:
    free(g.words)
    g.words = NULL
    g.n = g.size = 0


cdef tuple log_take(RouteLog *g):
    out = PyBytes_FromStringAndSize(<char *>g.words, g.n * sizeof(int32_t)) if g.n else b""
    lost = g.lost
    g.n = 0
    g.lost = 0
    g.at = -1
    return out, lost
