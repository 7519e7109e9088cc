# cython: language_level=3
"""Expert matmuls from slots: the graph hook, the plan of a layer, and the kernel that waits per expert.

llama.cpp shows every graph node to `cb_eval` before it runs. A `MUL_MAT_ID` over a routed-expert tensor is
turned into a custom op there; ggml's own compute threads then call `_expert_matmul`. The first of a layer's
matmuls plans: it looks the routed experts up in the cache, gives slots to the misses and queues their reads,
all slices of the first matmul before those of the second. Each matmul computes what is resident and waits
only for slices still under way. One `vec_dot` per weight row and activation row, or ggml's tiled kernel where
ggml would use it: the same functions on the same operands as the resident graph, hence the same bits.

A batch that routes more experts than the cache may take (a prefill) streams the others through a ring of
staging areas, each slice once, and admits only the experts of its last tokens.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from bmoe.streamer._alloc cimport zeroed
from bmoe.streamer._cache cimport (Cache, CacheCounts, ExpertCache, cache_begin, cache_find, cache_forget,
                                   cache_note, cache_place, cache_score, cache_seen)
from bmoe.streamer._dropping cimport drop_free, drop_matmul, drop_plan, drop_reserve, drop_walk, drop_zero
from bmoe.llama._ggml cimport (bm_compute_params, bm_cpu_traits, bm_custom_params, bm_tensor, c_bool, ggml)
from bmoe.streamer._reads cimport (PAGE, Lanes, Pool, Read, bm_add, bm_add64, bm_barrier_wait, bm_load, bm_load64,
                                   bm_now_ns, bm_spin_lock, bm_spin_unlock, bm_store, pool_cancel_low, pool_promote_low,
                                   pool_submit, pool_submit_low, pool_wait_idle, pool_wait_progress, read_init)
from bmoe.streamer._router cimport Router, router_scratch, router_top, router_walk
from bmoe.streamer._route_log cimport LOG_CLEAR, LOG_FORGET, log_event, log_free, log_outcome, log_plan, log_take

DEF BATCH = 32
# Weight rows of one unit of work: about 10 us of dot products, small against a layer, large against an atomic.
DEF CHUNK_ROWS = 64
# Expert rows from which a chunk is worth widening for the tiled kernel, which works on groups of rows.
DEF TILED_CHUNK_ROWS = 256
# How often a running graph looks for Ctrl-C.
DEF SIGNAL_NS = 50000000

include "memory.pxi"
include "graph.pxi"
include "plan.pxi"
include "read_ahead.pxi"
include "kernel.pxi"


cdef int _layers_init(Moe *m, list layers) except -1:
    # What is served: the routed-expert tensors of each layer.
    cdef int i, j, k = 0
    cdef Part *p
    _layers_free(m)
    m.layers = <Layer *>zeroed(len(layers), sizeof(Layer))
    m.n_layers = len(layers)
    m.parts = <Part *>zeroed(sum([len(parts) for parts, _ in layers]), sizeof(Part))
    for i, (parts, n_expert) in enumerate(layers):
        if len(parts) > MAX_PARTS:
            raise ValueError(f"layer {i} has {len(parts)} expert tensors, at most {MAX_PARTS} are served")
        m.layers[i].n_expert = n_expert
        m.layers[i].n_parts = len(parts)
        m.layers[i].first_part = k
        m.layers[i].expert_bytes = sum([nbytes for _, _, _, nbytes, _ in parts])
        # Until something is known: a layer that misses.
        m.layers[i].missing = 1.0
        for j, (tensor, file, offset, nbytes, area) in enumerate(parts):
            p = &m.parts[k]
            k += 1
            p.moe = m
            p.layer = i
            p.slice_ = j
            p.file = file
            p.offset = offset
            p.nbytes = nbytes
            p.area = area
            p.tensor = <bm_tensor *><uintptr_t>tensor
    m.n_parts = k
    return 0


cdef void _layers_free(Moe *m) noexcept nogil:
    free(m.layers)
    free(m.parts)
    m.layers = NULL
    m.parts = NULL
    m.n_layers = 0
    m.n_parts = 0


cdef class Streamer:
    """Serves the expert matmuls of one model from slots filled by `lanes`.

    `layers`: for each layer with routed experts a list of `(tensor address, file, offset, bytes of one
    expert, area offset)` and its number of experts. Hook it up with `callback`, `abort_callback` and
    `userdata` (addresses); it does nothing until `start()`.
    """

    def __cinit__(self, Lanes lanes, list layers, int n_threads, bint overlap):
        cdef Moe *m = &self.m
        self.lanes = lanes
        m.pool = &lanes.pool
        m.stop.owner = <void *>self
        m.n_threads = n_threads
        m.overlap = overlap
        m.time.graph = &m.time.target
        _layers_init(m, layers)
        _walk_init(&m.walk, m.n_parts)
        _plan_init(&m.plan, max([n for _, n in layers], default=1))
        _ahead_init(&m.ahead, m.n_layers)

    def start(self, ExpertCache cache, list classes, list layer_class, list quotas, int n_ring, int64_t ring_address,
              int64_t ring_stride):
        """Begins to serve. `classes`: per size class `(address of its memory, slots, spares, stride)`, the spares'
        memory behind the slots'; `layer_class`: the class of each layer.

        `quotas`: experts a wide batch may admit, per layer. The ring: `n_ring` areas of `ring_stride` bytes.
        Spares take what is read ahead; without any, nothing is.
        """
        cdef Moe *m = &self.m
        cdef int i
        if m.running:
            raise RuntimeError("already started")
        self.cache = cache
        m.cache = &cache.c
        _spares_init(&m.ahead, sum([spares for _, _, spares, _ in classes]))
        _slots_init(m, classes, layer_class)
        _ring_init(&m.ring, n_ring, ring_address, ring_stride)
        for i in range(m.n_layers):
            m.layers[i].quota = quotas[i]
        m.running = 1

    @property
    def callback(self):
        """Address for `llama_context_params.cb_eval`."""
        return <uintptr_t><void *>_on_node

    @property
    def abort_callback(self):
        """Address for `llama_context_params.abort_callback`."""
        return <uintptr_t><void *>_on_abort

    @property
    def userdata(self):
        """Address for both callbacks."""
        return <uintptr_t>&self.m

    def request_abort(self):
        """Makes the running graph stop at its next node; safe from any thread and from a signal handler."""
        bm_store(&self.m.stop.requested, 1)

    @property
    def abort_requested(self):
        return bm_load(&self.m.stop.requested) != 0

    @property
    def interrupt_pending(self):
        """True where a signal handler raised inside a graph and nobody has taken the exception yet."""
        return self.interrupted is not None

    @property
    def skip(self):
        """True: the experts of the graphs that run now are neither read nor computed, their results are zeros.

        For a batch without outputs through a single layer, of which only keys and values are kept: these come
        before the experts. Set it between graphs.
        """
        return self.m.skip != 0

    @skip.setter
    def skip(self, bint value):
        self.m.skip = value

    def take_interrupt(self):
        """The exception a signal handler raised inside the last graph, or None; clears it and the abort."""
        e, self.interrupted = self.interrupted, None
        bm_store(&self.m.stop.requested, 0)
        return e

    def reset(self, bint forget):
        """After a graph that was stopped: waits for reads under way; `forget`: empties the cache as well."""
        cdef Moe *m = &self.m
        if not m.running:
            return
        with nogil:
            _settle(m)
        if forget:
            with nogil:
                bm_spin_lock(&m.index_lock)
                log_event(&m.log, LOG_CLEAR, 0, 0)
            self.cache.clear()
            bm_spin_unlock(&m.index_lock)

    def counters(self):
        """Running totals, by their names in `StreamCounters`. Bytes are of slices, alignment excluded."""
        cdef Moe *m = &self.m
        cdef StreamCounts counts = m.counts
        cdef CacheCounts cache
        memset(&cache, 0, sizeof(cache))
        if m.cache != NULL:
            cache = m.cache.counts
        counts.stall_ns = bm_load64(&m.counts.stall_ns)
        return {**counts, **cache, **m.drop.counts, **m.ahead.counts, **m.time.target,
                "draft_compute_ns": m.time.draft.compute_ns, "draft_wait_ns": m.time.draft.wait_ns,
                "draft_manage_ns": m.time.draft.manage_ns, "draft_build_ns": m.time.draft.build_ns}

    def begin_graph(self, bint drafting=False):
        """A graph follows; `drafting`: of the draft source. Thread 0's time in graphs is counted for each apart."""
        self.m.time.graph = &self.m.time.draft if drafting else &self.m.time.target
        self.m.time.mark = 0
        self.m.time.begun_ns = bm_now_ns()

    def count_uses(self):
        """Counts the routed rows of each expert from now on; see `uses`."""
        cdef Moe *m = &self.m
        if m.running and m.plan.uses == NULL:
            m.plan.uses = <int64_t *>zeroed(sum([m.layers[i].n_expert for i in range(m.n_layers)]), sizeof(int64_t))

    def uses(self):
        """Routed rows of each expert since `count_uses`, a list for each layer; empty where nothing is counted."""
        cdef Moe *m = &self.m
        if m.plan.uses == NULL:
            return []
        return [[m.plan.uses[m.cache.base[i] + e] for e in range(m.layers[i].n_expert)] for i in range(m.n_layers)]

    def log_routes(self, bint on):
        """Whether plans are recorded from now on; see `take_routes`."""
        self.m.log.on = on

    def take_routes(self):
        """The records since the last call, as bytes of int32 (`observe.route_trace` reads them), and how many were lost."""
        cdef Moe *m = &self.m
        with nogil:
            bm_spin_lock(&m.index_lock)
        try:
            return log_take(&m.log)
        finally:
            bm_spin_unlock(&m.index_lock)

    def drop_cold(self, double threshold):
        """Graphs for which `set_dropping` is on leave out cold experts below `threshold` / top-k; 0: none do."""
        self.m.drop.threshold = threshold

    def set_dropping(self, bint on):
        """Whether the graphs from now on drop."""
        self.m.drop.active = on

    def take_drop_fault(self):
        """The layer that stopped a graph because its routing weights were not found, or None; clears it."""
        layer, self.m.drop.fault = self.m.drop.fault - 1, 0
        return layer if layer >= 0 else None

    def read_ahead(self, str how="off", bint log=False):
        """What is read before its layer is routed: "next-layer" (what the layer's router makes of the input of the
        router before it) or "off". `log`: guesses are scored, whether they are acted on or not."""
        self.m.ahead.on = {"off": 0, "next-layer": 1}[how]
        self.m.ahead.scored = log

    def unpredictable(self):
        """Layers seen so far whose router could not be read off the graph, or whose input is gone when the experts
        run: nothing is guessed from or for them."""
        cdef Router *routers = self.m.ahead.routers
        return [i for i in range(self.m.n_layers)
                if routers[i].state < 0 or (routers[i].state > 0 and not routers[i].alive)]

    def read_ahead_bytes(self):
        """Totals of the bytes read ahead: `used` and `wasted`, and of these `used_rereads` and `wasted_rereads`."""
        return self.m.ahead.bytes

    def scores(self):
        """Of the routed experts of decoded tokens, how many were guessed: per layer `{guess: (right, all)}`, for
        "control" (the layer's own router run again) and "next-layer"."""
        cdef int64_t *scores = self.m.ahead.scores
        names = ("control", "next-layer")
        return [{name: (scores[(i * SCORES + k) * 2], scores[(i * SCORES + k) * 2 + 1]) for k, name in enumerate(names)}
                for i in range(self.m.n_layers)]

    def lie(self, int shift):
        """Adds `shift` to every guessed expert, modulo their number: for the test that output does not depend on it."""
        self.m.ahead.lie = shift

    def take_positions(self, int n):
        """Bytes read since the last call, by the batch position that was the first to want them: two lists of `n`
        numbers, all bytes and the part of experts that had been read before. Later positions count with the last.
        """
        cdef Moe *m = &self.m
        cdef int i
        total = [0] * n
        again = [0] * n
        for i in range(m.positions.n):
            total[min(i, n - 1)] += m.positions.bytes[i]
            again[min(i, n - 1)] += m.positions.rereads[i]
            m.positions.bytes[i] = 0
            m.positions.rereads[i] = 0
        return total, again

    def corrupt(self, int byte=0):
        """Flips a byte of every filled slot: for the test that shows that the identity gate can fail."""
        cdef Moe *m = &self.m
        cdef int i
        for i in range(m.cache.n_slots):
            if m.cache.slots[i].layer >= 0:
                # The middle of the first slice's area: weights, whatever the alignment.
                (<char *>_place_address(m, m.cache.slots[i].layer, m.slots.place[i]))[PAGE + byte] ^= 0x3f

    def close(self):
        """Lets go of everything; the lanes must be idle or closed, the context freed."""
        cdef Moe *m = &self.m
        if self.closed:
            return
        self.closed = 1
        m.running = 0
        _layers_free(m)
        _walk_free(&m.walk)
        _scratch_free(&m.scratch)
        _slots_free(&m.slots)
        _ring_free(&m.ring)
        _plan_free(&m.plan)
        _positions_free(&m.positions)
        _ahead_free(&m.ahead)
        drop_free(&m.drop)
        log_free(&m.log)

    def __dealloc__(self):
        self.close()
