# cython: language_level=3
"""Numbers out of small files of the kernel that stay open: one `pread` each, and no object but the numbers."""

from libc.stdint cimport int64_t
from libc.stdlib cimport strtoll
from libc.string cimport strlen, strstr

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void *buf, size_t count, int64_t offset)

DEF ROOM = 4096


def kib_fields(int fd, tuple names):
    """Bytes after each name in a file of `Name: 123 kB` lines, None for a name it does not have.

    `names`: bytes, with the colon, and a line break before it where the name may be the end of a longer one.
    """
    cdef char text[ROOM]
    cdef char *at
    cdef const char *name
    cdef ssize_t n = -1
    if fd >= 0:
        with nogil:
            n = pread(fd, text, ROOM - 1, 0)
    text[max(n, 0)] = 0
    out = []
    for wanted in names:
        name = wanted
        at = strstr(text, name)
        out.append(<int64_t>strtoll(at + strlen(name), NULL, 10) << 10 if at != NULL else None)
    return out


def number(int fd):
    """The number that a one-line file holds; None for anything else ("max"), and where it cannot be read."""
    cdef char text[64]
    cdef char *end
    cdef ssize_t n = -1
    cdef int64_t value
    if fd >= 0:
        with nogil:
            n = pread(fd, text, 63, 0)
    if n <= 0 or not c'0' <= text[0] <= c'9':
        return None
    text[n] = 0
    value = strtoll(text, &end, 10)
    return value if end[0] == c'\n' or end[0] == 0 else None
