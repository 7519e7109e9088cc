from libc.stdint cimport int64_t

from bmoe.streamer._admission cimport Votes

cdef enum:
    POLICY_LRU = 0
    POLICY_VOTES = 1

cdef struct Slot:
    int layer         # -1: empty
    int expert
    int prev          # lru: towards the most recently used
    int next          # lru: towards the least recently used
    int next_empty    # votes, of an empty slot: the next one
    int pin           # the epoch that must not evict it

cdef struct Class:    # slots of one size, shared by the layers whose experts have it
    int first         # index of its first slot
    int count
    int head          # lru: most recently used
    int tail          # lru: least recently used
    int empty         # votes: the first empty slot, or -1
    int n_layers
    int first_member  # its layers in `members`
    int n_experts     # of all its layers
    int n_held        # slots that `cache_hold` has taken out

cdef struct CacheCounts:  # running totals, by their names in StreamCounters
    int64_t hits
    int64_t misses
    int64_t evictions
    int64_t rereads

cdef struct Cache:
    int policy
    int scoring       # votes, and some class has fewer slots than experts
    int n_layers
    int n_classes
    int n_slots
    int *table        # [sum of n_expert] slot or -1
    int *base         # [n_layers] first entry of a layer in `table`
    int *n_expert     # [n_layers]
    int *cls          # [n_layers] class of a layer
    int *members      # [n_layers] layers by class
    int *kept         # votes: [sum of n_expert] slots of a layer from `base` on, in no order
    int64_t *keys     # votes: beside it, score and expert in one number
    int *n_kept       # [n_layers]
    int *lowest       # [n_layers] which of a layer's `kept` has the lowest key; -1 for none
    Slot *slots
    Class *classes
    unsigned char *seen   # [sum of n_expert] 1 once it has been read
    Votes votes
    int n_resident
    CacheCounts counts

# A layer's batch, in this order: begin, note every routed expert of every token, score, place.
cdef void cache_begin(Cache *c, int layer, int n_tok) noexcept nogil
cdef void cache_note(Cache *c, int layer, int n_tok, int tok, int expert) noexcept nogil
cdef void cache_score(Cache *c, int layer) noexcept nogil
cdef int cache_find(Cache *c, int layer, int expert) noexcept nogil
# What became of the batch's `experts`, each there once, the latest token's first: in `slots` the slot of each, or -1
# where it gets none, since every slot of its class is pinned by `epoch` or holds what is more likely to be used; in
# `hit` 1 for those that were resident; in `again` 1 for a miss that has been read before. Only the first `n_keep` are
# admitted. Counts hits, misses and evictions; rereads are the caller's, who knows what is read.
cdef void cache_place(Cache *c, int layer, const int *experts, int n, int n_keep, int epoch, int *slots,
                      unsigned char *hit, unsigned char *again) noexcept nogil
cdef void cache_forget(Cache *c, int slot) noexcept nogil
# Reading ahead: an empty slot of the layer's class leaves the index (-1: there is none); when the expert's bytes are in
# it, it comes back, last in line to stay. False where the expert has become resident meanwhile: the slot is empty
# again.
cdef int cache_hold(Cache *c, int layer) noexcept nogil
cdef bint cache_fill(Cache *c, int layer, int expert, int slot) noexcept nogil
cdef void cache_release(Cache *c, int layer, int slot) noexcept nogil
# Marks (layer, expert) as read once; 1 where it had been read before.
cdef int cache_seen(Cache *c, int layer, int expert) noexcept nogil

cdef class ExpertCache:
    cdef Cache c
