/* Index of the largest of n floats, the first of equals; NaN never wins. */
#ifndef BMOE_ARGMAX_H
#define BMOE_ARGMAX_H

#include <math.h>

/* The maximum of 64 floats; associative math lets the compiler use vector instructions. */
__attribute__((optimize("O3,associative-math,no-signed-zeros,no-trapping-math,finite-math-only")))
static float bm_max64(const float *x) {
    float m[16];
    for (int j = 0; j < 16; j++) m[j] = x[j];
    for (int i = 16; i < 64; i += 16)
        for (int j = 0; j < 16; j++) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
    for (int w = 8; w > 0; w /= 2)
        for (int j = 0; j < w; j++) m[j] = m[j + w] > m[j] ? m[j + w] : m[j];
    return m[0];
}

static int bm_argmax(const float *x, int n) {
    float best = -INFINITY;
    int at = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        if (bm_max64(x + i) > best) {
            for (int j = i; j < i + 64; j++)
                if (x[j] > best) { best = x[j]; at = j; }
        }
    }
    for (; i < n; i++)
        if (x[i] > best) { best = x[i]; at = i; }
    return at;
}

#endif
