from libc.stdint cimport int32_t, int64_t

from bmoe.llama._ggml cimport bm_tensor

cdef enum:
    LOG_PLAN = 1      # layer, tokens, experts per token; then two words for each of these
    LOG_HOLD = 2      # layer: an empty slot of its class is taken out, for an expert that is read ahead
    LOG_WARM = 3      # layer, expert: that slot holds it now
    LOG_RELEASE = 4   # layer: that slot is empty again
    LOG_FORGET = 5    # layer, expert: no longer resident
    LOG_CLEAR = 6     # nothing is resident

cdef enum:
    LOG_HEAD = 4      # words of a record before its entries: kind and three numbers
    LOG_RESIDENT = 20 # bits of an entry's first word: expert below, residency (0 to 2), then 1 for dropped
    LOG_DROPPED = 22

cdef struct RouteLog:
    int on
    int32_t *words
    int64_t n
    int64_t size
    int64_t at        # first entry of the plan under way, or -1
    int64_t lost      # records that found no memory

# A record: of a plan whose experts are `ids` and weights `weights` (NULL: not known, NaN), and what became of
# them: `residency[x_of[e]]` is 0 for a miss, 1 for a resident expert, 2 for a miss that had been read ahead; `gone`
# (NULL: none) marks those that fell. Call both for each plan, or neither.
cdef void log_plan(RouteLog *g, int layer, bm_tensor *ids, bm_tensor *weights) noexcept nogil
cdef void log_outcome(RouteLog *g, const int *x_of, const unsigned char *residency,
                      const unsigned char *gone) noexcept nogil
cdef void log_event(RouteLog *g, int kind, int layer, int expert) noexcept nogil
cdef void log_free(RouteLog *g) noexcept nogil
# The records so far as bytes, and how many were lost; empties the log.
cdef tuple log_take(RouteLog *g)
