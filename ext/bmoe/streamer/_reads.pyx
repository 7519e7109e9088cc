# cython: language_level=3
"""Read lanes: threads that move slices of the model file into memory while the layer computes.

A lane is a POSIX thread in a loop of `pread`. Reads go past the page cache (O_DIRECT) where the file
system allows it: into a fixed, already populated slot this costs about a tenth of the CPU of any way
that gives pages back to the kernel (docs/streaming.md has the table). No lane takes the GIL.
"""

import errno as _errno
import os

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, EINVAL, errno
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.fcntl cimport O_RDONLY, open as c_open
from posix.unistd cimport close as c_close

from bmoe.errors import ModelError, ReadError

cdef extern from "<fcntl.h>" nogil:
    int O_DIRECT
    int O_CLOEXEC
    int POSIX_FADV_DONTNEED
    int POSIX_FADV_RANDOM
    int posix_fadvise(int fd, int64_t offset, int64_t length, int advice)

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void *buf, size_t count, int64_t offset)
    int usleep(unsigned int us)

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t size)

cdef extern from "<pthread.h>" nogil:
    int pthread_create(pthread_t *thread, void *attr, void *(*fn)(void *) noexcept nogil, void *arg)
    int pthread_join(pthread_t thread, void **result)
    int pthread_mutex_init(pthread_mutex_t *m, void *attr)
    int pthread_mutex_lock(pthread_mutex_t *m)
    int pthread_mutex_unlock(pthread_mutex_t *m)
    int pthread_mutex_destroy(pthread_mutex_t *m)
    int pthread_cond_init(pthread_cond_t *c, void *attr)
    int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
    int pthread_cond_signal(pthread_cond_t *c)
    int pthread_cond_broadcast(pthread_cond_t *c)
    int pthread_cond_destroy(pthread_cond_t *c)

DEF ALIGN = 4096
DEF SLOW_US = 2000
ALIGNMENT = ALIGN
"""Alignment of every direct read, bytes: covers 512 and 4096 byte logical blocks."""
IO_ROW = [
    *((name, "i8") for name in ("queued_ns", "began_ns", "ended_ns", "offset", "need", "got")),
    *((name, "i4") for name in ("file", "lane", "direct", "failed")),
]
"""Fields of a recorded read, for numpy.dtype; times of the monotonic clock."""


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
            bm_add64(&p.n_fallback, 1)
            f.use_direct = 0
        elif not whole and code == 0 and got % ALIGN:
            # A direct read may stop short inside the file; the buffered one says whether it ends there.
            bm_add64(&p.n_fallback, 1)
        elif not whole:
            _fail(p, r, code, got)
    if not whole and not p.failed:
        got = _read_loop(f.fd, r.dst, r.length, r.need, r.offset, &code)
        # The slot is the cache; a second copy in the page cache would only push dense weights out.
        posix_fadvise(f.fd, r.offset, r.length, POSIX_FADV_DONTNEED)
        if got < r.need:
            _fail(p, r, code, got)
    if p.sabotage == 2 and got > 0:
        r.dst[r.need // 2] ^= 0x55
    bm_add64(&p.n_reads, 1)
    bm_add64(&p.bytes, got)
    bm_add64(&p.busy_ns, bm_now_ns() - t0)
    bm_add64(&p.cpu_ns, bm_thread_cpu_ns() - c0)
    if p.io != NULL:
        _record(p, r, lane, t0, got, fd >= 0 and whole)


cdef inline void _finish(Pool *p, Read *r) noexcept nogil:
    bm_add(r.pending, -1)
    if bm_add(&p.in_flight, -1) == 1:
        pthread_mutex_lock(&p.lock)
        if p.active_since and bm_load(&p.in_flight) == 0:
            p.active_ns += bm_now_ns() - p.active_since
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


cdef int _take_low(Pool *p, int *pending, Read *out) noexcept nogil:
    # With the lock held: removes the reads that count down `pending`.
    cdef int i, kept = 0, n = 0
    for i in range(p.n_low):
        if p.low[i].pending == pending:
            out[n] = p.low[i]
            n += 1
        else:
            p.low[kept] = p.low[i]
            kept += 1
    p.n_low = kept
    return n


cdef int pool_cancel_low(Pool *p, int *pending) noexcept nogil:
    cdef Read taken[LOW_CAPACITY]
    cdef int n
    pthread_mutex_lock(&p.lock)
    n = _take_low(p, pending, taken)
    pthread_mutex_unlock(&p.lock)
    for _ in range(n):
        _finish(p, &taken[0])
    return n


cdef int pool_promote_low(Pool *p, int *pending) noexcept nogil:
    cdef Read taken[LOW_CAPACITY]
    cdef int n
    pthread_mutex_lock(&p.lock)
    n = _take_low(p, pending, taken)
    if n:
        _queue(p, taken, n)
    pthread_mutex_unlock(&p.lock)
    return n


cdef void pool_submit(Pool *p, Read *reads, int n) noexcept nogil:
    """Queues `n` reads; their `pending` counters must already count them."""
    if n <= 0:
        return
    pthread_mutex_lock(&p.lock)
    _in_flight(p, n)
    _queue(p, reads, n)
    pthread_mutex_unlock(&p.lock)


cdef void _queue(Pool *p, Read *reads, int n) noexcept nogil:
    # With the lock held.
    cdef int i, old
    cdef int64_t now = bm_now_ns() if p.io != NULL else 0
    cdef Read *bigger
    while <int>(p.tail - p.head) + n > p.capacity:
        bigger = <Read *>malloc(sizeof(Read) * 2 * p.capacity)
        old = <int>(p.tail - p.head)
        for i in range(old):
            bigger[i] = p.queue[(p.head + i) & <unsigned int>(p.capacity - 1)]
        free(p.queue)
        p.queue = bigger
        p.capacity *= 2
        p.head = 0
        p.tail = old
    for i in range(n):
        p.queue[p.tail & <unsigned int>(p.capacity - 1)] = reads[i]
        p.queue[p.tail & <unsigned int>(p.capacity - 1)].queued_ns = now
        p.tail += 1
    if n == 1:
        pthread_cond_signal(&p.work)
    else:
        pthread_cond_broadcast(&p.work)


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


cdef class Lanes:
    """A pool of read threads over the shards of one model.

    `paths`: the files, in shard order. `n_lanes`: threads (1 or more). `direct`: try O_DIRECT.
    Raises ModelError where a file cannot be opened.
    """

    def __cinit__(self, list paths, int n_lanes=4, bint direct=True):
        self.paths = [os.fspath(p) for p in paths]
        self.pool.n_files = len(paths)
        self.pool.files = <File *>calloc(len(paths), sizeof(File))
        self.pool.capacity = 1024
        self.pool.queue = <Read *>malloc(sizeof(Read) * 1024)
        self.pool.threads = <pthread_t *>calloc(n_lanes, sizeof(pthread_t))
        pthread_mutex_init(&self.pool.lock, NULL)
        pthread_cond_init(&self.pool.work, NULL)
        for i in range(self.pool.n_files):
            self.pool.files[i].fd = -1
            self.pool.files[i].direct = -1

    def __init__(self, list paths, int n_lanes=4, bint direct=True):
        cdef int i
        for i, path in enumerate(self.paths):
            name = os.fsencode(path)
            self.pool.files[i].fd = c_open(name, O_RDONLY | O_CLOEXEC)
            if self.pool.files[i].fd < 0:
                raise ModelError(f"{path}: cannot open: {os.strerror(errno)}")
            self.pool.files[i].size = os.fstat(self.pool.files[i].fd).st_size
            posix_fadvise(self.pool.files[i].fd, 0, 0, POSIX_FADV_RANDOM)
            if direct:
                self.pool.files[i].direct = c_open(name, O_RDONLY | O_CLOEXEC | O_DIRECT)
                self.pool.files[i].use_direct = self.pool.files[i].direct >= 0
        for i in range(n_lanes):
            if pthread_create(&self.pool.threads[i], NULL, _lane, &self.pool):
                raise ReadError(f"cannot start read lane {i + 1} of {n_lanes}")
            self.pool.n_lanes += 1

    @property
    def n_lanes(self):
        return self.pool.n_lanes

    @property
    def direct(self):
        """True where every file is read with O_DIRECT."""
        return all(self.pool.files[i].use_direct for i in range(self.pool.n_files))

    def verify_direct(self, int file, int64_t offset, int64_t nbytes):
        """Reads `nbytes` at `offset` of file `file` both ways and turns O_DIRECT off for it where they differ.

        Some file systems (FUSE among them) accept the flag and return something else. Returns whether the
        file is read directly from now on.
        """
        cdef File *f = &self.pool.files[file]
        cdef int64_t start = offset // ALIGN * ALIGN
        cdef int64_t need = min(offset + nbytes, f.size) - start
        cdef int64_t length = (need + ALIGN - 1) // ALIGN * ALIGN
        cdef char *a = NULL
        cdef char *b = NULL
        cdef int code = 0
        cdef bint same = False
        if not f.use_direct:
            return False
        if posix_memalign(<void **>&a, ALIGN, length) == 0 and posix_memalign(<void **>&b, ALIGN, length) == 0:
            with nogil:
                memset(a, 0, length)
                memset(b, 1, length)
                if _read_loop(f.direct, a, length, need, start, &code) >= need:
                    if _read_loop(f.fd, b, length, need, start, &code) >= need:
                        same = memcmp(a, b, need) == 0
                posix_fadvise(f.fd, start, length, POSIX_FADV_DONTNEED)
        free(a)
        free(b)
        f.use_direct = same
        return same

    def read_windows(self, list windows):
        """Reads `(file, offset, length, need, address)` windows (bytes, aligned) and waits for all of them.

        Raises ReadError on the first failure.
        """
        cdef int n = len(windows), i
        cdef int pending = n
        cdef Read *reads
        if not self.pool.n_lanes:
            raise ReadError("the read lanes are closed")
        if not n:
            return
        reads = <Read *>malloc(sizeof(Read) * n)
        for i in range(n):
            file, offset, length, need, address = windows[i]
            reads[i].file = file
            reads[i].offset = offset
            reads[i].length = length
            reads[i].need = need
            reads[i].dst = <char *><uintptr_t>address
            reads[i].pending = &pending
        with nogil:
            pool_submit(&self.pool, reads, n)
            pool_wait_idle(&self.pool)
        free(reads)
        self.raise_failure()

    def failure(self):
        """The first failed read as a one-line message, or None."""
        cdef Pool *p = &self.pool
        if not bm_load(&p.failed):
            return None
        what = (os.strerror(p.fail_errno) if p.fail_errno else
                f"only {p.fail_got} of {p.fail_need} bytes are there: the file is shorter than when it was opened")
        return f"{self.paths[p.fail_file]}: read at byte {p.fail_offset} failed: {what}"

    def raise_failure(self):
        message = self.failure()
        if message is not None:
            raise ReadError(message)

    def clear_failure(self):
        with nogil:
            pool_wait_idle(&self.pool)
        bm_store(&self.pool.failed, 0)

    def record(self, int most):
        """Records reads from now on, at most `most` between two calls of `take_reads`; the lanes must be idle."""
        cdef Pool *p = &self.pool
        free(p.io)
        p.io = <IoRow *>malloc(sizeof(IoRow) * max(most, 1))
        p.io_size = most if p.io != NULL else 0
        p.io_n = 0

    def take_reads(self):
        """Reads that ended since the last call, as the bytes of `IO_ROW` rows, and how many more found no room."""
        cdef Pool *p = &self.pool
        with nogil:
            pthread_mutex_lock(&p.lock)
        try:
            out = PyBytes_FromStringAndSize(<char *>p.io, p.io_n * sizeof(IoRow)) if p.io_n else b""
            lost = p.io_lost
            p.io_n = 0
            p.io_lost = 0
        finally:
            pthread_mutex_unlock(&p.lock)
        return out, lost

    def sabotage(self, int mode):
        """Fault injection for the tests that show that a gate can fail. Not for anything else.

        0 off; 1 a read counts as done before it is; 2 a byte of each slice is flipped; 3 each read fails; 4 each
        takes 2 ms longer.
        """
        self.pool.sabotage = mode

    def counters(self):
        """`(bytes, busy_ns, cpu_ns, active_ns)` since the start.

        Bytes moved, alignment included; time of lanes inside reads and CPU of it, summed over lanes; wall time
        with at least one read queued or under way (complete once the lanes are idle).
        """
        cdef Pool *p = &self.pool
        return bm_load64(&p.bytes), bm_load64(&p.busy_ns), bm_load64(&p.cpu_ns), bm_load64(&p.active_ns)

    def close(self):
        """Finishes what is queued, joins the threads and closes the files. May be called twice."""
        cdef int i
        cdef Pool *p = &self.pool
        if p.n_lanes:
            with nogil:
                pthread_mutex_lock(&p.lock)
                p.stop = 1
                pthread_cond_broadcast(&p.work)
                pthread_mutex_unlock(&p.lock)
                for i in range(p.n_lanes):
                    pthread_join(p.threads[i], NULL)
            p.n_lanes = 0
        if p.files != NULL:
            for i in range(p.n_files):
                if p.files[i].fd >= 0:
                    c_close(p.files[i].fd)
                    p.files[i].fd = -1
                if p.files[i].direct >= 0:
                    c_close(p.files[i].direct)
                    p.files[i].direct = -1

    def __dealloc__(self):
        cdef Pool *p = &self.pool
        self.close()
        free(p.files)
        free(p.io)
        free(p.queue)
        free(p.threads)
        pthread_mutex_destroy(&p.lock)
        pthread_cond_destroy(&p.work)
