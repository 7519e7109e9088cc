from libc.stdint cimport int32_t, int64_t
from posix.types cimport off_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass

cdef extern from "sync.h" nogil:
    int bm_load(const int *p)
    void bm_store(int *p, int v)
    int bm_add(int *p, int v)
    int64_t bm_add64(int64_t *p, int64_t v)
    int64_t bm_load64(const int64_t *p)
    void bm_pause()
    int64_t bm_now_ns()
    int64_t BM_YIELD_NS
    int bm_yield_while(const int *p, int v, int64_t ns)
    int64_t bm_thread_cpu_ns()
    void bm_futex_wait(int *p, int v)
    void bm_futex_wake_all(int *p)
    void bm_spin_lock(int *p)
    void bm_spin_unlock(int *p)
    ctypedef struct bm_barrier:
        int arrived
        int phase
        int sleepers
    void bm_barrier_wait(bm_barrier *b, int n)

cdef extern from "page.h" nogil:
    enum:
        PAGE "BM_PAGE"

cdef enum:
    LOW_CAPACITY = 256

cdef struct File:
    int fd            # buffered descriptor, always open
    int direct        # O_DIRECT descriptor, or -1
    int use_direct    # 0 once this file system has refused or lied
    int64_t size      # bytes, when it was opened

cdef struct Read:
    int file          # index into Pool.files
    int64_t offset    # bytes, aligned
    int64_t length    # bytes, aligned
    int64_t need      # bytes that must arrive for the slice to be whole
    char *dst         # aligned
    int *pending      # decremented once when this read is done, whatever its outcome
    int id            # of a read ahead: what it is cancelled or promoted by
    int64_t queued_ns # when it was queued; set only while reads are recorded

cdef struct IoRow:    # one read that has ended, while they are recorded
    int64_t queued_ns # of the monotonic clock
    int64_t began_ns
    int64_t ended_ns
    int64_t offset    # bytes, aligned
    int64_t need      # bytes that were wanted from there
    int64_t got       # bytes that came
    int32_t file
    int32_t lane
    int32_t direct    # past the page cache, and not redone through it
    int32_t failed

cdef struct LaneCounts:   # running totals, by their names in StreamCounters
    int64_t disk_bytes    # moved from the file, alignment included
    int64_t lane_ns       # inside reads, summed over lanes
    int64_t lane_cpu_ns   # CPU of it
    int64_t disk_ns       # wall time with at least one read queued or under way

cdef struct Pool:
    File *files
    int n_files
    pthread_mutex_t lock
    pthread_cond_t work
    int has_lock
    int process       # whose threads the lanes are: in a fork of it there are none, and the lock may be held for ever
    Read *queue
    int capacity      # a power of two
    unsigned int head
    unsigned int tail
    # Reads ahead: taken when the queue above is empty, by all lanes but one.
    Read low[LOW_CAPACITY]
    int n_low
    int low_busy      # lanes inside one of them
    int stop
    int n_lanes
    int n_started     # lanes that have taken their number
    pthread_t *threads
    # What waiting compute threads watch.
    int done_seq
    int sleepers
    int in_flight     # queued or being read
    # First failure.
    int failed
    int fail_file
    int fail_errno    # 0: the read came short
    int64_t fail_offset
    int64_t fail_got
    int64_t fail_need
    LaneCounts counts
    int64_t active_since
    # Record of reads, under `lock`; NULL: off.
    IoRow *io
    int io_size
    int io_n
    int64_t io_lost   # rows that found no room since the last take
    # Fault injection for tests: 0 none, 1 says done before the read, 2 flips a byte, 3 fails
    int sabotage


cdef inline void read_init(Read *r, int file, int64_t offset, int64_t nbytes, char *dst, int *pending) noexcept nogil:
    # The aligned read that brings in `nbytes` at `offset` of a file. They will lie in `dst`, which is aligned, as far
    # in as in their first page.
    r.file = file
    r.offset = offset & ~<int64_t>(PAGE - 1)
    r.need = offset - r.offset + nbytes
    r.length = (r.need + PAGE - 1) & ~<int64_t>(PAGE - 1)
    r.dst = dst
    r.pending = pending
    r.id = -1


cdef void pool_submit(Pool *p, Read *reads, int n) noexcept nogil
# Queues reads below the others in priority; how many found room.
cdef int pool_submit_low(Pool *p, Read *reads, int n) noexcept nogil
# Reads ahead of this id that have not begun: takes them back (as if they had never been queued), or makes them
# ordinary ones. How many there were.
cdef int pool_cancel_low(Pool *p, int id) noexcept nogil
cdef int pool_promote_low(Pool *p, int id) noexcept nogil
cdef void pool_wait_idle(Pool *p) noexcept nogil
# Sleeps until a read has finished since `seq` was loaded from done_seq.
cdef void pool_wait_progress(Pool *p, int seq) noexcept nogil

cdef class Lanes:
    cdef Pool pool
    cdef readonly list paths
