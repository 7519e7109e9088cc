/* Plain references for the gates, compiled at the start of a session with the flags of the extensions, and marks for
 * callgrind. They do the same job as bmoe's code, in the most direct way, and are checked against it for equal results. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define MARKS 1
#endif
#endif
#ifndef MARKS
#define MARKS 0
#endif

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* What is counted stands in functions of its own, called from here: callgrind loses track of the call that ctypes makes. */
#define COUNTED static __attribute__((noinline))

/* ---- drafting: the last place where the newest n tokens stood before, by a hash table with chains ---------------- */

static uint32_t hash(const int32_t *t, int n, int bits) {
    uint64_t h = 0;
    for (int i = 0; i < n; i++) h = (h + (uint32_t)t[i]) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> (64 - bits));
}

/* Drafts along a text as bmoe.speculation._drafters.replay does, up to m tokens after the last earlier occurrence of the newest n.
 * out: steps, drafts, tokens drafted, tokens accepted. Returns 0, or -1 where memory is short. */
COUNTED int drafter(const int32_t *text, int64_t n_text, int64_t prompt, int n, int m, int64_t out[4]) {
    enum { BITS = 18 };
    int32_t *head = malloc(sizeof(int32_t) << BITS), *prev = malloc(sizeof(int32_t) * n_text);
    int32_t draft[1024];
    int64_t added = 0, pos = prompt;
    memset(out, 0, 4 * sizeof(int64_t));
    if (!head || !prev) { free(head); free(prev); return -1; }
    memset(head, 0xff, sizeof(int32_t) << BITS);
    while (pos + 1 < n_text) {
        int64_t len = pos + 1, found = -1, k = 0, accepted = 0;
        for (; added + n < len; added++) {
            uint32_t h = hash(text + added, n, BITS);
            prev[added] = head[h];
            head[h] = (int32_t)added;
        }
        if (len > n) {
            found = head[hash(text + len - n, n, BITS)];
            while (found >= 0 && memcmp(text + found, text + len - n, n * sizeof(int32_t))) found = prev[found];
        }
        if (found >= 0) {
            k = len - found - n < m ? len - found - n : m;
            if (k < (n < m ? n : m)) k = 0;
            memcpy(draft, text + found + n, k * sizeof(int32_t));
        }
        out[0]++;
        if (k) {
            while (accepted < k && pos + 1 + accepted < n_text && draft[accepted] == text[pos + 1 + accepted]) accepted++;
            out[1]++;
            out[2] += k;
            out[3] += accepted;
        }
        pos += 1 + accepted;
    }
    free(head);
    free(prev);
    return 0;
}

int plain_drafter(const int32_t *text, int64_t n_text, int64_t prompt, int n, int m, int64_t out[4]) {
    return drafter(text, n_text, prompt, n, m, out) ? -1 : 0;
}

/* ---- the plan of a layer: hits, misses, victims -------------------------------------------------------------------- */

typedef struct { int key, prev, next, pin; } Slot;

static void to_front(Slot *s, int *head, int *tail, int i) {
    if (*head == i) return;
    s[s[i].prev].next = s[i].next;
    if (s[i].next >= 0) s[s[i].next].prev = s[i].prev; else *tail = s[i].prev;
    s[i].prev = -1;
    s[i].next = *head;
    s[*head].prev = i;
    *head = i;
}

/* Least recently used over batches of one token: rows of `layer, k experts`. out: hits, misses, evictions.
 * Returns the nanoseconds of the batches alone, or -1. */
COUNTED int64_t lru(const int32_t *rows, int n_rows, int k, int n_layers, int n_expert, int n_slots, int64_t out[3]) {
    int *table = malloc(sizeof(int) * n_layers * n_expert);
    Slot *s = malloc(sizeof(Slot) * n_slots);
    int head = 0, tail = n_slots - 1;
    int64_t t0;
    memset(out, 0, 3 * sizeof(int64_t));
    if (!table || !s) { free(table); free(s); return -1; }
    memset(table, 0xff, sizeof(int) * n_layers * n_expert);
    for (int i = 0; i < n_slots; i++) s[i] = (Slot){-1, i - 1, i + 1 < n_slots ? i + 1 : -1, -1};
    t0 = now_ns();
    for (int r = 0; r < n_rows; r++) {
        const int32_t *row = rows + r * (k + 1);
        int *at = table + row[0] * n_expert;
        for (int j = 1; j <= k; j++)
            if (at[row[j]] >= 0) { s[at[row[j]]].pin = r; out[0]++; }
        for (int j = 1; j <= k; j++) {
            int v = tail;
            if (at[row[j]] >= 0) continue;
            out[1]++;
            while (v >= 0 && s[v].pin == r) v = s[v].prev;
            if (v < 0) continue;
            if (s[v].key >= 0) { table[s[v].key] = -1; out[2]++; }
            s[v].key = row[0] * n_expert + row[j];
            s[v].pin = r;
            at[row[j]] = v;
            to_front(s, &head, &tail, v);
        }
        for (int j = k; j >= 1; j--)
            if (at[row[j]] >= 0) to_front(s, &head, &tail, at[row[j]]);
    }
    t0 = now_ns() - t0;
    free(table);
    free(s);
    return t0;
}

int64_t plain_lru(const int32_t *rows, int n_rows, int k, int n_layers, int n_expert, int n_slots, int64_t out[3]) {
    int64_t took = lru(rows, n_rows, k, n_layers, n_expert, n_slots, out);
    return took < 0 ? -1 : took;
}

/* A policy of the kind of "votes", in its simplest form: the last 128 tokens of a layer vote for their experts, each by
 * its age, and the resident expert with the fewest votes goes. Same arguments as plain_lru. */
COUNTED int64_t votes(const int32_t *rows, int n_rows, int k, int n_layers, int n_expert, int n_slots, int64_t out[3]) {
    enum { WINDOW = 128 };
    uint16_t *past = calloc((size_t)n_layers * WINDOW * k, sizeof(uint16_t));
    int *count = calloc(n_layers, sizeof(int)), *table = malloc(sizeof(int) * n_layers * n_expert);
    int *key = malloc(sizeof(int) * n_slots), *pin = malloc(sizeof(int) * n_slots);
    uint32_t *score = malloc(sizeof(uint32_t) * n_slots), *votes = malloc(sizeof(uint32_t) * n_expert);
    uint32_t weight[WINDOW];
    int64_t t0 = -1;
    memset(out, 0, 3 * sizeof(int64_t));
    for (int i = 0; i < WINDOW; i++) weight[i] = 65536u / (1 + i);
    if (past && count && table && key && pin && score && votes) {
        memset(table, 0xff, sizeof(int) * n_layers * n_expert);
        memset(key, 0xff, sizeof(int) * n_slots);
        memset(score, 0, sizeof(uint32_t) * n_slots);
        memset(pin, 0xff, sizeof(int) * n_slots);
        t0 = now_ns();
        for (int r = 0; r < n_rows; r++) {
            const int32_t *row = rows + r * (k + 1);
            int layer = row[0], *at = table + layer * n_expert;
            uint16_t *mine = past + (size_t)layer * WINDOW * k;
            for (int j = 0; j < k; j++) mine[(count[layer] % WINDOW) * k + j] = (uint16_t)row[1 + j];
            count[layer]++;
            memset(votes, 0, sizeof(uint32_t) * n_expert);
            for (int i = 0; i < WINDOW; i++)
                for (int j = 0; j < k; j++)
                    votes[mine[i * k + j]] += weight[(count[layer] - 1 - i) & (WINDOW - 1)];
            for (int e = 0; e < n_expert; e++)
                if (at[e] >= 0) score[at[e]] = votes[e];
            for (int j = 1; j <= k; j++)
                if (at[row[j]] >= 0) { pin[at[row[j]]] = r; out[0]++; }
            for (int j = 1; j <= k; j++) {
                int v = -1;
                if (at[row[j]] >= 0) continue;
                out[1]++;
                for (int i = 0; i < n_slots; i++)
                    if (pin[i] != r && (v < 0 || score[i] < score[v])) v = i;
                if (v < 0) continue;
                if (key[v] >= 0) { table[key[v]] = -1; out[2]++; }
                key[v] = layer * n_expert + row[j];
                pin[v] = r;
                score[v] = votes[row[j]];
                at[row[j]] = v;
            }
        }
        t0 = now_ns() - t0;
    }
    free(past); free(count); free(table); free(key); free(pin); free(score); free(votes);
    return t0;
}

int64_t plain_votes(const int32_t *rows, int n_rows, int k, int n_layers, int n_expert, int n_slots, int64_t out[3]) {
    int64_t took = votes(rows, n_rows, k, n_layers, n_expert, n_slots, out);
    return took < 0 ? -1 : took;
}

/* ---- reading: one pread after the other ----------------------------------------------------------------------------- */

/* windows: rows of offset, length, address. Returns 0, or -1 where a read came short. */
int plain_reads(int fd, const int64_t *windows, int n) {
    for (int i = 0; i < n; i++) {
        const int64_t *w = windows + 3 * i;
        for (int64_t got = 0; got < w[1];) {
            ssize_t more = pread(fd, (char *)w[2] + got, w[1] - got, w[0] + got);
            if (more <= 0) return -1;
            got += more;
        }
    }
    return 0;
}

/* ---- callgrind ------------------------------------------------------------------------------------------------------ */

int marks_work(void) {
#if MARKS
    return RUNNING_ON_VALGRIND != 0;
#else
    return 0;
#endif
}

void marks_begin(void) {
#if MARKS
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_ZERO_STATS;
#endif
}

void marks_end(const char *name) {
    (void)name;
#if MARKS
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
#endif
}
