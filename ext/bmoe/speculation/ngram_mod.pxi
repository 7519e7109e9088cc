# `ngram-mod`, after llama.cpp common/ngram-mod and the driver logic in common/speculative.

cdef extern from *:
    """
    /* The multiplier of llama.cpp's rolling hash (common/ngram-mod), Knuth's MMIX LCG. */
    #define NGRAM_MMIX ((uint64_t) 6364136223846793005u)

    #include <stdlib.h>
    #include <sys/mman.h>

    #define NGRAM_PREFETCH(address) __builtin_prefetch((address), 1)

    /* Memory for a table that is read at random, in huge pages if it is large and the kernel has them. */
    static void * ngram_table(size_t bytes) {
        const size_t huge = (size_t) 2 << 20;
        void * block = NULL;
        if (bytes < huge) {
            return malloc(bytes);
        }
        if (posix_memalign(&block, huge, (bytes + huge - 1) / huge * huge) != 0) {
            return NULL;
        }
    #ifdef MADV_HUGEPAGE
        madvise(block, (bytes + huge - 1) / huge * huge, MADV_HUGEPAGE);
    #endif
        return block;
    }
    """
    const uint64_t MMIX "NGRAM_MMIX"
    void* ngram_table(size_t size) nogil
    void prefetch_write "NGRAM_PREFETCH"(const void* address) noexcept nogil

cdef enum:
    MOD_LAG = 32            # new n-grams are added once more than this many tokens are new
    MOD_AHEAD = 16          # n-grams between asking for a slot and writing to it
    MOD_LOW_ROUNDS = 5      # poor drafts in a row before the table is reset

cdef double MOD_LOW = 0.25      # a draft is poor if less than this part of it was accepted
cdef double MOD_FULL = 0.25     # the table is reset after a prompt that leaves more than this part of it used


cdef class NgramMod(Drafter):
    """`ngram-mod`: a hash table from n-gram to next token, walked from token to token for up to `n_max` tokens.

    `n_match` tokens are hashed to one of `table_size` slots, whose token is the last one written; n-grams that
    share a slot answer for each other. Abstains when an empty slot comes before `n_min` tokens.

    By default the table holds the n-grams of the current request. compat: also those of earlier requests, until
    a prompt leaves more than a quarter of it used, or five drafts in a row were accepted by less than a quarter;
    then everything is dropped.
    """

    cdef Py_ssize_t n_match, n_min, n_max
    cdef uint64_t size, mask    # mask: size - 1 if size is a power of two, else 0
    cdef tok_t* slots           # the token after the n-gram, -1 for none
    cdef uint64_t drop          # MMIX ** n_match, to take the oldest token out of a rolling hash
    cdef Py_ssize_t n_added     # the next position to add
    cdef uint64_t add_hash      # hash of the n-gram at add_at, if add_at >= 0
    cdef Py_ssize_t add_at
    cdef uint64_t used
    cdef uint32_t* filled       # the slots filled since the last reset, so that a reset need not touch all
    cdef Py_ssize_t n_filled, cap_filled
    cdef bint filled_all        # too many were filled to be listed
    cdef Py_ssize_t n_draft     # length of the last draft before n_max of the call shortened it
    cdef int n_low              # poor drafts in a row
    cdef bint catch_up          # add what is new at the next draft, however little

    def __cinit__(self, *, Py_ssize_t n_match=24, Py_ssize_t n_min=48, Py_ssize_t n_max=64,
                  Py_ssize_t table_size=4194304, bint compat=False):
        cdef Py_ssize_t i
        self.n_match, self.n_min, self.n_max = n_match, n_min, n_max
        self.base_init("ngram-mod", n_max, compat)
        self.size = table_size
        self.mask = table_size - 1 if table_size & (table_size - 1) == 0 else 0
        self.slots = <tok_t*>ngram_table(self.table_bytes())
        if self.slots == NULL:
            raise MemoryError("drafter table")
        memset(self.slots, 0xFF, self.table_bytes())
        self.drop = 1
        for i in range(n_match):
            self.drop *= MMIX
        self.add_at = -1

    def __dealloc__(self):
        free(self.slots)
        free(self.filled)

    cdef Py_ssize_t table_bytes(self) noexcept nogil:
        return <Py_ssize_t>self.size * <Py_ssize_t>sizeof(tok_t)

    cdef Py_ssize_t bytes_held(self) noexcept:
        return self.table_bytes() + self.cap_filled * <Py_ssize_t>sizeof(uint32_t)

    cdef inline uint64_t slot_of(self, uint64_t h) noexcept nogil:
        return h & self.mask if self.mask else h % self.size

    cdef inline uint64_t hash_at(self, Py_ssize_t p) noexcept nogil:
        cdef uint64_t h = 0
        cdef Py_ssize_t i
        for i in range(p, p + self.n_match):
            h = h * MMIX + <uint64_t><int64_t>self.toks[i]
        return h

    cdef inline uint64_t rolled(self, uint64_t h, tok_t oldest, tok_t newest) noexcept nogil:
        return h * MMIX - <uint64_t><int64_t>oldest * self.drop + <uint64_t><int64_t>newest

    cdef void reset(self) noexcept nogil:
        cdef Py_ssize_t i
        if self.filled_all:
            memset(self.slots, 0xFF, self.table_bytes())
        else:
            for i in range(self.n_filled):
                self.slots[self.filled[i]] = -1
        self.n_filled = 0
        self.filled_all = False
        self.used = 0

    cdef int add(self, Py_ssize_t end) except -1 nogil:
        """Adds the n-grams from `n_added` to before `end`, each with the token after it."""
        cdef Py_ssize_t p = self.n_added, n = self.n_match, q
        cdef uint64_t h, ahead
        cdef tok_t* slot
        if p >= end:
            return 0
        if not self.filled_all:
            if self.n_filled + end - p > <Py_ssize_t>self.size // 16:
                self.filled_all = True
            else:
                self.filled = <uint32_t*>grow(self.filled, &self.cap_filled, self.n_filled + end - p, sizeof(uint32_t))
        h = self.add_hash if self.add_at == p else self.hash_at(p)
        ahead, q = h, p
        while p < end:
            # The slots are all over the table: ask for each some n-grams before it is needed.
            while q < end and q < p + MOD_AHEAD:
                prefetch_write(self.slots + self.slot_of(ahead))
                ahead = self.rolled(ahead, self.toks[q], self.toks[q + n])
                q += 1
            slot = self.slots + self.slot_of(h)
            if slot[0] == -1:
                self.used += 1
                if not self.filled_all:
                    self.filled[self.n_filled] = <uint32_t>(slot - self.slots)
                    self.n_filled += 1
            slot[0] = self.toks[p + n]
            h = self.rolled(h, self.toks[p], self.toks[p + n])
            p += 1
        self.add_hash, self.add_at = h, end
        return 0

    cdef int c_begin(self, const tok_t* prompt, Py_ssize_t n) except -1 nogil:
        self.n_draft = 0
        if not self.compat:
            self.n_low = 0
            self.catch_up = False
            self.reset()
        self.n_added = 0
        self.add_at = -1
        return Drafter.c_begin(self, prompt, n)

    cdef int started(self) except -1 nogil:
        cdef Py_ssize_t end = self.n_toks - self.n_match
        if end < 0:
            return 0
        self.add(end)
        self.n_added = end
        if self.compat and <double>self.used / <double>self.size > MOD_FULL:
            self.reset()
        return 0

    cdef int diverged(self, const tok_t* history, Py_ssize_t n, Py_ssize_t keep) except -1 nogil:
        if not self.compat:
            return Drafter.diverged(self, history, n, keep)
        if self.add_at + self.n_match > keep:
            self.add_at = -1
        self.n_toks = keep
        return 0

    cdef Py_ssize_t evidence(self) noexcept:
        return self.n_match

    cdef Py_ssize_t propose(self) except -1 nogil:
        cdef Py_ssize_t n = self.n_match, cur = self.n_toks - 1     # llama.cpp's history does not hold the last token
        cdef Py_ssize_t k
        cdef uint64_t h
        cdef tok_t token
        cdef const tok_t* window = self.toks + self.n_toks - n
        self.n_draft = 0
        if cur < n:
            return 0
        if self.n_added + MOD_LAG < cur or (self.catch_up and cur > MOD_LAG):
            self.add(cur - n)
            self.n_added = cur - n
            self.catch_up = False
        h = self.hash_at(self.n_toks - n)
        for k in range(self.n_max):
            token = self.slots[self.slot_of(h)]
            if token == -1:
                if k < self.n_min:
                    return 0
                self.n_draft = k
                return k
            self.out[k] = token
            h = self.rolled(h, window[k] if k < n else self.out[k - n], token)
        self.n_draft = self.n_max
        return self.n_max

    cdef void settle(self, Py_ssize_t n_accepted) noexcept nogil:
        # llama.cpp measures against the draft before the caller's limit shortened it.
        cdef Py_ssize_t drafted = self.n_draft if self.compat else self.n_out
        if n_accepted >= MOD_LOW * drafted:
            self.n_low = 0
            return
        self.n_low += 1
        if self.n_low < MOD_LOW_ROUNDS:
            return
        self.n_low = 0
        if self.compat:
            self.reset()
            self.n_added = 0
            self.add_at = -1
        else:
            # A reset would be followed by adding the whole history again, in the same order: the same table
            # but for what is still lagging.
            self.catch_up = True
