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

from bmoe.streamer._cache cimport (Cache, ExpertCache, cache_begin, cache_find, cache_forget, cache_note, cache_place,
                                   cache_score, cache_seen)
from bmoe.streamer._dropping cimport drop_matmul, drop_plan, drop_reserve, drop_walk, drop_zero
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

include "graph.pxi"
include "plan.pxi"
include "read_ahead.pxi"
include "kernel.pxi"


cdef class Streamer:
    """Serves the expert matmuls of one model from slots filled by `lanes`.

    `layers`: for each layer with routed experts a list of `(tensor address, file, offset, bytes of one
    expert, area offset)` and its number of experts. Hook it up with `callback`, `abort_callback` and
    `userdata` (addresses); it does nothing until `start()`.
    """

    def __cinit__(self, Lanes lanes, list layers, int n_threads, bint overlap):
        cdef Moe *m = &self.m
        cdef int i, j, k = 0
        cdef Part *p
        self.lanes = lanes
        m.pool = &lanes.pool
        m.owner = <void *>self
        m.n_threads = n_threads
        m.overlap = overlap
        m.n_layers = len(layers)
        m.n_parts = sum(len(parts) for parts, _ in layers)
        m.n_segments = 2 * m.n_parts + 2
        m.layers = <Layer *>calloc(m.n_layers + 1, sizeof(Layer))
        m.parts = <Part *>calloc(m.n_parts + 1, sizeof(Part))
        m.segments = <Segment *>calloc(m.n_segments, sizeof(Segment))
        m.max_expert = max([n for _, n in layers], default=1)
        m.walk_layer = -1
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
        n = m.max_expert
        m.x_expert = <int *>calloc(n, sizeof(int))
        m.x_slot = <int *>calloc(n, sizeof(int))
        m.x_place = <int *>calloc(n, sizeof(int))
        m.x_fate = <unsigned char *>calloc(n, 1)
        m.routers = <Router *>calloc(m.n_layers + 1, sizeof(Router))
        m.guess = <int *>calloc(m.n_layers * MAX_GUESSES + 1, sizeof(int))
        m.n_guess = <int *>calloc(m.n_layers + 1, sizeof(int))
        m.scores = <int64_t *>calloc(m.n_layers * SCORES * 2 + 1, sizeof(int64_t))
        m.x_start = <int *>calloc(n + 1, sizeof(int))
        m.x_of = <int *>calloc(n, sizeof(int))
        m.count = <int *>calloc(n, sizeof(int))
        m.fill_at = <int *>calloc(n, sizeof(int))
        m.miss = <int *>calloc(n, sizeof(int))
        m.x_reread = <unsigned char *>calloc(n, 1)
        m.x_ring = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.next_chunk = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.left_chunks = <int *>calloc(MAX_PARTS * n, sizeof(int))
        m.n_chunks = <int *>calloc(MAX_PARTS * n, sizeof(int))

    def start(self, ExpertCache cache, list classes, list layer_class, list quotas, int n_ring, int64_t ring_address,
              int64_t ring_stride):
        """Begins to serve. `classes`: per size class `(address of its memory, slots, spares, stride)`, the spares'
        memory behind the slots'; `layer_class`: the class of each layer.

        `quotas`: experts a wide batch may admit, per layer. The ring: `n_ring` areas of `ring_stride` bytes.
        Spares take what is read ahead; without any, nothing is.
        """
        cdef Moe *m = &self.m
        cdef int i, j, k, places = sum([slots + spares for _, slots, spares, _ in classes]), at = 0, slot = 0
        if m.running:
            raise RuntimeError("already started")
        self.cache = cache
        m.cache = &cache.c
        m.place = <int *>calloc(m.cache.n_slots + 1, sizeof(int))
        m.slot_pending = <int *>calloc(places * MAX_PARTS + 1, sizeof(int))
        m.n_spares = sum([spares for _, _, spares, _ in classes])
        m.spares = <Spare *>calloc(m.n_spares + 1, sizeof(Spare))
        k = 0
        for i, (address, slots, spares, stride) in enumerate(classes):
            for j in range(m.n_layers):
                if layer_class[j] == i:
                    m.layers[j].base, m.layers[j].first, m.layers[j].stride = address, at, stride
                    m.layers[j].cls = i
            for _ in range(slots):
                m.place[slot] = at
                slot += 1
                at += 1
            for _ in range(spares):
                m.spares[k].cls = i
                m.spares[k].place = at
                m.spares[k].layer = -1
                k += 1
                at += 1
        for i in range(m.n_layers):
            m.layers[i].quota = quotas[i]
        m.slot_fresh = <unsigned char *>calloc(m.cache.n_slots + 1, 1)
        m.n_ring = n_ring
        m.ring_base = ring_address
        m.ring_stride = ring_stride
        m.ring_pending = <int *>calloc(n_ring + 1, sizeof(int))
        m.ring_free = <int *>calloc(n_ring + 1, sizeof(int))
        m.n_ring_free = n_ring
        for i in range(n_ring):
            m.ring_free[i] = i
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
        bm_store(&self.m.abort, 1)

    @property
    def abort_requested(self):
        return bm_load(&self.m.abort) != 0

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
        bm_store(&self.m.abort, 0)
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
        """Running totals as a tuple: plans, routed, hits, misses, evictions, rereads, streamed, reads, bytes,
        plan_ns, stall_ns (over all compute threads), moe_ns. Bytes are of slices, alignment excluded."""
        cdef Moe *m = &self.m
        if not m.running:
            return (0,) * 12
        return (m.n_plans, m.routed, m.cache.counts.hits, m.cache.counts.misses, m.cache.counts.evictions,
                m.cache.counts.rereads, m.streamed,
                m.reads, m.bytes, m.plan_ns, bm_load64(&m.stall_ns), m.moe_ns)

    def begin_graph(self, bint drafting=False):
        """A graph follows; `drafting`: of the draft source. What is counted by graph, `spent`, needs to be told."""
        self.m.account = drafting
        self.m.node_mark = 0
        self.m.begun_ns = bm_now_ns()

    def spent(self):
        """Running totals of thread 0's time in graphs, ns: computing (waiting for other compute threads included),
        waiting for reads, managing the cache, building (from `begin_graph` until the first node is computed); of the
        target's graphs, then of the draft source's."""
        cdef Moe *m = &self.m
        return tuple([m.spent[i][j] for i in range(2) for j in range(SPENT)])

    def count_uses(self):
        """Counts the routed rows of each expert from now on; see `uses`."""
        cdef Moe *m = &self.m
        if m.running and m.uses == NULL:
            m.uses = <int64_t *>calloc(sum(m.layers[i].n_expert for i in range(m.n_layers)) + 1, sizeof(int64_t))

    def uses(self):
        """Routed rows of each expert since `count_uses`, a list for each layer; empty where nothing is counted."""
        cdef Moe *m = &self.m
        if m.uses == NULL:
            return []
        return [[m.uses[m.cache.base[i] + e] for e in range(m.layers[i].n_expert)] for i in range(m.n_layers)]

    def log_routes(self, bint on):
        """Whether plans are recorded from now on; see `take_routes`."""
        self.m.log.on = on

    def take_routes(self):
        """The records since the last call, as bytes of int32 (`bmoe.tracing` reads them), and how many were lost."""
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

    def drop_counters(self):
        """Running totals as a tuple: (layer, position) pairs that were decided, routed experts of these, dropped
        ones, and the sum over the pairs of the share of the weights that fell."""
        return (self.m.drop.positions, self.m.drop.routed, self.m.drop.dropped, self.m.drop.mass)

    def read_ahead(self, str how="off", bint log=False):
        """What is read before its layer is routed: "next-layer" (what the layer's router makes of the input of the
        router before it) or "off". `log`: guesses are scored, whether they are acted on or not."""
        self.m.prefetch = {"off": 0, "next-layer": 1}[how]
        self.m.predict_log = log

    def unpredictable(self):
        """Layers seen so far whose router could not be read off the graph, or whose input is gone when the experts
        run: nothing is guessed from or for them."""
        return [i for i in range(self.m.n_layers)
                if self.m.routers[i].state < 0 or (self.m.routers[i].state > 0 and not self.m.routers[i].alive)]

    def prefetch_counters(self):
        """Running totals as a tuple: experts read ahead, routed experts found among them, guesses taken back before
        they were read whole, ns spent guessing; then bytes that were used and of these re-reads, bytes that were
        not, and of these re-reads."""
        cdef Moe *m = &self.m
        return (m.prefetch_guesses, m.prefetch_hits, m.prefetch_cancelled, m.guess_ns, m.prefetch_used,
                m.prefetch_used_rereads, m.prefetch_wasted, m.prefetch_wasted_rereads)

    def scores(self):
        """Of the routed experts of decoded tokens, how many were guessed: per layer `{guess: (right, all)}`, for
        "control" (the layer's own router run again) and "next-layer"."""
        names = ("control", "next-layer")
        return [{name: (self.m.scores[(i * SCORES + k) * 2], self.m.scores[(i * SCORES + k) * 2 + 1])
                 for k, name in enumerate(names)} for i in range(self.m.n_layers)]

    def lie(self, int shift):
        """Adds `shift` to every guessed expert, modulo their number: for the test that output does not depend on it."""
        self.m.lie = shift

    def take_positions(self, int n):
        """Bytes read since the last call, by the batch position that was the first to want them: two lists of `n`
        numbers, all bytes and the part of experts that had been read before. Later positions count with the last.
        """
        cdef Moe *m = &self.m
        cdef int i
        total = [0] * n
        again = [0] * n
        for i in range(m.n_positions):
            total[min(i, n - 1)] += m.position_bytes[i]
            again[min(i, n - 1)] += m.position_rereads[i]
            m.position_bytes[i] = 0
            m.position_rereads[i] = 0
        return total, again

    def corrupt(self, int byte=0):
        """Flips a byte of every filled slot: for the test that shows that the identity gate can fail."""
        cdef Moe *m = &self.m
        cdef int i
        for i in range(m.cache.n_slots):
            if m.cache.slots[i].layer >= 0:
                # The middle of the first slice's area: weights, whatever the alignment.
                (<char *>_place_address(m, m.cache.slots[i].layer, m.place[i]))[PAGE + byte] ^= 0x3f

    def close(self):
        """Lets go of everything; the lanes must be idle or closed, the context freed."""
        cdef Moe *m = &self.m
        if self.closed:
            return
        self.closed = 1
        m.running = 0
        for ptr in (<uintptr_t>m.parts, <uintptr_t>m.layers, <uintptr_t>m.segments, <uintptr_t>m.slot_pending,
                    <uintptr_t>m.slot_fresh, <uintptr_t>m.uses, <uintptr_t>m.x_fate,
                    <uintptr_t>m.ring_pending, <uintptr_t>m.ring_free, <uintptr_t>m.q, <uintptr_t>m.tiled,
                    <uintptr_t>m.x_expert, <uintptr_t>m.x_slot, <uintptr_t>m.x_start, <uintptr_t>m.x_of,
                    <uintptr_t>m.count, <uintptr_t>m.fill_at, <uintptr_t>m.rows, <uintptr_t>m.x_ring,
                    <uintptr_t>m.next_chunk, <uintptr_t>m.left_chunks, <uintptr_t>m.n_chunks,
                    <uintptr_t>m.miss, <uintptr_t>m.x_reread, <uintptr_t>m.position_bytes,
                    <uintptr_t>m.position_rereads, <uintptr_t>m.drop.gone, <uintptr_t>m.x_place,
                    <uintptr_t>m.place, <uintptr_t>m.spares, <uintptr_t>m.routers, <uintptr_t>m.guess_scratch,
                    <uintptr_t>m.guess, <uintptr_t>m.n_guess, <uintptr_t>m.scores):
            free(<void *><uintptr_t>ptr)
        log_free(&m.log)

    def __dealloc__(self):
        self.close()
