# Where each n-gram of the history occurs, for one n: a hash per position, and a chain through the
# positions of each hash bucket, newest first. Used by `ngram-simple` and `ngram-map-*`.

cdef extern from *:
    """
    /* The multiplier of llama.cpp's n-gram hash (common/ngram-map.cpp), near 2^32 / golden ratio. */
    #define NGRAM_LCG ((uint32_t) 2654435761u)
    """
    const uint32_t LCG_FACTOR "NGRAM_LCG"

cdef struct Chain:
    Py_ssize_t n            # tokens per n-gram
    uint32_t drop           # LCG_FACTOR ** n, to take the oldest token out of a rolling hash
    uint32_t* hash          # hash[p] of the n-gram that starts at p
    Py_ssize_t n_hash, cap_hash
    uint32_t* prev          # prev[p]: 1 + the position before p in its bucket, 0 at the end of the chain
    Py_ssize_t n_link, cap_prev
    uint32_t* head          # per bucket: 1 + the newest position
    int bits                # log2 of the number of buckets


cdef int chain_init(Chain* c, Py_ssize_t n) except -1:
    cdef Py_ssize_t i
    memset(c, 0, sizeof(Chain))
    c.n = n
    c.drop = 1
    for i in range(n):
        c.drop *= LCG_FACTOR
    c.bits = 10
    c.head = <uint32_t*>calloc(1 << c.bits, sizeof(uint32_t))
    if c.head == NULL:
        raise MemoryError("drafter index")
    return 0


cdef void chain_free(Chain* c) noexcept:
    free(c.hash)
    free(c.prev)
    free(c.head)


cdef Py_ssize_t chain_bytes(Chain* c) noexcept:
    return ((c.cap_hash + c.cap_prev) * <Py_ssize_t>sizeof(uint32_t)
            + (<Py_ssize_t>1 << c.bits) * <Py_ssize_t>sizeof(uint32_t))


cdef inline uint32_t chain_bucket(const Chain* c, uint32_t h) noexcept nogil:
    return (h * <uint32_t>0x85EBCA6B) >> (32 - c.bits)


cdef int chain_hash(Chain* c, const tok_t* text, Py_ssize_t n_text) except -1 nogil:
    """Hashes the n-grams that `text` has gained; `text[:n_text]` must continue what was hashed before."""
    cdef Py_ssize_t p = c.n_hash, end = n_text - c.n + 1, k
    cdef uint32_t h
    if end <= p:
        return 0
    c.hash = <uint32_t*>grow(c.hash, &c.cap_hash, end, sizeof(uint32_t))
    if p == 0:
        h = 0
        for k in range(c.n):
            h = h * LCG_FACTOR + <uint32_t>text[k]
        c.hash[0] = h
        p = 1
    h = c.hash[p - 1]
    while p < end:
        h = h * LCG_FACTOR - <uint32_t>text[p - 1] * c.drop + <uint32_t>text[p + c.n - 1]
        c.hash[p] = h
        p += 1
    c.n_hash = end
    return 0


cdef int chain_link(Chain* c, Py_ssize_t end) except -1 nogil:
    """Makes the positions below `end` findable; they must have been hashed."""
    cdef Py_ssize_t p
    cdef uint32_t b
    cdef uint32_t* head
    cdef int bits = c.bits
    if end <= c.n_link:
        return 0
    c.prev = <uint32_t*>grow(c.prev, &c.cap_prev, end, sizeof(uint32_t))
    while end > <Py_ssize_t>1 << bits:
        bits += 1
    if bits > c.bits:
        head = <uint32_t*>calloc(<size_t>1 << bits, sizeof(uint32_t))
        if head == NULL:
            with gil:
                raise MemoryError("drafter index")
        free(c.head)
        c.head, c.bits, c.n_link = head, bits, 0
    for p in range(c.n_link, end):
        b = chain_bucket(c, c.hash[p])
        c.prev[p] = c.head[b]
        c.head[b] = <uint32_t>(p + 1)
    c.n_link = end
    return 0


cdef void chain_cut(Chain* c, Py_ssize_t n_text) noexcept nogil:
    """Forgets every n-gram that reaches past the first `n_text` tokens."""
    cdef Py_ssize_t keep = max(n_text - c.n + 1, 0)
    while c.n_link > keep:
        c.n_link -= 1
        c.head[chain_bucket(c, c.hash[c.n_link])] = c.prev[c.n_link]
    c.n_hash = min(c.n_hash, keep)


cdef inline Py_ssize_t chain_first(const Chain* c, Py_ssize_t key) noexcept nogil:
    """The first link of the chain in which the n-gram at `key` is; links are 1 + a position, 0 for none."""
    return c.head[chain_bucket(c, c.hash[key])]


cdef inline Py_ssize_t chain_find(const Chain* c, const tok_t* text, Py_ssize_t key, Py_ssize_t below,
                                  Py_ssize_t link) noexcept nogil:
    """The newest occurrence of the n-gram at `key` before position `below`, from `link` on; -1 if none.

    Go on from there with `link = c.prev[occurrence]`.
    """
    cdef uint32_t h = c.hash[key]
    while link != 0:
        if c.hash[link - 1] == h and link <= below and same_run(text + link - 1, text + key, c.n):
            return link - 1
        link = c.prev[link - 1]
    return -1


cdef class NgramSimple(Drafter):
    """`ngram-simple`: the most recent earlier occurrence of the last `size_n` tokens; drafts the `size_m` after it.

    Abstains if fewer than `size_n` (or `size_m`, if less) tokens follow that occurrence, as llama.cpp does.
    compat: llama.cpp common/ngram-map, which also passes over the history's first position and the occurrence
    one token back, wants more than size_n + size_m + 1 tokens of history, and ignores `min_hits`.
    """

    cdef Py_ssize_t size_n, size_m, min_hits
    cdef Chain chain

    def __cinit__(self, *, Py_ssize_t size_n=12, Py_ssize_t size_m=48, Py_ssize_t min_hits=1, bint compat=False):
        self.size_n, self.size_m, self.min_hits = size_n, size_m, min_hits
        self.base_init("ngram-simple", size_m, compat)
        chain_init(&self.chain, size_n)

    def __dealloc__(self):
        chain_free(&self.chain)

    cdef Py_ssize_t bytes_held(self) noexcept:
        return chain_bytes(&self.chain)

    cdef int cut(self, Py_ssize_t keep) except -1 nogil:
        chain_cut(&self.chain, keep)
        return 0

    cdef int started(self) except -1 nogil:
        chain_hash(&self.chain, self.toks, self.n_toks)
        return chain_link(&self.chain, self.chain.n_hash)

    cdef Py_ssize_t evidence(self) noexcept:
        return self.size_n

    cdef Py_ssize_t propose(self) except -1 nogil:
        # llama.cpp looks at the history without its last token, and starts one position further back.
        cdef Py_ssize_t n = self.size_n, end = self.n_toks - self.compat, key = self.n_toks - n
        cdef Py_ssize_t p, older, hits = 1, size
        if end - n < 1 or (self.compat and end <= n + self.size_m + 1):
            return 0
        self.started()
        p = chain_find(&self.chain, self.toks, key, end - n, chain_first(&self.chain, key))
        if p < 0 or (self.compat and p == 0):
            return 0
        if not self.compat:
            older = p
            while hits < self.min_hits:
                older = chain_find(&self.chain, self.toks, key, end - n, self.chain.prev[older])
                if older < 0:
                    return 0
                hits += 1
        size = min(self.size_m, end - (p + n))
        if size < (n if self.compat else min(n, self.size_m)):
            return 0
        memcpy(self.out, self.toks + p + n, size * sizeof(tok_t))
        return size
