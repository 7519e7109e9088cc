from libc.stdlib cimport calloc


cdef inline void *zeroed(size_t n, size_t size) except NULL:
    # Memory for `n` things of `size` bytes and one more, so that there is some for none. Raises MemoryError.
    cdef void *p = calloc(n + 1, size)
    if p == NULL:
        raise MemoryError
    return p
