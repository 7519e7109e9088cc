from libc.stdint cimport int32_t, int64_t, uintptr_t

from bmoe.streamer._cache cimport Cache, ExpertCache
from bmoe.streamer._dropping cimport Drop
from bmoe.llama._ggml cimport bm_tensor
from bmoe.streamer._reads cimport Lanes, Pool, bm_barrier
from bmoe.streamer._router cimport Router
from bmoe.streamer._route_log cimport RouteLog

cdef enum:
    MAX_PARTS = 4     # gate, up, down, or gate_up and down; one to spare
    MAX_GUESSES = 32  # experts of one layer that are read ahead
    GUESS_TOKENS = 4  # positions of the widest batch for which something is
    SCORE_CONTROL = 0
    SCORE_NEXT = 1
    SCORES = 2
    SPENT_COMPUTE = 0  # nodes, and waiting for the other compute threads
    SPENT_WAIT = 1     # for reads
    SPENT_MANAGE = 2   # planning, queueing reads, guessing
    SPENT_BUILD = 3    # until the first node of a graph has been computed
    SPENT = 4

cdef struct Segment:  # the expert matmuls of one layer that follow each other in a graph
    int n
    int part[MAX_PARTS]
    bm_tensor *weights    # final routing weights, where the graph shows them (looked for only to drop)

cdef struct Part:     # one routed-expert tensor, `blk.<il>.ffn_*_exps.weight`
    void *moe
    int layer
    int slice_        # which slice of a slot it fills
    int file
    int64_t offset    # of expert 0 in the file, bytes
    int64_t nbytes    # one expert's slice
    int64_t area      # where its area starts in a slot, bytes
    bm_tensor *tensor
    # Written while a graph is walked, before it runs.
    Segment *segment
    int order
    int first
    int keep_q        # the activations quantized for the previous node are the same

cdef struct Layer:
    int n_expert
    int quota         # experts of one wide batch that it may admit
    int n_parts
    int first_part    # in `parts`
    int64_t expert_bytes
    int cls           # size class
    int64_t stride    # bytes of a slot
    int64_t base      # address of the place numbered `first`
    int first
    double missing    # misses of a batch of few tokens, fading mean

cdef struct Spare:    # a slot's memory that the cache does not know
    int cls
    int place
    int layer         # -1: empty
    int expert
    int open          # a guess that its layer has not judged yet
    int broken        # not all of it was read
    int epoch         # of the plan that used it last
    int reread        # the expert had been read before
    int64_t bytes

cdef struct Moe:
    Cache *cache
    Pool *pool
    Part *parts
    int n_parts
    Layer *layers
    int n_layers
    Segment *segments
    int n_segments
    int next_segment
    int walk_layer
    int walk_mask
    bm_tensor *walk_ids
    bm_tensor *walk_src
    int walk_vdt
    int n_threads
    int overlap
    int running       # slots and ring are there
    # Memory.
    int *place             # [n_slots] where a slot's memory is, in places of its class
    int *slot_pending      # [places * MAX_PARTS]
    unsigned char *slot_fresh  # [n_slots] 1: filled by a warm start, and not used yet
    int n_ring
    int64_t ring_base
    int64_t ring_stride
    int *ring_pending      # [n_ring]
    int *ring_free         # [n_ring] stack
    int n_ring_free
    char *q                # quantized activations
    size_t q_size
    char *tiled            # scratch of ggml's tiled kernel
    size_t tiled_one       # bytes of it for one thread
    # Plan of the layer that runs.
    int max_expert
    int epoch
    int plan_layer
    Segment *plan_segment
    int n_x                # distinct experts of the batch, resident first
    int *x_expert
    int *x_slot            # slot, or -1: none
    int *x_place           # place of its memory, or -1: through the ring
    int *x_start           # [n_x + 1] first of its rows
    int *x_of              # [max_expert] index by expert, or -1
    int *count             # [max_expert]
    int *fill_at           # [max_expert]
    int32_t *rows          # [n_rows * 2] (id, token) pairs, by expert
    int n_rows_max
    int *x_ring            # [MAX_PARTS * max_expert]
    int *next_chunk        # [MAX_PARTS * max_expert]
    int *left_chunks
    int *n_chunks
    int *miss
    int n_miss
    unsigned char *x_fate  # [n_x] 0 a miss, 1 resident, 2 a miss that had been read ahead
    int issue_lock
    int index_lock         # the cache's index, and the log: a plan, and who reads beside it
    int issue_order
    int issue_at
    bm_barrier barrier
    Drop drop
    RouteLog log
    # Reading ahead.
    int prefetch           # what the next layer will route is read
    int predict_log
    int graph              # counts the graphs that were walked
    Router *routers        # [n_layers]
    Spare *spares
    int n_spares
    char *guess_scratch
    int64_t guess_room
    int *guess             # [n_layers * MAX_GUESSES] what the layer before guessed
    int *n_guess
    int64_t *scores        # [n_layers * SCORES * 2] right and all, by kind of guess
    int lie                # fault injection
    int64_t guess_ns
    int64_t prefetch_guesses
    int64_t prefetch_hits
    int64_t prefetch_cancelled
    int64_t prefetch_used      # bytes
    int64_t prefetch_used_rereads
    int64_t prefetch_wasted
    int64_t prefetch_wasted_rereads
    # Stop requests.
    int abort
    int64_t last_signal_ns
    void *owner
    # Counters.
    int64_t n_plans
    int64_t routed
    int64_t bytes
    int64_t reads
    int64_t plan_ns
    int64_t stall_ns       # summed over compute threads
    int64_t moe_ns         # thread 0, inside expert matmuls
    # Where thread 0's time in a graph goes, from `begin_graph` to the end of its last node.
    int64_t begun_ns       # when it was; 0: the first node has ended
    int account            # of the graph that runs: 0 the target's, 1 the draft source's
    int64_t node_mark      # when the last node ended; 0: none of this graph has
    int64_t spent[2][SPENT]
    int n_positions
    int64_t *position_bytes    # [n_positions] bytes read for the expert whose earliest row is at that position
    int64_t *position_rereads  # of these, bytes of experts that had been read before
    unsigned char *x_reread    # [n_x] 1: the miss had been read before
    int64_t streamed       # misses that went through the ring, not into a slot
    int64_t *uses          # [sum of n_expert] routed rows of each expert; NULL: not counted
    int64_t fresh_used     # experts of a warm start that were then used
    int skip               # nobody wants what the experts compute: their matmuls give zeros and read nothing

# Where the bytes of a slice of an expert go in a slot.
cdef char *slice_area(Moe *m, Part *p, int slot) noexcept nogil

cdef class Streamer:
    cdef Moe m
    cdef Lanes lanes
    cdef ExpertCache cache
    cdef readonly object interrupted
    cdef int closed
