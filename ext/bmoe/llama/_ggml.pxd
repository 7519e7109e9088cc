from libc.stdint cimport int32_t, int64_t

cdef extern from "<stdbool.h>" nogil:
    ctypedef bint c_bool "bool"

cdef extern from "ggml_abi.h" nogil:
    ctypedef struct bm_tensor:
        int type
        void *buffer
        int64_t *ne
        size_t *nb
        int op
        int32_t *op_params
        int32_t flags
        bm_tensor **src
        bm_tensor *view_src
        size_t view_offs
        void *data
        char *name
        void *extra
    ctypedef void (*bm_custom_fn)(bm_tensor *dst, int ith, int nth, void *userdata) noexcept nogil
    ctypedef struct bm_custom_params:
        bm_custom_fn fun
        int n_tasks
        void *userdata
    ctypedef void (*bm_from_float_fn)(const float *x, void *y, int64_t k) noexcept nogil
    ctypedef void (*bm_vec_dot_fn)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y,
                                   size_t by, int nrc) noexcept nogil
    ctypedef struct bm_cpu_traits:
        bm_from_float_fn from_float
        bm_vec_dot_fn vec_dot
        int vec_dot_type
        int64_t nrows
    ctypedef struct bm_compute_params:
        int ith
        int nth
        size_t wsize
        void *wdata
        void *threadpool
        c_bool use_ref
    ctypedef c_bool (*bm_tiled_id_fn)(const bm_compute_params *params, bm_tensor *dst, int64_t cur_a,
                                      int64_t cne1, const int32_t *expert_rows, char *scratch) noexcept nogil
    ctypedef size_t (*bm_tiled_wdata_fn)(int n_tasks, bm_tensor *dst) noexcept nogil
    ctypedef struct bm_buft:
        const char *(*get_name)(bm_buft *) noexcept nogil
        void *(*alloc_buffer)(bm_buft *, size_t) noexcept nogil
        size_t (*get_alignment)(bm_buft *) noexcept nogil
        size_t (*get_max_size)(bm_buft *) noexcept nogil
        size_t (*get_alloc_size)(bm_buft *, const bm_tensor *) noexcept nogil
        c_bool (*is_host)(bm_buft *) noexcept nogil
        void *device
        void *context
    ctypedef struct bm_init_params:
        size_t mem_size
        void *mem_buffer
        c_bool no_alloc

# What bmoe calls in ggml, resolved once from the libraries that llama_cpp has loaded.
cdef struct Ggml:
    void *(*init)(bm_init_params) noexcept nogil
    void (*free)(void *) noexcept nogil
    size_t (*tensor_overhead)() noexcept nogil
    bm_tensor *(*new_tensor_4d)(void *, int, int64_t, int64_t, int64_t, int64_t) noexcept nogil
    bm_tensor *(*view_1d)(void *, bm_tensor *, int64_t, size_t) noexcept nogil
    bm_tensor *(*mul_mat_id)(void *, bm_tensor *, bm_tensor *, bm_tensor *) noexcept nogil
    bm_tensor *(*custom_4d)(void *, int, int64_t, int64_t, int64_t, int64_t, bm_tensor **, int, bm_custom_fn,
                            int, void *) noexcept nogil
    bm_tensor *(*set_name)(bm_tensor *, const char *) noexcept nogil
    const char *(*get_name)(const bm_tensor *) noexcept nogil
    void *(*get_data)(const bm_tensor *) noexcept nogil
    void (*set_input)(bm_tensor *) noexcept nogil
    size_t (*nbytes)(const bm_tensor *) noexcept nogil
    size_t (*row_size)(int, int64_t) noexcept nogil
    int64_t (*blck_size)(int) noexcept nogil
    size_t (*type_size)(int) noexcept nogil
    const char *(*type_name)(int) noexcept nogil
    const char *(*op_name)(int) noexcept nogil
    int (*unary_op)(const bm_tensor *) noexcept nogil
    const char *(*unary_op_name)(int) noexcept nogil
    const bm_cpu_traits *(*cpu_traits)(int) noexcept nogil
    bm_buft *(*cpu_buft)() noexcept nogil
    void *(*buffer_from_ptr)(void *, size_t) noexcept nogil
    const char *(*buft_name)(bm_buft *) noexcept nogil
    size_t (*buft_alignment)(bm_buft *) noexcept nogil
    c_bool (*buft_is_host)(bm_buft *) noexcept nogil
    # Optional: ggml's tiled kernel for wide batches; NULL where the build has none.
    bm_tiled_id_fn tiled_id
    bm_tiled_wdata_fn tiled_wdata
    # Learned from nodes that the library built.
    int op_mul_mat_id
    int op_custom
    int n_tasks_max

cdef Ggml *ggml() noexcept nogil
