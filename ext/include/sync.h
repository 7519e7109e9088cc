/* Atomics, futexes and a small barrier for threads that must not take the GIL. Linux. */
#ifndef BMOE_SYNC_H
#define BMOE_SYNC_H

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline int bm_load(const int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void bm_store(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline int bm_add(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline int64_t bm_add64(int64_t *p, int64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline int64_t bm_load64(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

static inline void bm_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static inline int64_t bm_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t bm_thread_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* How long a thread that waits for a read yields before it sleeps, ns: longer than most reads take (docs/streaming.md). */
#ifndef BM_YIELD_NS
#define BM_YIELD_NS 2000000
#endif

/* Waits until *p != v without leaving the core's queue, lending the core to whoever else is runnable there; 0 after `ns`.
 * Threads that slept for short waits lost up to a timer tick at each (docs/streaming.md). */
static inline int bm_yield_while(const int *p, int v, int64_t ns) {
    int64_t end = bm_now_ns() + ns;
    do {
        for (int i = 0; i < 16; i++) {
            if (bm_load(p) != v) return 1;
            sched_yield();
        }
    } while (bm_now_ns() < end);
    return 0;
}

/* Sleeps while *p == v; may return early. */
static inline void bm_futex_wait(int *p, int v) {
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, v, (void *)0, (void *)0, 0);
}

static inline void bm_futex_wake_all(int *p) {
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, INT_MAX, (void *)0, (void *)0, 0);
}

/* A spin lock for sections of a few hundred nanoseconds. */
static inline void bm_spin_lock(int *p) {
    int spins = 0;
    while (__atomic_exchange_n(p, 1, __ATOMIC_ACQUIRE)) {
        if (++spins < 64) bm_pause();
        else sched_yield();
    }
}
static inline void bm_spin_unlock(int *p) { bm_store(p, 0); }

typedef struct {
    int arrived;
    int phase;
    int sleepers;
} bm_barrier;

/* All n callers return together; what each wrote before is visible to all after. Spins for a few
 * microseconds (the usual skew between compute threads), then sleeps, so that lanes get the core. */
static inline void bm_barrier_wait(bm_barrier *b, int n) {
    if (n <= 1) return;
    int phase = bm_load(&b->phase);
    if (bm_add(&b->arrived, 1) == n - 1) {
        bm_store(&b->arrived, 0);
        bm_add(&b->phase, 1);
        if (bm_load(&b->sleepers) > 0) bm_futex_wake_all(&b->phase);
        return;
    }
    for (int i = 0; i < 2000; i++) {
        if (bm_load(&b->phase) != phase) return;
        bm_pause();
    }
    bm_add(&b->sleepers, 1);
    while (bm_load(&b->phase) == phase) bm_futex_wait(&b->phase, phase);
    bm_add(&b->sleepers, -1);
}

#endif
