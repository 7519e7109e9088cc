# cython: language_level=3
"""Regions of memory at addresses that C code keeps: anonymous ones, and read-only maps of a file."""

import os

from libc.errno cimport errno
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

from bmoe.errors import MemoryBudgetError, ModelError

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, int64_t offset)
    int munmap(void *addr, size_t length)
    int madvise(void *addr, size_t length, int advice)
    int mlock(const void *addr, size_t length)
    int mincore(void *addr, size_t length, unsigned char *vec)
    int PROT_READ
    int PROT_WRITE
    int MAP_PRIVATE
    int MAP_SHARED
    int MAP_ANONYMOUS
    int MAP_NORESERVE
    void *MAP_FAILED
    int MADV_HUGEPAGE
    int MADV_RANDOM
    int MADV_DONTNEED
    int MADV_WILLNEED
    int MADV_NORMAL

cdef extern from "sigbus.h" nogil:
    int bm_guard(uintptr_t start, uintptr_t end)
    void bm_unguard(int i)
    int bm_guard_hit(int i)

cdef extern from "page.h" nogil:
    enum:
        PAGE "BM_PAGE"

cdef extern from "<malloc.h>" nogil:
    int malloc_trim(size_t pad)

DEF HUGE = 2 << 20
DEF POPULATE_READ = 22
DEF POPULATE_WRITE = 23


cdef class PageProbe:
    """Whether pages, spread evenly over `ranges` of (address, bytes), are in memory; at most `most` of them.

    For a map of a file that is the page cache, whoever holds it. The first `share()` looks at all of them, each later
    one at the next `step`, and all give the share of them that was there when last looked at: 0 to 1, None where there
    are no pages or the kernel does not tell. It must not be called after a range is gone.
    """

    cdef uintptr_t *pages
    cdef unsigned char *there
    cdef readonly int n
    cdef int step, at, sum

    def __cinit__(self, list ranges, int most, int step=8):
        cdef int i
        # Each range's whole pages, by the first of them that the probe counts.
        spans = [((a + PAGE - 1) // PAGE, (a + n) // PAGE) for a, n in ranges]
        spans = [(first, end) for first, end in spans if end > first]
        total = sum([end - first for first, end in spans])
        self.n = min(most, total)
        self.step = -1 - step
        self.pages = <uintptr_t *>malloc(sizeof(uintptr_t) * max(self.n, 1))
        self.there = <unsigned char *>calloc(max(self.n, 1), 1)
        at, done = 0, 0
        for i in range(self.n):
            wanted = (2 * i + 1) * total // (2 * self.n)
            while wanted >= done + spans[at][1] - spans[at][0]:
                done += spans[at][1] - spans[at][0]
                at += 1
            self.pages[i] = (spans[at][0] + wanted - done) * PAGE

    def share(self):
        cdef unsigned char now
        cdef int n = self.step
        if n < 0:
            n, self.step = self.n, -1 - self.step
        for _ in range(min(n, self.n)):
            if mincore(<void *>self.pages[self.at], PAGE, &now):
                return None
            self.sum += (now & 1) - self.there[self.at]
            self.there[self.at] = now & 1
            self.at = (self.at + 1) % self.n
        return <double>self.sum / self.n if self.n else None

    def __dealloc__(self):
        free(self.pages)
        free(self.there)


def trim_heap():
    """Gives the C heap's free pages back to the system (glibc)."""
    malloc_trim(0)


cdef class Region:
    """Anonymous memory of `size` bytes, aligned to 2 MiB, huge pages asked for. `address` is an int.

    Raises MemoryBudgetError where the address space or the machine refuses it.
    """

    cdef void *base
    cdef size_t mapped
    cdef readonly uintptr_t address
    cdef readonly size_t size

    def __cinit__(self, size_t size, bint huge=True):
        cdef uintptr_t start
        self.size = size
        self.mapped = size + HUGE
        self.base = mmap(NULL, self.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.base == MAP_FAILED:
            self.base = NULL
            raise MemoryBudgetError(f"cannot reserve {size >> 20} MiB of memory: {os.strerror(errno)}; "
                                    "choose a smaller --cache-mb")
        start = (<uintptr_t>self.base + HUGE - 1) & ~(<uintptr_t>HUGE - 1)
        self.address = start
        if huge:
            madvise(<void *>start, size, MADV_HUGEPAGE)

    def populate(self, size_t offset, size_t nbytes):
        """Makes the pages of a part resident now, whatever they hold stays. Returns 0 or the errno.

        EINVAL comes from kernels older than 5.14: pages then come one by one as reads fill them.
        """
        cdef int rc
        with nogil:
            rc = madvise(<void *>(self.address + offset), min(nbytes, self.size - offset), POPULATE_WRITE)
        return errno if rc else 0

    def lock(self):
        """Pins the region (mlock). Returns 0 or the errno."""
        cdef int rc
        with nogil:
            rc = mlock(<void *>self.address, self.size)
        return errno if rc else 0

    def close(self):
        if self.base != NULL:
            munmap(self.base, self.mapped)
            self.base = NULL

    def __dealloc__(self):
        self.close()


cdef class FileMap:
    """A read-only shared map of a whole file, no read-ahead. Raises ModelError where it cannot be mapped."""

    cdef void *base
    cdef int guarded
    cdef readonly uintptr_t address
    cdef readonly size_t size

    def __cinit__(self, path):
        self.guarded = -1
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(fd).st_size
            self.base = mmap(NULL, self.size, PROT_READ, MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if self.base == MAP_FAILED:
            self.base = NULL
            raise ModelError(f"{path}: cannot map: {os.strerror(errno)}")
        madvise(self.base, self.size, MADV_RANDOM)
        self.address = <uintptr_t>self.base

    def guard(self):
        """From now on a page that cannot be read is zeros, and `broken` True, instead of the death of the process."""
        if self.guarded < 0:
            self.guarded = bm_guard(self.address, self.address + self.size)

    @property
    def broken(self):
        """True where a page of a guarded map could not be read: what was computed from it is worthless."""
        return self.guarded >= 0 and bm_guard_hit(self.guarded) != 0

    def warm(self, int64_t offset, int64_t nbytes):
        """Reads the pages of a range into memory now."""
        cdef uintptr_t start = (self.address + offset) & ~<uintptr_t>(PAGE - 1)
        cdef size_t n = self.address + offset + nbytes - start
        with nogil:
            # With MADV_RANDOM left on, the kernel reads page by page (13.5 s instead of 0.85 s to open).
            madvise(<void *>start, n, MADV_NORMAL)
            madvise(<void *>start, n, MADV_WILLNEED)
            madvise(<void *>start, n, POPULATE_READ)

    def close(self):
        if self.guarded >= 0:
            bm_unguard(self.guarded)
            self.guarded = -1
        if self.base != NULL:
            munmap(self.base, self.size)
            self.base = NULL

    def __dealloc__(self):
        self.close()
