from libc.stdint cimport int32_t, int64_t

from bmoe.streamer._cache cimport Cache
from bmoe.llama._ggml cimport bm_tensor

cdef enum:
    RECENT = 128      # graph nodes back to which a layer's weights are looked for

cdef struct DropCounts:   # running totals, by their names in StreamCounters
    int64_t drop_positions    # (layer, position) pairs decided
    int64_t drop_routed
    int64_t dropped
    double drop_mass  # sum over positions of the share of the weights that fell

cdef struct Drop:
    double threshold  # F; 0: never drops
    int active        # the graph that runs drops
    int fault         # 1 + the layer whose routing weights were not found
    unsigned char *gone   # [n_tokens * n_used] of the plan: 1 where the expert has fallen
    int size
    int n_gone
    # The walk over a graph, before it runs.
    bm_tensor *tail   # what the experts' output has become
    bm_tensor **found # where the weights of the matmul at hand go
    bm_tensor *recent[RECENT]
    int64_t n_recent
    int64_t before    # nodes walked before the layer's first matmul
    DropCounts counts

# Decides for `n_tok` positions in order; rewrites their weights and fills `gone`. Returns how many fell.
cdef int drop_positions(char *weights, int64_t weight_stride, const char *ids, int64_t id_stride, int n_used, int n_tok,
                        const int *slot_of, int *wanted, double threshold, unsigned char *gone,
                        double *mass) noexcept nogil
cdef bint drop_reserve(Drop *d, int n_rows) noexcept nogil
cdef void drop_free(Drop *d) noexcept nogil
# A node of the walk that is no expert matmul, and one that is.
cdef void drop_walk(Drop *d, bm_tensor *t) noexcept nogil
cdef void drop_matmul(Drop *d, bm_tensor *t, bm_tensor **found, bint first) noexcept nogil
# Decides for the batch of a layer. False where its weights were not found: `fault` names it then.
cdef bint drop_plan(Drop *d, Cache *c, int layer, bm_tensor *ids, bm_tensor *weights, int *wanted) noexcept nogil
# Zeroes the rows of an expert matmul that nothing computes, `rows` as (id, token) pairs.
cdef void drop_zero(Drop *d, bm_tensor *dst, const int32_t *rows, int ith, int nth) noexcept nogil
