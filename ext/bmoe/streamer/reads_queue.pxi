# The queue of reads: who waits comes first, reads ahead come after. Included by _reads.pyx.

cdef int _pool_init(Pool *p, int n_files, int n_lanes) except -1:
    cdef int i
    _pool_free(p)
    p.files = <File *>zeroed(n_files, sizeof(File))
    p.n_files = n_files
    for i in range(n_files):
        p.files[i].fd = -1
        p.files[i].direct = -1
    p.capacity = 1024
    p.queue = <Read *>zeroed(p.capacity, sizeof(Read))
    p.threads = <pthread_t *>zeroed(n_lanes, sizeof(pthread_t))
    pthread_mutex_init(&p.lock, NULL)
    pthread_cond_init(&p.work, NULL)
    p.has_lock = 1
    p.process = getpid()
    return 0


cdef inline bint _forked(Pool *p) noexcept nogil:
    return p.process != getpid()


cdef void _pool_free(Pool *p) noexcept nogil:
    # The lanes have been joined and the files closed.
    free(p.files)
    free(p.queue)
    free(p.threads)
    free(p.io)
    if p.has_lock and not _forked(p):  # a condition that lanes wait for is not to be destroyed
        pthread_mutex_destroy(&p.lock)
        pthread_cond_destroy(&p.work)
    memset(p, 0, sizeof(Pool))


cdef inline bint _may_read_ahead(Pool *p) noexcept nogil:
    # One lane stays free for reads that somebody waits for.
    return p.n_low > 0 and (p.low_busy < p.n_lanes - 1 or p.low_busy == 0)


cdef inline void _in_flight(Pool *p, int n) noexcept nogil:
    # With the lock held.
    if bm_add(&p.in_flight, n) == 0 and not p.active_since:
        p.active_since = bm_now_ns()


cdef int pool_submit_low(Pool *p, Read *reads, int n) noexcept nogil:
    cdef int i
    cdef int64_t now = bm_now_ns() if p.io != NULL else 0
    pthread_mutex_lock(&p.lock)
    if n > LOW_CAPACITY - p.n_low:
        n = LOW_CAPACITY - p.n_low
    if n > 0:
        _in_flight(p, n)
        for i in range(n):
            p.low[p.n_low + i] = reads[i]
            p.low[p.n_low + i].queued_ns = now
        p.n_low += n
        pthread_cond_broadcast(&p.work)
    pthread_mutex_unlock(&p.lock)
    return n


cdef int _take_low(Pool *p, int id, Read *out) noexcept nogil:
    # With the lock held: removes the reads of that id.
    cdef int i, kept = 0, n = 0
    for i in range(p.n_low):
        if p.low[i].id == id:
            out[n] = p.low[i]
            n += 1
        else:
            p.low[kept] = p.low[i]
            kept += 1
    p.n_low = kept
    return n


cdef int pool_cancel_low(Pool *p, int id) noexcept nogil:
    cdef Read taken[LOW_CAPACITY]
    cdef int n
    pthread_mutex_lock(&p.lock)
    n = _take_low(p, id, taken)
    pthread_mutex_unlock(&p.lock)
    for _ in range(n):
        _finish(p, &taken[0])
    return n


cdef int pool_promote_low(Pool *p, int id) noexcept nogil:
    cdef Read taken[LOW_CAPACITY]
    cdef int n
    cdef bint queued
    pthread_mutex_lock(&p.lock)
    n = _take_low(p, id, taken)
    queued = _queue(p, taken, n)
    pthread_mutex_unlock(&p.lock)
    if not queued:
        _refuse(p, taken, n)
    return n


cdef void pool_submit(Pool *p, Read *reads, int n) noexcept nogil:
    """Queues `n` reads; their `pending` counters must already count them."""
    cdef bint queued
    if n <= 0:
        return
    pthread_mutex_lock(&p.lock)
    _in_flight(p, n)
    queued = _queue(p, reads, n)
    pthread_mutex_unlock(&p.lock)
    if not queued:
        _refuse(p, reads, n)


cdef void _refuse(Pool *p, Read *reads, int n) noexcept nogil:
    # Reads for which there is no memory have failed: who waits for them must not wait for ever.
    cdef int i
    for i in range(n):
        _fail(p, &reads[i], ENOMEM, 0)
        _finish(p, &reads[i])


cdef bint _grow(Pool *p) noexcept nogil:
    # With the lock held: twice the room, what waits at its beginning. False where there is no memory.
    cdef Read *bigger = <Read *>malloc(sizeof(Read) * 2 * p.capacity)
    cdef int i, n = <int>(p.tail - p.head)
    if bigger == NULL:
        return False
    for i in range(n):
        bigger[i] = p.queue[(p.head + i) & <unsigned int>(p.capacity - 1)]
    free(p.queue)
    p.queue = bigger
    p.capacity *= 2
    p.head = 0
    p.tail = n
    return True


cdef bint _queue(Pool *p, Read *reads, int n) noexcept nogil:
    # With the lock held. False, and nothing queued, where there is no memory.
    cdef int i
    cdef int64_t now = bm_now_ns() if p.io != NULL else 0
    while <int>(p.tail - p.head) + n > p.capacity:
        if not _grow(p):
            return False
    for i in range(n):
        p.queue[p.tail & <unsigned int>(p.capacity - 1)] = reads[i]
        p.queue[p.tail & <unsigned int>(p.capacity - 1)].queued_ns = now
        p.tail += 1
    if n == 1:
        pthread_cond_signal(&p.work)
    elif n:
        pthread_cond_broadcast(&p.work)
    return True


cdef void pool_wait_progress(Pool *p, int seq) noexcept nogil:
    cdef int i
    for i in range(100):
        if bm_load(&p.done_seq) != seq:
            return
        bm_pause()
    if bm_yield_while(&p.done_seq, seq, BM_YIELD_NS):
        return
    bm_add(&p.sleepers, 1)
    if bm_load(&p.done_seq) == seq:
        bm_futex_wait(&p.done_seq, seq)
    bm_add(&p.sleepers, -1)


cdef void pool_wait_idle(Pool *p) noexcept nogil:
    cdef int seq
    while True:
        seq = bm_load(&p.done_seq)
        if bm_load(&p.in_flight) <= 0:
            return
        pool_wait_progress(p, seq)
