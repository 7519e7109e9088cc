# What llama.cpp says: its log, and the assertions that fail in it. Included by ggml.pyx.

cdef char *_log = NULL
cdef size_t _log_size = 0
cdef size_t _log_room = 0
cdef int _log_lock = 0
cdef log_fn _log_before = NULL
cdef void *_log_before_data = NULL


cdef void _on_log(int level, const char *text, void *userdata) noexcept nogil:
    # Native, so that no Python signal handler runs (and loses its exception) inside a call back from llama.cpp.
    global _log, _log_size, _log_room
    cdef size_t n = strlen(text) + 1, room  # messages may hold line breaks: a zero byte ends each
    cdef char *grown
    bm_spin_lock(&_log_lock)
    if _log_size + n > _log_room:
        room = 2 * (_log_size + n) + 4096
        grown = <char *>realloc(_log, room)
        if grown == NULL:
            n = 0
        else:
            _log = grown
            _log_room = room
    memcpy(_log + _log_size, text, n)
    _log_size += n
    bm_spin_unlock(&_log_lock)


def capture_log():
    """Collects what llama.cpp logs from now on; one capture at a time."""
    global _log_size
    _log_size = 0
    _log_get(&_log_before, &_log_before_data)
    _log_set(_on_log, NULL)


def release_log():
    """Gives the log back to who had it; what was collected, as bytes, a zero after each message."""
    global _log, _log_size, _log_room
    _log_set(_log_before, _log_before_data)
    text = _log[:_log_size] if _log_size else b""
    free(_log)
    _log = NULL
    _log_size = _log_room = 0
    return text


# ---- failed assertions ----------------------------------------------------------------------------

# std::__throw_runtime_error(const char *) of the C++ library that llama.cpp runs on; NULL where it is not exported.
cdef void (*_throw)(const char *) noexcept nogil
cdef abort_fn _abort_before = NULL


cdef const char *_without_path(const char *message) noexcept nogil:
    # The build's paths stay out of it.
    cdef const char *text = message
    cdef const char *p = message
    while p[0] and p[0] != b" ":
        if p[0] == b"/":
            text = p + 1
        p += 1
    return text


cdef void _exit_on_abort(const char *message) noexcept nogil:
    # ggml is about to call abort(): one line and exit code 1 instead of a dump.
    if isatty(2):
        fprintf(stderr, b"\x1b[?25h")  # a progress bar may have hidden the cursor
    fprintf(stderr, b"bmoe: llama.cpp gave up: %s\n", _without_path(message))
    fflush(stderr)
    _exit(1)


cdef void _throw_on_abort(const char *message) noexcept nogil:
    _throw(_without_path(message))


def exit_on_abort():
    """Makes a failed assertion of llama.cpp end the process with one line and exit code 1. For programs, not libraries."""
    _set_abort(_exit_on_abort)


def throw_on_abort(bint on):
    """While on, a failed assertion of llama.cpp is a C++ exception instead of the death of the process.

    Only around calls that catch those (loading a model, making a context); they then return NULL and log the
    message. Does nothing where the C++ library has no such function. One user at a time.
    """
    global _abort_before
    if _throw == NULL:
        return
    if on:
        _abort_before = _set_abort(_throw_on_abort)
    else:
        _set_abort(_abort_before)
