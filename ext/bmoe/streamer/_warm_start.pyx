# cython: language_level=3
"""Reading experts ahead into empty slots, beside a graph that may be running.

The slot is out of the cache's index while it is filled and enters it only with all bytes there, so a plan never waits
for a read made here, and nothing that a plan has admitted is given up. These reads have lanes of their own and are
begun only while the engine's own lanes have nothing to do.
"""

from libc.stdint cimport int64_t

from bmoe.streamer._cache cimport cache_fill, cache_find, cache_hold, cache_release
from bmoe.streamer._reads cimport (Lanes, Pool, Read, bm_load, bm_spin_lock, bm_spin_unlock, pool_submit,
                                   pool_wait_idle, read_init)
from bmoe.streamer._streamer cimport MAX_PARTS, Moe, Part, Streamer, slice_area
from bmoe.streamer._route_log cimport LOG_HOLD, LOG_RELEASE, LOG_WARM, log_event

cdef enum:
    LOADED = 0
    RESIDENT = 1
    FULL = 2
    BUSY = 3
    FAILED = 4

OUTCOMES = ("loaded", "resident", "full", "busy", "failed")
"""What `Loader.load` returns, by number."""


cdef int _load(Moe *m, Pool *pool, int layer, int expert, int64_t *nbytes) noexcept nogil:
    cdef Read reads[MAX_PARTS]
    cdef Part *p
    cdef int i, slot, n = 0, pending = 0
    cdef int64_t total = 0
    cdef bint entered
    if bm_load(&m.pool.in_flight) > 0:
        return BUSY
    bm_spin_lock(&m.index_lock)
    if cache_find(m.cache, layer, expert) >= 0:
        bm_spin_unlock(&m.index_lock)
        return RESIDENT
    slot = cache_hold(m.cache, layer)
    if slot >= 0:
        log_event(&m.log, LOG_HOLD, layer, expert)
    bm_spin_unlock(&m.index_lock)
    if slot < 0:
        return FULL
    for i in range(m.layers[layer].n_parts):
        p = &m.parts[m.layers[layer].first_part + i]
        read_init(&reads[n], p.file, p.offset + expert * p.nbytes, p.nbytes, slice_area(m, p, slot), &pending)
        total += p.nbytes
        n += 1
    pending = n
    pool_submit(pool, reads, n)
    pool_wait_idle(pool)
    if bm_load(&pool.failed):
        bm_spin_lock(&m.index_lock)
        cache_release(m.cache, layer, slot)
        log_event(&m.log, LOG_RELEASE, layer, expert)
        bm_spin_unlock(&m.index_lock)
        return FAILED
    nbytes[0] = total
    bm_spin_lock(&m.index_lock)
    entered = cache_fill(m.cache, layer, expert, slot)
    m.slots.fresh[slot] = entered
    log_event(&m.log, LOG_WARM, layer, expert)
    bm_spin_unlock(&m.index_lock)
    return LOADED if entered else RESIDENT


cdef class Loader:
    """Fills slots of `streamer`, which must have been started, through `lanes`, which nobody else uses.

    `experts` and `bytes`: what was read and put into the index; `bytes_unused`: read for an expert that had become
    resident meanwhile. Bytes are of slices. One thread at a time.
    """

    cdef Streamer streamer
    cdef Lanes lanes
    cdef readonly int64_t experts
    cdef readonly int64_t bytes
    cdef readonly int64_t bytes_unused

    def __init__(self, Streamer streamer not None, Lanes lanes not None):
        self.streamer = streamer
        self.lanes = lanes

    def load(self, int layer, int expert):
        """Reads one expert of one layer into an empty slot and waits for it.

        0: loaded; 1: resident already; 2: no empty slot; 3: the engine is reading for itself, nothing was begun;
        4: a read failed (`lanes.failure()`). Raises ValueError for a layer or expert out of range.
        """
        cdef Moe *m = &self.streamer.m
        cdef Pool *pool = &self.lanes.pool
        cdef int outcome
        cdef int64_t nbytes = 0
        if not (m.running and 0 <= layer < m.n_layers and 0 <= expert < m.layers[layer].n_expert):
            raise ValueError(f"no expert {expert} in layer {layer}")
        with nogil:
            outcome = _load(m, pool, layer, expert, &nbytes)
        if outcome == LOADED:
            self.experts += 1
            self.bytes += nbytes
        elif nbytes:
            self.bytes_unused += nbytes
        return outcome

    def used(self):
        """How many of the experts that were loaded have been used since."""
        return self.streamer.m.slots.fresh_used


