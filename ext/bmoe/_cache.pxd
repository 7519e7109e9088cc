from libc.stdint cimport int64_t

cdef struct Slot:
    int layer         # -1: empty
    int expert
    int prev          # towards the most recently used
    int next          # towards the least recently used
    int pin           # the epoch that must not evict it

cdef struct Class:    # slots of one size, shared by the layers whose experts have it
    int first         # index of its first slot
    int count
    int head          # most recently used
    int tail          # least recently used
    int n_layers

cdef struct Cache:
    int n_layers
    int n_classes
    int n_slots
    int *table        # [sum of n_expert] slot or -1
    int *base         # [n_layers] first entry of a layer in `table`
    int *n_expert     # [n_layers]
    int *cls          # [n_layers] class of a layer
    Slot *slots
    Class *classes
    unsigned char *seen   # [sum of n_expert] 1 once it has been read
    int n_resident
    int64_t hits
    int64_t misses
    int64_t evictions
    int64_t rereads

cdef int cache_find(Cache *c, int layer, int expert) noexcept nogil
cdef void cache_touch(Cache *c, int slot) noexcept nogil
# The slot now given to (layer, expert), which must not be resident; -1 where every slot of its class is
# pinned by `epoch`.
cdef int cache_admit(Cache *c, int layer, int expert, int epoch) noexcept nogil
cdef void cache_forget(Cache *c, int slot) noexcept nogil
# Marks (layer, expert) as read once; 1 where it had been read before.
cdef int cache_seen(Cache *c, int layer, int expert) noexcept nogil

cdef class ExpertCache:
    cdef Cache c
