# The layout check: ggml_abi.h against tensors, nodes and a buffer type that the running library makes. Included by
# ggml.pyx. In parts, so that a checker can run each by itself; the order is that of `check_abi`.

ABI_PARTS = {
    "size": "the size of ggml_tensor",
    "shape": "type, ne and nb of ggml_tensor",
    "name": "name of ggml_tensor",
    "data": "data of ggml_tensor",
    "flags": "flags and extra of ggml_tensor",
    "view": "view_src and view_offs of ggml_tensor",
    "matmul": "op, src and shape of what ggml_mul_mat_id makes",
    "custom": "op and op_params of what ggml_custom_4d makes",
    "buffers": "the function table of ggml_backend_buffer_type",
    "kernels": "ggml_type_traits_cpu and its vec_dot",
}


cdef void _probe_op(bm_tensor *dst, int ith, int nth, void *userdata) noexcept nogil:
    pass


cdef int _same(what, got, want) except -1:
    if got != want:
        raise AbiError(f"the layout of ggml differs from the one bmoe was built for: {what} is {got!r}, "
                       f"expected {want!r}; install the pinned llama-cpp-python (see docs/abi.md)")
    return 1


cdef int _find_type(const char *name) noexcept:
    cdef int i
    for i in range(64):
        if _g.type_name(i) != NULL and strcmp(_g.type_name(i), name) == 0:
            return i
    return -1


cdef int _check_tensor(str part, void *ctx) except -1:
    cdef bm_tensor *t = _g.new_tensor_4d(ctx, 0, 2, 3, 5, 7)
    cdef bm_tensor *v
    cdef int i, n = 0
    if part == "shape":
        n += _same("type", t.type, 0)
        n += _same("ne", [t.ne[i] for i in range(4)], [2, 3, 5, 7])
        n += _same("nb", [t.nb[i] for i in range(4)], [4, 8, 24, 120])
    elif part == "name":
        _g.set_name(t, b"blk.0.bmoe")
        n += _same("name", t.name, b"blk.0.bmoe")
        n += _same("address of name", <uintptr_t>_g.get_name(t), <uintptr_t>&t.name[0])
    elif part == "data":
        t.data = <void *>0x1000
        n += _same("data", <uintptr_t>_g.get_data(t), 0x1000)
        t.data = NULL
    elif part == "flags":
        _g.set_input(t)
        n += _same("flags", t.flags & 1, 1)
        n += _same("extra", <uintptr_t>t.extra, 0)
    elif part == "view":
        v = _g.view_1d(ctx, t, 2, 8)
        n += _same("view_src", <uintptr_t>v.view_src, <uintptr_t>t)
        n += _same("view_offs", v.view_offs, 8)
    return n


cdef int _check_matmul(void *ctx) except -1:
    cdef int i, n = 0, i32 = _find_type(b"i32")
    cdef bm_tensor *a
    cdef bm_tensor *b
    cdef bm_tensor *ids
    cdef bm_tensor *mm
    n += _same("type i32 exists", i32 >= 0, True)
    a = _g.new_tensor_4d(ctx, 0, 4, 3, 5, 1)
    b = _g.new_tensor_4d(ctx, 0, 4, 1, 2, 1)
    ids = _g.new_tensor_4d(ctx, i32, 2, 2, 1, 1)
    mm = _g.mul_mat_id(ctx, a, b, ids)
    n += _same("op of ggml_mul_mat_id", _g.op_name(mm.op), b"MUL_MAT_ID")
    n += _same("src of ggml_mul_mat_id", [<uintptr_t>mm.src[i] for i in range(3)],
               [<uintptr_t>a, <uintptr_t>b, <uintptr_t>ids])
    n += _same("shape of ggml_mul_mat_id", [mm.ne[i] for i in range(3)], [3, 2, 2])
    _g.op_mul_mat_id = mm.op
    return n


cdef int _check_custom(void *ctx) except -1:
    cdef bm_tensor *t = _g.new_tensor_4d(ctx, 0, 2, 3, 5, 7)
    cdef bm_tensor *args[1]
    cdef bm_tensor *cu
    cdef bm_custom_params cp
    cdef int n = 0
    args[0] = t
    cu = _g.custom_4d(ctx, 0, 3, 2, 2, 1, args, 1, _probe_op, _g.n_tasks_max, <void *>0x1234)
    n += _same("op of ggml_custom_4d", _g.op_name(cu.op), b"CUSTOM")
    memcpy(&cp, &cu.op_params[0], sizeof(cp))
    n += _same("function of ggml_custom_4d", <uintptr_t>cp.fun, <uintptr_t><void *>&_probe_op)
    n += _same("n_tasks of ggml_custom_4d", cp.n_tasks, _g.n_tasks_max)
    n += _same("userdata of ggml_custom_4d", <uintptr_t>cp.userdata, 0x1234)
    _g.op_custom = cu.op
    return n


cdef int _check_buffers() except -1:
    cdef bm_buft *buft = _g.cpu_buft()
    # Looked at before any is called: each must point into a library, the optional ones may be NULL.
    cdef void **table = <void **>buft
    cdef Dl_info where
    cdef int n = 0
    n += _same("functions of a buffer type", [table[i] != NULL and dladdr(table[i], &where) != 0 for i in (0, 1, 2, 5)],
               [True] * 4)
    n += _same("buffer type name", buft.get_name(buft), _g.buft_name(buft))
    n += _same("buffer type alignment", buft.get_alignment(buft), _g.buft_alignment(buft))
    n += _same("buffer type is_host", bool(buft.is_host(buft)), bool(_g.buft_is_host(buft)))
    return n


cdef int _check_kernels() except -1:
    cdef const bm_cpu_traits *tr = _g.cpu_traits(0)
    cdef float x[2]
    cdef float y[2]
    cdef float s = 0
    cdef int n = 0
    n += _same("vec_dot_type of f32", tr.vec_dot_type, 0)
    n += _same("rows of a vec_dot", tr.nrows >= 1, True)
    x[0], x[1], y[0], y[1] = 1, 2, 3, 4
    tr.vec_dot(2, &s, 0, x, 0, y, 0, 1)
    n += _same("vec_dot of f32", s, 11.0)
    return n


def check_abi_part(str part):
    """One of `ABI_PARTS`: the number of comparisons. Raises AbiError that names the first difference."""
    if not _connected:
        raise AbiError("connect() has not run")
    cdef bm_init_params ip
    ip.mem_size = 1 << 20
    ip.mem_buffer = NULL
    ip.no_alloc = True
    # ggml_tensor_overhead() is the structure plus a 32 byte object header.
    if part == "size":
        return _same("size of ggml_tensor", _g.tensor_overhead() - 32, sizeof(bm_tensor))
    if part == "buffers":
        return _check_buffers()
    if part == "kernels":
        return _check_kernels()
    cdef void *ctx = _g.init(ip)
    if ctx == NULL:
        raise AbiError("ggml_init failed")
    try:
        if part == "matmul":
            return _check_matmul(ctx)
        if part == "custom":
            return _check_custom(ctx)
        return _check_tensor(part, ctx)
    finally:
        _g.free(ctx)


def check_abi():
    """Compares ggml_abi.h with tensors, nodes and a buffer type that the running library makes.

    Returns the number of comparisons. Raises AbiError that names the first difference.
    """
    return sum([check_abi_part(part) for part in ABI_PARTS])


def layout():
    """What ggml_abi.h says: `{structure: (size, {member: (offset, size)})}`, bytes."""
    cdef bm_tensor t
    cdef bm_cpu_traits r
    cdef bm_init_params p
    cdef uintptr_t a = <uintptr_t>&t, b = <uintptr_t>&r, c = <uintptr_t>&p
    return {
        "ggml_tensor": (sizeof(t), {
            "type": (<uintptr_t>&t.type - a, sizeof(t.type)),
            "buffer": (<uintptr_t>&t.buffer - a, sizeof(t.buffer)),
            "ne": (<uintptr_t>&t.ne - a, sizeof(t.ne)),
            "nb": (<uintptr_t>&t.nb - a, sizeof(t.nb)),
            "op": (<uintptr_t>&t.op - a, sizeof(t.op)),
            "op_params": (<uintptr_t>&t.op_params - a, sizeof(t.op_params)),
            "flags": (<uintptr_t>&t.flags - a, sizeof(t.flags)),
            "src": (<uintptr_t>&t.src - a, sizeof(t.src)),
            "view_src": (<uintptr_t>&t.view_src - a, sizeof(t.view_src)),
            "view_offs": (<uintptr_t>&t.view_offs - a, sizeof(t.view_offs)),
            "data": (<uintptr_t>&t.data - a, sizeof(t.data)),
            "name": (<uintptr_t>&t.name - a, sizeof(t.name)),
            "extra": (<uintptr_t>&t.extra - a, sizeof(t.extra)),
        }),
        "ggml_type_traits_cpu": (sizeof(r), {
            "from_float": (<uintptr_t>&r.from_float - b, sizeof(r.from_float)),
            "vec_dot": (<uintptr_t>&r.vec_dot - b, sizeof(r.vec_dot)),
            "vec_dot_type": (<uintptr_t>&r.vec_dot_type - b, sizeof(r.vec_dot_type)),
            "nrows": (<uintptr_t>&r.nrows - b, sizeof(r.nrows)),
        }),
        "ggml_init_params": (sizeof(p), {
            "mem_size": (<uintptr_t>&p.mem_size - c, sizeof(p.mem_size)),
            "mem_buffer": (<uintptr_t>&p.mem_buffer - c, sizeof(p.mem_buffer)),
            "no_alloc": (<uintptr_t>&p.no_alloc - c, sizeof(p.no_alloc)),
        }),
    }
