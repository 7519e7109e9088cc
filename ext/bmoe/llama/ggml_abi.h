/* The part of ggml's binary interface that bmoe reads and writes, as of ggml 0.25 (llama-cpp-python
 * 0.3.36). It is declared here, not included, so that a wheel builds without llama.cpp's headers;
 * bmoe.llama._ggml.check_abi() compares every member used with the running library before anything else
 * runs, and refuses to go on where one differs. */
#ifndef BMOE_GGML_ABI_H
#define BMOE_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BM_MAX_DIMS = 4, BM_MAX_SRC = 10, BM_MAX_NAME = 64, BM_OP_PARAMS = 64 };

typedef struct bm_tensor {
    int type;
    void *buffer;
    int64_t ne[BM_MAX_DIMS]; /* elements */
    size_t nb[BM_MAX_DIMS];  /* strides, bytes */
    int op;
    int32_t op_params[BM_OP_PARAMS / 4];
    int32_t flags;
    struct bm_tensor *src[BM_MAX_SRC];
    struct bm_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[BM_MAX_NAME];
    void *extra;
    char padding[8];
} bm_tensor;

typedef void (*bm_custom_fn)(bm_tensor *dst, int ith, int nth, void *userdata);

/* What ggml_custom_4d stores in op_params. */
typedef struct {
    bm_custom_fn fun;
    int n_tasks;
    void *userdata;
} bm_custom_params;

typedef void (*bm_from_float_fn)(const float *x, void *y, int64_t k);
typedef void (*bm_vec_dot_fn)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by,
                              int nrc);

typedef struct {
    bm_from_float_fn from_float;
    bm_vec_dot_fn vec_dot;
    int vec_dot_type;
    int64_t nrows;
} bm_cpu_traits;

/* The first argument of ggml-cpu's kernels. */
typedef struct {
    int ith, nth;
    size_t wsize;
    void *wdata;
    void *threadpool;
    bool use_ref;
} bm_compute_params;

typedef bool (*bm_tiled_id_fn)(const bm_compute_params *params, bm_tensor *dst, int64_t cur_a, int64_t cne1,
                               const int32_t *expert_rows, char *scratch);
typedef size_t (*bm_tiled_wdata_fn)(int n_tasks, bm_tensor *dst);

typedef struct bm_buft bm_buft;
struct bm_buft {
    const char *(*get_name)(bm_buft *);
    void *(*alloc_buffer)(bm_buft *, size_t size);
    size_t (*get_alignment)(bm_buft *);
    size_t (*get_max_size)(bm_buft *);
    size_t (*get_alloc_size)(bm_buft *, const bm_tensor *);
    bool (*is_host)(bm_buft *);
    void *device;
    void *context;
};

typedef struct {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} bm_init_params;

#endif
