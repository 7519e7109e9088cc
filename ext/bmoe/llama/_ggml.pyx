# cython: language_level=3
"""The one place that touches ggml's binary interface: its function table, the layout check, the loader's hooks.

`connect()` resolves functions from the libraries that `llama_cpp` has loaded and `check_abi()` compares the
layout that this extension was compiled for (ggml_abi.h) with tensors that the running library builds. Nothing
else in bmoe may run before both have passed.

`ModelHost` is how a model is loaded without reading it: llama.cpp's public `llama_model_load_from_file_ptr`
is given a stream that serves the header from memory and zeros for tensor data, and a buffer type that notes
every tensor and shows it to the loader as one block of its type, so that a few bytes of each are allocated and
"read". Afterwards the shapes are restored and the caller points each tensor at memory of its own.
"""

from libc.errno cimport EINVAL, errno
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdio cimport FILE, fclose, fflush, fprintf, stderr
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strcmp, strlen

from bmoe.errors import AbiError

cdef extern from "sync.h" nogil:
    void bm_spin_lock(int *p)
    void bm_spin_unlock(int *p)

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *path, int flags)
    void *dlsym(void *handle, const char *name)
    ctypedef struct Dl_info:
        pass
    int dladdr(const void *addr, Dl_info *info)
    int RTLD_NOW
    int RTLD_NOLOAD

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t size)

cdef extern from "<stdio.h>" nogil:
    ctypedef struct cookie_io_functions_t:
        ssize_t (*read)(void *, char *, size_t) noexcept nogil
        ssize_t (*write)(void *, const char *, size_t) noexcept nogil
        int (*seek)(void *, int64_t *, int) noexcept nogil
        int (*close)(void *) noexcept nogil
    FILE *fopencookie(void *cookie, const char *mode, cookie_io_functions_t functions)
    int SEEK_SET
    int SEEK_CUR

cdef extern from "<unistd.h>" nogil:
    void _exit(int code)
    int isatty(int fd)

cdef extern from "argmax.h" nogil:
    int bm_argmax(const float *x, int n)

cdef Ggml _g
ctypedef void (*abort_fn)(const char *) noexcept nogil
cdef abort_fn (*_set_abort)(abort_fn) noexcept nogil
ctypedef void (*log_fn)(int, const char *, void *) noexcept nogil
cdef void (*_log_get)(log_fn *, void **) noexcept nogil
cdef void (*_log_set)(log_fn, void *) noexcept nogil
cdef const float *(*_logits_ith)(void *, int) noexcept nogil
cdef c_bool (*_is_eog)(void *, int) noexcept nogil
cdef int (*_to_piece)(void *, int, char *, int, int, c_bool) noexcept nogil
cdef bint _connected = False


cdef Ggml *ggml() noexcept nogil:
    return &_g


cdef list _functions():
    # Name, address of the pointer to fill, and whether bmoe can do without.
    return [
        (b"ggml_init", <uintptr_t>&_g.init, True),
        (b"ggml_free", <uintptr_t>&_g.free, True),
        (b"ggml_tensor_overhead", <uintptr_t>&_g.tensor_overhead, True),
        (b"ggml_new_tensor_4d", <uintptr_t>&_g.new_tensor_4d, True),
        (b"ggml_view_1d", <uintptr_t>&_g.view_1d, True),
        (b"ggml_mul_mat_id", <uintptr_t>&_g.mul_mat_id, True),
        (b"ggml_custom_4d", <uintptr_t>&_g.custom_4d, True),
        (b"ggml_set_name", <uintptr_t>&_g.set_name, True),
        (b"ggml_get_name", <uintptr_t>&_g.get_name, True),
        (b"ggml_get_data", <uintptr_t>&_g.get_data, True),
        (b"ggml_set_input", <uintptr_t>&_g.set_input, True),
        (b"ggml_nbytes", <uintptr_t>&_g.nbytes, True),
        (b"ggml_row_size", <uintptr_t>&_g.row_size, True),
        (b"ggml_blck_size", <uintptr_t>&_g.blck_size, True),
        (b"ggml_type_size", <uintptr_t>&_g.type_size, True),
        (b"ggml_type_name", <uintptr_t>&_g.type_name, True),
        (b"ggml_op_name", <uintptr_t>&_g.op_name, True),
        (b"ggml_get_unary_op", <uintptr_t>&_g.unary_op, True),
        (b"ggml_unary_op_name", <uintptr_t>&_g.unary_op_name, True),
        (b"ggml_get_type_traits_cpu", <uintptr_t>&_g.cpu_traits, True),
        (b"ggml_backend_cpu_buffer_type", <uintptr_t>&_g.cpu_buft, True),
        (b"ggml_backend_cpu_buffer_from_ptr", <uintptr_t>&_g.buffer_from_ptr, True),
        (b"ggml_backend_buft_name", <uintptr_t>&_g.buft_name, True),
        (b"ggml_backend_buft_get_alignment", <uintptr_t>&_g.buft_alignment, True),
        (b"ggml_backend_buft_is_host", <uintptr_t>&_g.buft_is_host, True),
        (b"ggml_compute_forward_mul_mat_id_tiled", <uintptr_t>&_g.tiled_id, False),
        (b"ggml_tiled_wdata_size", <uintptr_t>&_g.tiled_wdata, False),
        (b"ggml_set_abort_callback", <uintptr_t>&_set_abort, True),
        (b"_ZSt21__throw_runtime_errorPKc", <uintptr_t>&_throw, False),
        (b"llama_log_get", <uintptr_t>&_log_get, True),
        (b"llama_log_set", <uintptr_t>&_log_set, True),
        (b"llama_get_logits_ith", <uintptr_t>&_logits_ith, True),
        (b"llama_vocab_is_eog", <uintptr_t>&_is_eog, True),
        (b"llama_token_to_piece", <uintptr_t>&_to_piece, True),
    ]


def function_names():
    """The functions that `connect` looks for: `(name, whether bmoe needs it)`."""
    return [(name.decode(), needed) for name, _, needed in _functions()]


def connect(bytes library_path):
    """Fills the function table from the already loaded library at `library_path` (libllama) and what it needs.

    Raises AbiError where a function is missing.
    """
    global _connected
    cdef void *h = dlopen(library_path, RTLD_NOW | RTLD_NOLOAD)
    cdef void *f
    if h == NULL:
        raise AbiError(f"{library_path.decode()}: not loaded by llama_cpp")
    for name, slot, needed in _functions():
        f = dlsym(h, <const char *>name)
        if f == NULL and needed:
            raise AbiError(f"the installed llama-cpp-python has no function {name.decode()}: "
                           "install the release that this bmoe was built for (see docs/abi.md)")
        (<void **><uintptr_t>slot)[0] = f
    if _g.tiled_id == NULL or _g.tiled_wdata == NULL:
        _g.tiled_id = NULL
        _g.tiled_wdata = NULL
    _g.n_tasks_max = -1
    _connected = True


include "ggml_check.pxi"


def type_info(int ggml_type):
    """`(name, elements of a block, bytes of a block)` of a ggml type."""
    return _g.type_name(ggml_type).decode(), _g.blck_size(ggml_type), _g.type_size(ggml_type)


include "ggml_log.pxi"


def greedy_token(uintptr_t context, uintptr_t vocab, int n_vocab, int row=-1):
    """The likeliest token after place `row` of the batch (-1: the last): `(id, ends a generation, its bytes)`.

    `context`, `vocab`: addresses. One call where Python would need four: after a graph has run, every cache is
    cold, and each call costs tens of microseconds. Ties go to the lowest id.
    """
    cdef const float *logits = _logits_ith(<void *>context, row)
    cdef char piece[256]
    cdef int token = bm_argmax(logits, n_vocab)
    cdef int n = _to_piece(<void *>vocab, token, piece, 256, 0, False)
    return token, _is_eog(<void *>vocab, token), piece[:n] if n >= 0 else None


cdef struct Shrunk:
    bm_tensor *tensor
    int64_t ne[4]

cdef struct Host:
    const char *header
    int64_t header_len
    int64_t size
    int64_t pos
    bm_buft buft
    Shrunk *tensors
    int n_tensors
    int capacity
    void **buffers
    int n_buffers


cdef ssize_t _read(void *cookie, char *buf, size_t n) noexcept nogil:
    # Tensor data lies behind the header; nobody will use what is read of it here.
    cdef Host *h = <Host *>cookie
    cdef int64_t left = h.size - h.pos, head
    if <int64_t>n > left:
        n = <size_t>left
    if n == 0:
        return 0
    head = h.header_len - h.pos
    if head > 0:
        if head > <int64_t>n:
            head = <int64_t>n
        memcpy(buf, h.header + h.pos, head)
    else:
        head = 0
    memset(buf + head, 0, n - head)
    h.pos += n
    return <ssize_t>n


cdef int _seek(void *cookie, int64_t *offset, int whence) noexcept nogil:
    cdef Host *h = <Host *>cookie
    cdef int64_t to = offset[0]
    if whence == SEEK_CUR:
        to += h.pos
    elif whence != SEEK_SET:
        to += h.size
    if to < 0:
        return -1
    h.pos = to
    offset[0] = to
    return 0


cdef const char *_buft_name(bm_buft *b) noexcept nogil:
    return "bmoe"


cdef void *_buft_alloc(bm_buft *b, size_t size) noexcept nogil:
    cdef Host *h = <Host *>b.context
    cdef void *p = NULL
    cdef void **grown = <void **>realloc(h.buffers, sizeof(void *) * (h.n_buffers + 1))
    if grown == NULL or posix_memalign(&p, 4096, size + 4096):
        return NULL
    h.buffers = grown
    h.buffers[h.n_buffers] = p
    h.n_buffers += 1
    return _g.buffer_from_ptr(p, size)


cdef size_t _buft_align(bm_buft *b) noexcept nogil:
    return _g.buft_alignment(_g.cpu_buft())


cdef size_t _buft_alloc_size(bm_buft *b, const bm_tensor *t) noexcept nogil:
    # llama.cpp asks for the size of each tensor just before it allocates: that is how they are found.
    cdef Host *h = <Host *>b.context
    cdef Shrunk *grown
    cdef Shrunk *x
    cdef int i
    for i in range(h.n_tensors):
        if h.tensors[i].tensor == t:
            return _g.nbytes(t)
    if h.n_tensors == h.capacity:
        grown = <Shrunk *>realloc(h.tensors, sizeof(Shrunk) * (2 * h.capacity + 256))
        if grown == NULL:
            return <size_t>1 << 62
        h.tensors = grown
        h.capacity = 2 * h.capacity + 256
    x = &h.tensors[h.n_tensors]
    h.n_tensors += 1
    x.tensor = <bm_tensor *>t
    for i in range(4):
        x.ne[i] = t.ne[i]
        x.tensor.ne[i] = 1
    x.tensor.ne[0] = _g.blck_size(t.type)
    return _g.nbytes(t)


cdef c_bool _buft_is_host(bm_buft *b) noexcept nogil:
    return True


cdef class ModelHost:
    """What llama.cpp loads a model through: a header-only stream and a buffer type that holds nothing.

    `header`: bytes of a GGUF up to its data section. `size`: bytes of the whole (virtual) file. Keep it until
    the model has been freed, then `close()`.
    """

    cdef Host *h
    cdef FILE *f
    cdef bytes header

    def __cinit__(self, bytes header, int64_t size):
        cdef cookie_io_functions_t io
        self.h = <Host *>malloc(sizeof(Host))
        if self.h == NULL:
            raise MemoryError
        memset(self.h, 0, sizeof(Host))
        self.header = header
        self.h.header = <const char *>self.header
        self.h.header_len = len(header)
        self.h.size = size
        self.h.buft.get_name = _buft_name
        self.h.buft.alloc_buffer = _buft_alloc
        self.h.buft.get_alignment = _buft_align
        self.h.buft.get_max_size = NULL
        self.h.buft.get_alloc_size = _buft_alloc_size
        self.h.buft.is_host = _buft_is_host
        self.h.buft.device = NULL
        self.h.buft.context = self.h
        memset(&io, 0, sizeof(io))
        io.read = _read
        io.seek = _seek
        self.f = fopencookie(self.h, b"rb", io)
        if self.f == NULL:
            raise MemoryError

    @property
    def file_pointer(self):
        """Address of the `FILE` for llama_model_load_from_file_ptr."""
        return <uintptr_t>self.f

    @property
    def buffer_type(self):
        """Address of the buffer type for `tensor_buft_overrides`."""
        return <uintptr_t>&self.h.buft

    def finish_load(self):
        """Restores the shapes; call it once llama.cpp has loaded.

        Returns `{name: addresses of the ggml_tensors}`: a file's tensor may serve as two (a tied embedding).
        Each must be placed before a graph runs.
        """
        cdef int i, j
        cdef bm_tensor *t
        found = {}
        for i in range(self.h.n_tensors):
            t = self.h.tensors[i].tensor
            for j in range(4):
                t.ne[j] = self.h.tensors[i].ne[j]
            t.data = NULL
            found.setdefault(t.name.decode(), []).append(<uintptr_t>t)
        self.close_stream()
        self.header = b""  # megabytes, with a real vocabulary
        self.h.header = NULL
        self.h.header_len = 0
        return found

    def place(self, uintptr_t tensor, uintptr_t data):
        """Points the tensor at `tensor` at its bytes at `data` (addresses)."""
        (<bm_tensor *>tensor).data = <void *>data

    def close_stream(self):
        if self.f != NULL:
            fclose(self.f)
            self.f = NULL

    def close(self):
        """Frees what the model's buffers point at. Only after the model has been freed."""
        cdef int i
        self.close_stream()
        if self.h != NULL:
            for i in range(self.h.n_buffers):
                free(self.h.buffers[i])
            free(self.h.buffers)
            free(self.h.tensors)
            free(self.h)
            self.h = NULL

    def __dealloc__(self):
        self.close()
