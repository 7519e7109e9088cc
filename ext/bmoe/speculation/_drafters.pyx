"""The model-free drafters: token ids in, token ids out; no model, no llama.cpp.

Each class is a `Drafter`: `begin(prompt)`, `draft(history, last, n_max=None)`, `accept(n_accepted)`.
`bmoe.drafting` checks configurations and puts several of them in order; tests/support/reference_drafters.py says in
plain Python what each must draft.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.buffer cimport PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

import numpy as np

include "drafter_base.pxi"
include "ngram_trie.pxi"
include "ngram_chain.pxi"
include "ngram_map.pxi"
include "ngram_mod.pxi"


def replay(Drafter drafter not None, tokens, Py_ssize_t prompt_len):
    """Drafts along a given text, as if the target's output were `tokens[prompt_len:]`: int32[n].

    Returns `(steps, pos, accepted, sizes, drafted)`: how many times it was asked for a draft; per draft made,
    int32[d] each, the index of the last confirmed token, the tokens accepted and the tokens drafted; and all
    drafts one after the other, int32[sum(sizes)]. The driver is the one of the shared reference runs.
    """
    cdef Py_buffer view
    cdef const tok_t* text
    cdef tok_t* rows = NULL         # pos, accepted, size of each draft
    cdef tok_t* drafted = NULL
    cdef Py_ssize_t n_rows = 0, cap_rows = 0, n_drafted = 0, cap_drafted = 0
    cdef Py_ssize_t n, pos = prompt_len, steps = 0, size, accepted
    tokens_view(tokens, &view)
    try:
        text, n = <const tok_t*>view.buf, view.shape[0]
        if prompt_len < 0 or prompt_len > n:
            raise ValueError(f"prompt_len is {prompt_len}: the text has {n} tokens")
        with nogil:
            drafter.c_begin(text, pos)
            while pos + 1 < n:
                size = drafter.c_draft(text, pos, text[pos], -1)
                steps += 1
                accepted = 0
                if size > 0:
                    accepted = common_prefix(drafter.out, text + pos + 1, min(size, n - pos - 1))
                    drafter.c_accept(accepted, False)
                    rows = <tok_t*>grow(rows, &cap_rows, n_rows + 3, sizeof(tok_t))
                    rows[n_rows], rows[n_rows + 1], rows[n_rows + 2] = <tok_t>pos, <tok_t>accepted, <tok_t>size
                    n_rows += 3
                    drafted = <tok_t*>grow(drafted, &cap_drafted, n_drafted + size, sizeof(tok_t))
                    memcpy(drafted + n_drafted, drafter.out, size * sizeof(tok_t))
                    n_drafted += size
                pos += 1 + accepted
        table = tokens_array(rows, n_rows).reshape(-1, 3)
        return steps, table[:, 0], table[:, 1], table[:, 2], tokens_array(drafted, n_drafted)
    finally:
        PyBuffer_Release(&view)
        free(rows)
        free(drafted)
