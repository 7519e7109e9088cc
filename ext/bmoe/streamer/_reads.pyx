# cython: language_level=3
"""Read lanes: threads that move slices of the model file into memory while the layer computes.

A lane is a POSIX thread in a loop of `pread`. Reads go past the page cache (O_DIRECT) where the file
system allows it: into a fixed, already populated slot this costs about a tenth of the CPU of any way
that gives pages back to the kernel (docs/streaming.md has the table). No lane takes the GIL.
"""

import errno as _errno
import os

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, EINVAL, ENOMEM, errno
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memset
from posix.fcntl cimport O_RDONLY, open as c_open
from posix.unistd cimport close as c_close, getpid

from bmoe.errors import ModelError, ReadError
from bmoe.streamer._alloc cimport zeroed

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

DEF SLOW_US = 2000
ALIGNMENT = PAGE
"""Alignment of every direct read, bytes."""
IO_ROW = [
    *((name, "i8") for name in ("queued_ns", "began_ns", "ended_ns", "offset", "need", "got")),
    *((name, "i4") for name in ("file", "lane", "direct", "failed")),
]
"""Fields of a recorded read, for numpy.dtype; times of the monotonic clock."""

include "reads_queue.pxi"
include "reads_lane.pxi"


def window(int file, int64_t offset, int64_t nbytes, uintptr_t address):
    """The aligned read that brings in `nbytes` at `offset` of a file: `(file, offset, length, need, address)`.

    `need` bytes of the `length` must arrive; the first one wanted lies in `address` as far in as in its page.
    """
    cdef Read r
    read_init(&r, file, offset, nbytes, NULL, NULL)
    return file, r.offset, r.length, r.need, address


cdef class Lanes:
    """A pool of read threads over the shards of one model.

    `paths`: the files, in shard order. `n_lanes`: threads (1 or more). `direct`: try O_DIRECT.
    Raises ModelError where a file cannot be opened.
    """

    def __cinit__(self, list paths, int n_lanes=4, bint direct=True):
        self.paths = [os.fspath(p) for p in paths]
        _pool_init(&self.pool, len(paths), n_lanes)

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
        cdef Read r
        cdef char *a = NULL
        cdef char *b = NULL
        cdef int code = 0
        cdef bint same = False
        if not f.use_direct:
            return False
        read_init(&r, file, offset, min(nbytes, f.size - offset), NULL, NULL)
        if posix_memalign(<void **>&a, PAGE, r.length) == 0 and posix_memalign(<void **>&b, PAGE, r.length) == 0:
            with nogil:
                memset(a, 0, r.length)
                memset(b, 1, r.length)
                if _read_loop(f.direct, a, r.length, r.need, r.offset, &code) >= r.need:
                    if _read_loop(f.fd, b, r.length, r.need, r.offset, &code) >= r.need:
                        same = memcmp(a, b, r.need) == 0
                posix_fadvise(f.fd, r.offset, r.length, POSIX_FADV_DONTNEED)
        free(a)
        free(b)
        f.use_direct = same
        return same

    def read_windows(self, list windows):
        """Reads windows, each as `window` makes it, and waits for all of them.

        Raises ReadError on the first failure.
        """
        cdef int n = len(windows), i
        cdef int pending = n
        cdef Read *reads
        self.check_process()
        if not self.pool.n_lanes:
            raise ReadError("the read lanes are closed")
        if not n:
            return
        reads = <Read *>zeroed(n, sizeof(Read))
        try:
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
        finally:
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

    def check_process(self):
        """Raises ReadError in a fork of the process that has the lanes' threads: nobody would read there."""
        if _forked(&self.pool):
            raise ReadError(f"the read lanes are threads of process {self.pool.process}, of which this one is a fork")

    def clear_failure(self):
        self.check_process()
        with nogil:
            pool_wait_idle(&self.pool)
        bm_store(&self.pool.failed, 0)

    def record(self, int most):
        """Records reads from now on, at most `most` between two calls of `take_reads`; the lanes must be idle."""
        cdef Pool *p = &self.pool
        cdef IoRow *rows = <IoRow *>zeroed(most, sizeof(IoRow))
        free(p.io)
        p.io = rows
        p.io_size = most
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
        """Totals since the start, by their names in `StreamCounters`.

        Bytes moved, alignment included; time of lanes inside reads and CPU of it, summed over lanes; wall time
        with at least one read queued or under way (complete once the lanes are idle).
        """
        cdef LaneCounts *c = &self.pool.counts
        cdef LaneCounts now
        now.disk_bytes = bm_load64(&c.disk_bytes)
        now.lane_ns = bm_load64(&c.lane_ns)
        now.lane_cpu_ns = bm_load64(&c.lane_cpu_ns)
        now.disk_ns = bm_load64(&c.disk_ns)
        return now

    def close(self):
        """Finishes what is queued, joins the threads and closes the files. May be called twice.

        In a fork there is nothing to join: the files are closed.
        """
        cdef int i
        cdef Pool *p = &self.pool
        if p.n_lanes and not _forked(p):
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
        self.close()
        _pool_free(&self.pool)
