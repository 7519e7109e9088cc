"""A library in front of libllama, for tests of what another layout of ggml gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bmoe.llama import library

CC = shutil.which(os.environ.get("CC", "cc"))

# A library in front of libllama whose functions change one thing each, as $BMOE_SHIM says.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int is(const char *what) { const char *s = getenv("BMOE_SHIM"); return s && !strcmp(s, what); }
#define REAL(type, name, args) ((type (*) args)dlsym(RTLD_NEXT, name))

size_t ggml_tensor_overhead(void) { return REAL(size_t, "ggml_tensor_overhead", (void))() + (is("size") ? 16 : 0); }
char *ggml_new_tensor_4d(void *c, int t, int64_t a, int64_t b, int64_t d, int64_t e) {
    char *x = REAL(char *, "ggml_new_tensor_4d", (void *, int, int64_t, int64_t, int64_t, int64_t))(c, t, a, b, d, e);
    return x + (is("members") ? 8 : 0);
}
const char *ggml_get_name(void *t) { return REAL(char *, "ggml_get_name", (void *))(t) + is("name"); }
void *ggml_get_data(void *t) { return is("data") ? NULL : REAL(void *, "ggml_get_data", (void *))(t); }
const char *ggml_op_name(int op) { return is("ops") ? "NONE" : REAL(char *, "ggml_op_name", (int))(op); }
char *ggml_view_1d(void *c, void *t, int64_t n, size_t at) {
    return REAL(char *, "ggml_view_1d", (void *, void *, int64_t, size_t))(c, t, n, at + (is("views") ? 4 : 0));
}
void *ggml_mul_mat_id(void *c, void *a, void *b, void *ids) {
    void **t = REAL(void *, "ggml_mul_mat_id", (void *, void *, void *, void *))(c, a, b, ids);
    for (int i = 0; is("sources") && i < 40; i++) if (t[i] == ids) t[i] = a;
    return t;
}
void *ggml_custom_4d(void *c, int ty, int64_t p, int64_t q, int64_t r, int64_t s, void **args, int n, void *fun,
                     int tasks, void *user) {
    char *t = REAL(char *, "ggml_custom_4d", (void *, int, int64_t, int64_t, int64_t, int64_t, void **, int, void *,
                   int, void *))(c, ty, p, q, r, s, args, n, fun, tasks, user);
    for (int i = 0; is("params") && i < 256; i += 4) if (*(void **)(t + i) == user) *(void **)(t + i) = NULL;
    return t;
}
const void *ggml_backend_cpu_buffer_type(void) {
    static void *moved[16];
    void *real = REAL(void *, "ggml_backend_cpu_buffer_type", (void))();
    memcpy(moved + 1, real, 8 * sizeof(void *));
    return is("buffers") ? moved : real;
}
static void dot(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc) { *s = 0; }
const void *ggml_get_type_traits_cpu(int type) {
    static void *copy[4];
    memcpy(copy, REAL(void *, "ggml_get_type_traits_cpu", (int))(type), sizeof(copy));
    if (is("kernel")) copy[1] = (void *)dot;
    if (is("kernel type")) copy[2] = (void *)7;
    return copy;
}
"""


def build_shim(folder: Path) -> Path:
    """Compiles it into `folder`; `$BMOE_SHIM` says at run time which one thing it changes."""
    source, shim = folder / "shim.c", folder / "libshim.so"
    source.write_text(SHIM)
    library.check()
    path = Path(library.C._lib._name).resolve()
    build = [str(CC), "-shared", "-fPIC", "-w", "-o", shim, source, "-Wl,--no-as-needed", path, "-ldl"]
    subprocess.run([*build, f"-Wl,-rpath,{path.parent}"], check=True, capture_output=True)
    return shim
