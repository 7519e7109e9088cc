/* Counts allocations, by who asks for them. Preloaded (LD_PRELOAD) into the process that bench/gates/allocations.py drives:
 * calls of malloc and its kin whose return address lies in a registered range of code count with that range. Beside it,
 * a wrapper around CPython's object allocators, which counts the requests of Python objects. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { RANGES = 64 };
static struct { uintptr_t low, high; int who; } ranges[RANGES];
static int n_ranges;
static volatile int counting;
static int64_t counts[RANGES];

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static int (*real_memalign)(void **, size_t, size_t);

/* dlsym itself allocates: served from here until the real functions are known. */
static char early[65536];
static size_t early_used;

static void *early_block(size_t size) {
    size_t at = early_used;
    early_used += (size + 31) & ~(size_t)15;
    if (early_used > sizeof(early)) abort();
    return early + at;
}

static void resolve(void) {
    static int under_way;
    if (under_way) return;
    under_way = 1;
    real_calloc = dlsym(RTLD_NEXT, "calloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_malloc = dlsym(RTLD_NEXT, "malloc");
}

static void note(void *from) {
    if (!counting) return;
    for (int i = 0; i < n_ranges; i++)
        if ((uintptr_t)from - ranges[i].low < ranges[i].high - ranges[i].low)
            __atomic_fetch_add(&counts[ranges[i].who], 1, __ATOMIC_RELAXED);
}

void *malloc(size_t size) {
    if (!real_malloc) resolve();
    note(__builtin_return_address(0));
    return real_malloc ? real_malloc(size) : early_block(size);
}

void *calloc(size_t n, size_t size) {
    if (!real_calloc) resolve();
    note(__builtin_return_address(0));
    return real_calloc ? real_calloc(n, size) : early_block(n * size);
}

void *realloc(void *old, size_t size) {
    if (!real_realloc) resolve();
    note(__builtin_return_address(0));
    if ((char *)old >= early && (char *)old < early + sizeof(early)) abort();
    return real_realloc(old, size);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) resolve();
    note(__builtin_return_address(0));
    return real_memalign(out, alignment, size);
}

void free(void *block) {
    static void (*real_free)(void *);
    if ((char *)block >= early && (char *)block < early + sizeof(early)) return;
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    real_free(block);
}

int bench_add_range(uintptr_t low, uintptr_t high, int who) {
    if (n_ranges == RANGES || who < 0 || who >= RANGES) return -1;
    ranges[n_ranges].low = low;
    ranges[n_ranges].high = high;
    ranges[n_ranges++].who = who;
    return 0;
}

void bench_count(int on) { counting = on; }

int64_t bench_counted(int who) {
    int64_t n = counts[who];
    counts[who] = 0;
    return n;
}

/* ---- CPython's allocators: PyMem_GetAllocator fills one of these, PyMem_SetAllocator takes one --------------------- */

typedef struct {
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} Allocator;

static int64_t python_requests;

static void *py_malloc(void *ctx, size_t size) {
    Allocator *a = ctx;
    python_requests += counting;
    return a->malloc(a->ctx, size);
}

static void *py_calloc(void *ctx, size_t n, size_t size) {
    Allocator *a = ctx;
    python_requests += counting;
    return a->calloc(a->ctx, n, size);
}

static void *py_realloc(void *ctx, void *old, size_t size) {
    Allocator *a = ctx;
    python_requests += counting;
    return a->realloc(a->ctx, old, size);
}

static void py_free(void *ctx, void *block) {
    Allocator *a = ctx;
    a->free(a->ctx, block);
}

/* Makes `wrapper` an allocator that counts what it passes on to `original`, which must stay where it is. */
void bench_wrap(Allocator *original, Allocator *wrapper) {
    *wrapper = (Allocator){original, py_malloc, py_calloc, py_realloc, py_free};
}

int64_t bench_python_requests(void) {
    int64_t n = python_requests;
    python_requests = 0;
    return n;
}
