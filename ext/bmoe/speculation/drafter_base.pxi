# What every drafter has: its own copy of the confirmed tokens, the check that the caller's history
# still continues that copy, the Python face, the counters.

ctypedef int32_t tok_t

# How many of the newest known tokens are compared with the caller's history at each step. A history
# that was rewritten anywhere differs there, unless the rewrite kept 64 tokens in a row in their places.
cdef enum:
    TAIL = 64
    MAX_HISTORY = 1 << 28   # positions, and twice as many trie nodes, fit 32 bits

EMPTY = np.empty(0, np.int32)
EMPTY.setflags(write=False)


cdef int list_view(list tokens, Py_buffer* view) except -1:
    """`tokens_view` of a list of ints, which np.asarray would take ten times as long for."""
    cdef Py_ssize_t i, n = len(tokens)
    cdef tok_t* out
    array = np.empty(n, np.int32)
    PyObject_GetBuffer(array, view, PyBUF_ND | PyBUF_WRITABLE)
    try:
        out = <tok_t*>view.buf
        for i in range(n):
            if not PyLong_CheckExact(tokens[i]):
                raise TypeError
            out[i] = tokens[i]
    except (TypeError, OverflowError):
        PyBuffer_Release(view)
        raise
    return 0


cdef int tokens_view(object tokens, Py_buffer* view) except -1:
    """Opens `tokens` as one row of int32; `view` must be released. Anything but int32 is copied first."""
    if isinstance(tokens, np.ndarray):
        PyObject_GetBuffer(tokens, view, PyBUF_FORMAT | PyBUF_STRIDES)
        if (view.ndim == 1 and view.itemsize == 4 and view.format[0] == b"i" and view.format[1] == 0
                and (view.shape[0] < 2 or view.strides[0] == 4)):
            return 0
        PyBuffer_Release(view)
    if isinstance(tokens, list):
        try:
            return list_view(tokens, view)
        except (TypeError, OverflowError):
            pass    # the checks below say what is wrong
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        array = EMPTY
    elif array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, not {array.dtype}")
    elif array.dtype != np.int32 and (array.min() < -2**31 or array.max() >= 2**31):
        raise ValueError("a token id does not fit int32")
    array = np.ascontiguousarray(array, np.int32)
    PyObject_GetBuffer(array, view, PyBUF_SIMPLE | PyBUF_ND)
    return 0


cdef object tokens_array(const tok_t* tokens, Py_ssize_t n):
    """A new int32 array of `n` tokens; the shared empty one if there are none."""
    cdef Py_buffer view
    if n == 0:
        return EMPTY
    array = np.empty(n, np.int32)
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    memcpy(view.buf, tokens, n * sizeof(tok_t))
    PyBuffer_Release(&view)
    return array


cdef inline void* grow(void* block, Py_ssize_t* cap, Py_ssize_t need, size_t item) except NULL nogil:
    """`block` with room for `need` items of `item` bytes, half as much again at each growth."""
    cdef Py_ssize_t room = cap[0]
    if need <= room and block != NULL:
        return block
    room = max(need, room + room // 2, <Py_ssize_t>256)
    block = realloc(block, room * item)
    if block == NULL:
        with gil:
            raise MemoryError("drafter index")
    cap[0] = room
    return block


cdef inline bint same_run(const tok_t* a, const tok_t* b, Py_ssize_t n) noexcept nogil:
    """Whether two runs of `n` >= 1 tokens are equal; most differ at once, at one end or the other."""
    cdef Py_ssize_t k
    if a[0] != b[0] or a[n - 1] != b[n - 1]:
        return False
    for k in range(1, n - 1):
        if a[k] != b[k]:
            return False
    return True


cdef inline Py_ssize_t common_prefix(const tok_t* a, const tok_t* b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k = 0
    while k + 64 <= n and memcmp(a + k, b + k, 64 * sizeof(tok_t)) == 0:
        k += 64
    while k < n and a[k] == b[k]:
        k += 1
    return k


cdef class Drafter:
    """A source of drafts that reads only token ids. Not safe for use from several threads at once.

    All token arrays are one-dimensional, int32 (other integers and sequences are copied). `history` is every
    confirmed token before `last`; it may be a growing view of one buffer, and only what is new is read.
    """

    cdef readonly str name
    cdef readonly bint compat
    cdef tok_t* toks            # the confirmed tokens as last seen, `last` included
    cdef Py_ssize_t n_toks
    cdef Py_ssize_t cap_toks
    cdef tok_t* out             # the draft that propose() made
    cdef Py_ssize_t n_out       # how much of it was handed out and is not yet settled
    cdef int64_t n_calls, n_drafts, n_drafted, n_accepted, n_whole, n_refused, n_restarts

    def __cinit__(self):
        self.toks = NULL
        self.out = NULL

    def __dealloc__(self):
        free(self.toks)
        free(self.out)

    cdef int base_init(self, str name, Py_ssize_t longest, bint compat) except -1:
        self.name = name
        self.compat = compat
        self.toks = <tok_t*>grow(NULL, &self.cap_toks, 256, sizeof(tok_t))
        self.out = <tok_t*>malloc(max(longest, 1) * sizeof(tok_t))
        if self.out == NULL:
            raise MemoryError("drafter index")
        return 0

    # What a kind of drafter defines. Each is called with `toks`/`n_toks` up to date.

    cdef int cut(self, Py_ssize_t keep) except -1 nogil:
        """A new request, or a rewritten history: only the first `keep` known tokens stay; forget the rest."""
        return 0

    cdef int started(self) except -1 nogil:
        """The known tokens are a prompt: index it."""
        return 0

    cdef int diverged(self, const tok_t* history, Py_ssize_t n, Py_ssize_t keep) except -1 nogil:
        """`history` left the known tokens after `keep` of them: go on as if it were a new prompt."""
        self.n_restarts += 1
        return self.c_begin(history, n)

    cdef Py_ssize_t propose(self) except -1 nogil:
        """Writes a draft for what follows the known tokens to `out`; its length, 0 to abstain."""
        return 0

    cdef void settle(self, Py_ssize_t n_accepted) noexcept nogil:
        """The target accepted `n_accepted` of the `n_out` tokens handed out."""

    cdef Py_ssize_t bytes_held(self) noexcept:
        return 0

    # The machinery around them, without the GIL.

    cdef int append(self, const tok_t* tokens, Py_ssize_t n) except -1 nogil:
        if self.n_toks + n >= MAX_HISTORY:
            with gil:
                raise OverflowError(f"a history is limited to {MAX_HISTORY} tokens")
        self.toks = <tok_t*>grow(self.toks, &self.cap_toks, self.n_toks + n + 1, sizeof(tok_t))
        memcpy(self.toks + self.n_toks, tokens, n * sizeof(tok_t))
        self.n_toks += n
        return 0

    cdef int c_begin(self, const tok_t* prompt, Py_ssize_t n) except -1 nogil:
        cdef Py_ssize_t keep = common_prefix(self.toks, prompt, min(n, self.n_toks))
        self.n_out = 0
        self.cut(keep)
        self.n_toks = keep
        self.append(prompt + keep, n - keep)
        return self.started()

    cdef int follow(self, const tok_t* history, Py_ssize_t n, tok_t last) except -1 nogil:
        """Brings the known tokens up to `history` and `last`, noticing a history that was rewritten."""
        cdef Py_ssize_t known = self.n_toks, low = max(known - TAIL, 0), keep
        if known <= n:
            keep = 0 if memcmp(self.toks + low, history + low, (known - low) * sizeof(tok_t)) else known
        elif known == n + 1 and self.toks[n] == last:
            keep = 0 if memcmp(self.toks + low, history + low, (n - low) * sizeof(tok_t)) else known
        else:
            keep = 0
        if keep < known:
            keep = common_prefix(self.toks, history, min(known, n))
            self.diverged(history, n, keep)
        if self.n_toks < n:
            self.append(history + self.n_toks, n - self.n_toks)
        if self.n_toks == n:
            self.append(&last, 1)
        return 0

    cdef Py_ssize_t c_draft(self, const tok_t* history, Py_ssize_t n, tok_t last, Py_ssize_t n_max) except -1 nogil:
        cdef Py_ssize_t k
        self.n_calls += 1
        self.n_out = 0
        if n_max == 0:
            return 0
        self.follow(history, n, last)
        k = self.propose()
        if n_max > 0 and k > n_max:
            k = n_max
        if k > 0:
            self.n_out = k
            self.n_drafts += 1
            self.n_drafted += k
        return k

    cdef void c_accept(self, Py_ssize_t n_accepted, bint is_other) noexcept nogil:
        if self.n_out > 0 and not is_other:
            self.n_accepted += n_accepted
            self.n_whole += n_accepted == self.n_out
            self.n_refused += n_accepted == 0
            self.settle(n_accepted)
        self.n_out = 0

    # The Python face.

    def begin(self, prompt):
        """Starts a request whose prompt is `prompt`: int32[n], n >= 0."""
        cdef Py_buffer view
        tokens_view(prompt, &view)
        try:
            with nogil:
                self.c_begin(<const tok_t*>view.buf, view.shape[0])
        finally:
            PyBuffer_Release(&view)

    def draft(self, history, tok_t last, n_max=None):
        """Tokens expected to follow `history` and `last`: int32[k], k >= 0; empty when it abstains.

        `n_max` (None: the configured length) shortens the draft; 0 asks for none. ValueError for a negative
        `n_max`, and in compat mode where llama.cpp's own drafter would abort.
        """
        cdef Py_buffer view
        cdef Py_ssize_t limit = -1, k
        if n_max is not None:
            limit = n_max
            if limit < 0:
                raise ValueError(f"n_max is {limit}: it must be 0 or more")
        tokens_view(history, &view)
        try:
            # The GIL is kept: a step is shorter than getting it back can be.
            k = self.c_draft(<const tok_t*>view.buf, view.shape[0], last, limit)
        finally:
            PyBuffer_Release(&view)
        return tokens_array(self.out, k)

    def accept(self, Py_ssize_t n_accepted, bint is_other=False):
        """Reports how many tokens of the last draft the target confirmed; `is_other`: of another drafter's.

        Does nothing when this drafter has no draft waiting. ValueError if more were accepted than drafted.
        """
        if n_accepted < 0 or (self.n_out and not is_other and n_accepted > self.n_out):
            raise ValueError(f"{n_accepted} tokens accepted of a draft of {self.n_out}")
        self.c_accept(n_accepted, is_other)

    def trim(self, Py_ssize_t n):
        """The target will verify only the first `n` tokens of the last draft; 0: none of them, as if it had abstained."""
        if n < 0:
            raise ValueError(f"cannot trim a draft to {n} tokens")
        if n < self.n_out:
            self.n_drafted -= self.n_out - n
            self.n_drafts -= n == 0
            self.n_out = n

    def truncate(self, Py_ssize_t n):
        """The history is now its first `n` tokens (no more than it has): go on as after `begin` with those.

        Optional: `draft` notices a history that shrank or changed.
        """
        if n < 0:
            raise ValueError(f"cannot truncate a history to {n} tokens")
        if n < self.n_toks:
            with nogil:
                self.diverged(self.toks, n, n)

    cdef Py_ssize_t evidence(self) noexcept:
        """Tokens by which the last draft was found."""
        return 0

    @property
    def matched(self):
        """Tokens at the history's end by which the last draft was found: what speaks for it."""
        return self.evidence()

    @property
    def nbytes(self):
        """Bytes of memory held by the index and the copy of the history."""
        return self.cap_toks * <Py_ssize_t>sizeof(tok_t) + self.bytes_held()

    @property
    def stats(self):
        """Counts since creation: draft calls, drafts made, tokens drafted and accepted, drafts accepted whole,
        drafts refused whole, histories that shrank or were rewritten without `begin`."""
        return {
            "steps": self.n_calls,
            "drafted_steps": self.n_drafts,
            "drafted": self.n_drafted,
            "accepted": self.n_accepted,
            "accepted_whole": self.n_whole,
            "refused_whole": self.n_refused,
            "restarts": self.n_restarts,
        }

    def __repr__(self):
        return f"<{self.name} drafter, {self.n_toks} tokens known, {self.nbytes} bytes>"
