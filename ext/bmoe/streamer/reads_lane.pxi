# A lane: a thread in a loop of reads. Included by _reads.pyx.

cdef void _fail(Pool *p, Read *r, int code, int64_t got) noexcept nogil:
    pthread_mutex_lock(&p.lock)
    if not p.failed:
        p.fail_file = r.file
        p.fail_errno = code
        p.fail_offset = r.offset
        p.fail_got = got
        p.fail_need = r.need
        bm_store(&p.failed, 1)
    pthread_mutex_unlock(&p.lock)


cdef int64_t _read_loop(int fd, char *dst, int64_t length, int64_t need, int64_t offset, int *code) noexcept nogil:
    # Reads until `need` bytes are there; the bytes got, with *code = errno (0 at end of file).
    cdef int64_t got = 0
    cdef ssize_t n
    code[0] = 0
    while got < need:
        n = pread(fd, dst + got, length - got, offset + got)
        if n > 0:
            got += n
        elif n == 0:
            break
        elif errno == EINTR or errno == EAGAIN:
            continue
        else:
            code[0] = errno
            break
    return got


cdef void _record(Pool *p, Read *r, int lane, int64_t t0, int64_t got, bint direct) noexcept nogil:
    cdef IoRow *row
    pthread_mutex_lock(&p.lock)
    if p.io_n < p.io_size:
        row = &p.io[p.io_n]
        p.io_n += 1
        row.queued_ns = r.queued_ns
        row.began_ns = t0
        row.ended_ns = bm_now_ns()
        row.offset = r.offset
        row.need = r.need
        row.got = max(got, 0)
        row.file = r.file
        row.lane = lane
        row.direct = direct
        row.failed = got < r.need
    elif p.io != NULL:
        p.io_lost += 1
    pthread_mutex_unlock(&p.lock)


cdef void _do_read(Pool *p, Read *r, int lane) noexcept nogil:
    cdef File *f = &p.files[r.file]
    cdef int64_t got = 0, t0 = bm_now_ns(), c0 = bm_thread_cpu_ns()
    cdef int code = 0, fd = f.direct if f.use_direct else -1
    cdef bint whole = False
    if p.sabotage == 4:
        usleep(SLOW_US)
    if p.sabotage == 3:
        _fail(p, r, 5, 0)
        if p.io != NULL:
            _record(p, r, lane, t0, 0, fd >= 0)
        return
    if fd >= 0:
        got = _read_loop(fd, r.dst, r.length, r.need, r.offset, &code)
        whole = got >= r.need
        if not whole and code == EINVAL:
            # A file system that accepted the flag and refuses the read: go on without it.
            f.use_direct = 0
        elif not whole and not (code == 0 and got % PAGE):
            # One that stopped short inside a page is left to the buffered read, which says whether the file ends there.
            _fail(p, r, code, got)
    if not whole and not p.failed:
        got = _read_loop(f.fd, r.dst, r.length, r.need, r.offset, &code)
        # The slot is the cache; a second copy in the page cache would only push dense weights out.
        posix_fadvise(f.fd, r.offset, r.length, POSIX_FADV_DONTNEED)
        if got < r.need:
            _fail(p, r, code, got)
    if p.sabotage == 2 and got > 0:
        r.dst[r.need // 2] ^= 0x55
    bm_add64(&p.counts.disk_bytes, got)
    bm_add64(&p.counts.lane_ns, bm_now_ns() - t0)
    bm_add64(&p.counts.lane_cpu_ns, bm_thread_cpu_ns() - c0)
    if p.io != NULL:
        _record(p, r, lane, t0, got, fd >= 0 and whole)


cdef inline void _finish(Pool *p, Read *r) noexcept nogil:
    bm_add(r.pending, -1)
    if bm_add(&p.in_flight, -1) == 1:
        pthread_mutex_lock(&p.lock)
        if p.active_since and bm_load(&p.in_flight) == 0:
            p.counts.disk_ns += bm_now_ns() - p.active_since
            p.active_since = 0
        pthread_mutex_unlock(&p.lock)
    bm_add(&p.done_seq, 1)
    if bm_load(&p.sleepers) > 0:
        bm_futex_wake_all(&p.done_seq)


cdef void *_lane(void *arg) noexcept nogil:
    cdef Pool *p = <Pool *>arg
    cdef Read r
    cdef int i, lane = bm_add(&p.n_started, 1)
    cdef bint low
    while True:
        pthread_mutex_lock(&p.lock)
        while p.head == p.tail and not p.stop and not _may_read_ahead(p):
            pthread_cond_wait(&p.work, &p.lock)
        low = p.head == p.tail
        if not low:
            r = p.queue[p.head & <unsigned int>(p.capacity - 1)]
            p.head += 1
        elif p.n_low:
            r = p.low[0]
            p.n_low -= 1
            for i in range(p.n_low):
                p.low[i] = p.low[i + 1]
            p.low_busy += 1
        else:
            pthread_mutex_unlock(&p.lock)
            return NULL
        pthread_mutex_unlock(&p.lock)
        if p.sabotage == 1:
            _finish(p, &r)
            _do_read(p, &r, lane)
        else:
            _do_read(p, &r, lane)
            _finish(p, &r)
        if low:
            pthread_mutex_lock(&p.lock)
            p.low_busy -= 1
            if _may_read_ahead(p):
                pthread_cond_signal(&p.work)
            pthread_mutex_unlock(&p.lock)
