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

cdef struct Walk:         # over a graph, before it runs (graph.pxi)
    Segment *segments
    int n_segments
    int next_segment
    int layer         # of the last expert matmul, its parts so far, and its operands
    int mask
    bm_tensor *ids
    bm_tensor *src
    int vdt
    int graph         # counts the graphs that were walked

cdef struct Scratch:      # of the matmuls, as large as the largest so far (graph.pxi)
    char *q           # quantized activations
    size_t q_size
    char *tiled       # of ggml's tiled kernel
    size_t tiled_one  # bytes of it for one thread

cdef struct SlotMemory:   # what is where in the pool (memory.pxi)
    int *place        # [slots] where a slot's memory is, in places of its class
    int *pending      # [places * MAX_PARTS]
    unsigned char *fresh  # [slots] 1: filled by a warm start, and not used yet
    int64_t fresh_used    # experts of a warm start that were then used

cdef struct Ring:         # staging areas for experts that get no slot (memory.pxi)
    int n
    int64_t base
    int64_t stride
    int *pending      # [n]
    int *empty        # [n] stack of areas
    int n_empty

cdef struct Plan:         # of the layer that runs (plan.pxi)
    int max_expert
    int epoch
    int layer
    Segment *segment
    int n             # distinct experts of the batch, the latest token's first
    int *expert       # [n]
    int *slot         # [n] slot, or -1: none
    int *place        # [n] place of its memory, or -1: through the ring
    int *area         # [MAX_PARTS * max_expert] of the ring, or -1
    unsigned char *residency  # [n] 0 a miss, 1 resident, 2 a miss that had been read ahead (told apart for the log)
    unsigned char *reread # [n] 1: the miss had been read before
    int *miss         # [n_miss] those that are read for it
    int n_miss
    int *index_of     # [max_expert] index by expert, or -1
    int *count        # [max_expert] rows of an expert
    int *start        # [n + 1] first of its rows
    int *fill_at      # [n]
    int32_t *rows     # [room * 2] (id, token) pairs, by expert
    int room
    int *next_chunk   # [MAX_PARTS * max_expert]
    int *left_chunks
    int *n_chunks
    int issue_lock
    int issue_order   # the next read to be queued: which matmul, which miss
    int issue_at
    int64_t *uses     # [sum of n_expert] routed rows of each expert; NULL: not counted

cdef struct Positions:    # bytes read for the experts whose earliest row is at a position of the batch (plan.pxi)
    int n
    int64_t *bytes    # [n]
    int64_t *rereads  # [n] of these, bytes of experts that had been read before

cdef struct GuessCounts:  # running totals, by their names in StreamCounters
    int64_t guessed
    int64_t guess_hits
    int64_t guess_cancelled
    int64_t guess_ns

cdef struct ReadAheadBytes:
    int64_t used
    int64_t used_rereads
    int64_t wasted
    int64_t wasted_rereads

cdef struct ReadAhead:    # of the next layer (read_ahead.pxi)
    int on
    int scored        # guesses are compared with what is routed
    Router *routers   # [n_layers]
    Spare *spares
    int n_spares
    char *scratch     # of `router_top`
    int64_t room
    int *guess        # [n_layers * MAX_GUESSES] what the layer before guessed
    int *n_guess      # [n_layers]
    int64_t *scores   # [n_layers * SCORES * 2] right and all, by kind of guess
    int lie           # fault injection
    GuessCounts counts
    ReadAheadBytes bytes

cdef struct Stop:         # requests to end the graph
    int requested
    int64_t looked_ns     # when Python's signals were last looked for
    void *owner

cdef struct GraphTime:    # where thread 0's time in graphs goes, by its names in StreamCounters
    int64_t compute_ns    # nodes, and waiting for the other compute threads
    int64_t wait_ns       # for reads
    int64_t manage_ns     # planning, queueing reads, guessing
    int64_t build_ns      # until the first node of a graph has been computed

cdef struct ThreadTime:   # of thread 0, from `begin_graph` to the end of a graph's last node
    GraphTime target
    GraphTime draft
    GraphTime *graph  # of the one that runs
    int64_t begun_ns  # when it was begun; 0: its first node has ended
    int64_t mark      # when the last node ended; 0: none of this graph has

cdef struct StreamCounts: # running totals, by their names in StreamCounters
    int64_t plans
    int64_t routed
    int64_t streamed  # misses that went through the ring, not into a slot
    int64_t reads
    int64_t bytes
    int64_t plan_ns
    int64_t stall_ns  # summed over compute threads
    int64_t moe_ns    # thread 0, inside expert matmuls

cdef struct Moe:
    Cache *cache
    Pool *pool
    Part *parts
    int n_parts
    Layer *layers
    int n_layers
    int n_threads
    int overlap
    int running       # slots and ring are there
    int skip          # nobody wants what the experts compute: their matmuls give zeros and read nothing
    int index_lock    # the cache's index, and the log: a plan, and who reads beside it
    bm_barrier barrier
    Walk walk
    Scratch scratch
    SlotMemory slots
    Ring ring
    Plan plan
    Positions positions
    ReadAhead ahead
    Drop drop
    RouteLog log
    Stop stop
    ThreadTime time
    StreamCounts counts

# Where the bytes of a slice of an expert go in a slot.
cdef char *slice_area(Moe *m, Part *p, int slot) noexcept nogil

cdef class Streamer:
    cdef Moe m
    cdef Lanes lanes
    cdef ExpertCache cache
    cdef readonly object interrupted
    cdef int closed
