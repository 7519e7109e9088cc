# cython: language_level=3
"""How likely an expert is to be used by the next token: past tokens vote.

The last `WINDOW` tokens are kept with the experts that they used. While a token runs, each of them is compared
with it: how many experts do they share in the layers so far? Text repeats itself, and tokens alike are followed
by tokens alike, so the tokens that came one and two places after an alike one vote for their own experts. Each
token also has a vote that fades with its age. Whole numbers throughout: the same on every machine.

Cost for a layer's batch: WINDOW weights and WINDOW rows, whatever the number of slots.
"""

from libc.math cimport exp
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from bmoe.streamer._alloc cimport zeroed

cdef extern from *:
    int __builtin_ctzll(unsigned long long) nogil

# The exponential's unit: what a token that shares nothing weighs.
DEF EXP_UNIT = 16
# The comparison is renewed when this part more of the token has been seen: in every layer at first, a few later.
DEF RENEW_PART = 4


cdef int votes_init(Votes *v, list n_expert, int n_used) except -1:
    cdef int i, total = 0
    votes_free(v)
    v.n_layers = len(n_expert)
    v.n_used = max(1, n_used)
    v.prompt_left = -1
    v.base = <int *>zeroed(v.n_layers, sizeof(int))
    v.n_expert = <int *>zeroed(v.n_layers, sizeof(int))
    v.rows = <uint16_t *>zeroed(<size_t>v.n_layers * WINDOW * v.n_used, sizeof(uint16_t))
    v.length = <unsigned char *>zeroed(v.n_layers * WINDOW, 1)
    for i in range(v.n_layers):
        v.base[i] = total
        v.n_expert[i] = n_expert[i]
        total += v.n_expert[i]
    v.users = <uint64_t *>zeroed(<size_t>total * WORDS, sizeof(uint64_t))
    v.votes = <uint32_t *>zeroed(max(n_expert, default=0), sizeof(uint32_t))
    for i in range(EXP_STEPS * EXP_MOST + 1):
        v.exps[i] = <uint32_t>(EXP_UNIT * exp(<double>i / EXP_STEPS) + 0.5)
    return 0


cdef void votes_constants(Votes *v, double sharpness, double recency, double second) noexcept:
    cdef int i
    v.sharpness = <int>(sharpness * EXP_STEPS + 0.5)
    v.next_weight = 4
    v.second_weight = <int>(4 * second + 0.5)
    for i in range(WINDOW):
        v.recency[i] = <uint32_t>(65536 * recency / (i + 1) + 0.5)


cdef void votes_free(Votes *v) noexcept nogil:
    free(v.base)
    free(v.n_expert)
    free(v.rows)
    free(v.length)
    free(v.users)
    free(v.votes)
    memset(v, 0, sizeof(Votes))


cdef void _empty(Votes *v, int layer, int place) noexcept nogil:
    cdef int at = layer * WINDOW + place, i
    cdef uint16_t *row = v.rows + <size_t>at * v.n_used
    for i in range(v.length[at]):
        v.users[(v.base[layer] + row[i]) * WORDS + place // 64] &= ~(<uint64_t>1 << (place & 63))
    v.length[at] = 0


cdef void votes_begin(Votes *v, int layer, int n_tok) noexcept nogil:
    cdef int i, l, keep
    if layer == 0:
        keep = min(n_tok, WINDOW)
        if v.prompt_left >= 0:
            keep = max(0, min(n_tok, PROMPT_ROWS - v.prompt_left))
        for i in range(keep):
            v.head = (v.head + 1) & (WINDOW - 1)
            for l in range(v.n_layers):
                _empty(v, l, v.head)
        v.n_batch = keep
        v.n_tokens = min(v.n_tokens + keep, WINDOW)
        v.counted = 0
        v.weighed = -1
        memset(v.alike, 0, sizeof(v.alike))
    for i in range(min(n_tok, v.n_batch)):
        _empty(v, layer, (v.head - i) & (WINDOW - 1))


cdef void votes_note(Votes *v, int layer, int n_tok, int tok, int expert) noexcept nogil:
    cdef int back = n_tok - 1 - tok, place, at
    if back >= v.n_batch:
        return
    place = (v.head - back) & (WINDOW - 1)
    at = layer * WINDOW + place
    if v.length[at] < v.n_used:
        v.rows[<size_t>at * v.n_used + v.length[at]] = <uint16_t>expert
        v.length[at] += 1
        v.users[(v.base[layer] + expert) * WORDS + place // 64] |= <uint64_t>1 << (place & 63)


cdef void _weigh(Votes *v) noexcept nogil:
    # The weight of each place's vote, from how alike the token one and two places before is to the newest.
    cdef int i, age, most = v.n_tokens
    cdef uint32_t x[WINDOW + 2]
    cdef uint64_t total = 0
    # One layer's worth more than was counted: the first layers alone prove little.
    cdef int scale = (v.sharpness << 20) // max(1, v.counted + v.n_used)
    for age in range(1, most):
        i = (v.alike[(v.head - age) & (WINDOW - 1)] * scale) >> 20
        x[age] = v.exps[min(i, EXP_STEPS * EXP_MOST)]
        total += x[age]
    x[most] = 0
    x[most + 1] = 0
    total = max(total, <uint64_t>EXP_UNIT) * (v.next_weight + v.second_weight)
    for age in range(most):
        v.weight[(v.head - age) & (WINDOW - 1)] = (v.next_weight * x[age + 1] + v.second_weight * x[age + 2]
                                                   + <uint32_t>((total * v.recency[age]) >> 16))
    v.norm = (<int64_t>UNIT << 20) // <int64_t>total
    v.weighed = v.counted


cdef void votes_compare(Votes *v, int layer) noexcept nogil:
    cdef int at = layer * WINDOW + v.head, n = v.length[at], i, j, m
    cdef uint16_t *row = v.rows + <size_t>at * v.n_used
    cdef int32_t *alike = v.alike
    cdef uint32_t *votes = v.votes
    cdef uint64_t bits
    cdef uint64_t *users
    cdef uint32_t w
    for i in range(n):
        users = v.users + <size_t>(v.base[layer] + row[i]) * WORDS
        for j in range(WORDS):
            bits = users[j]
            while bits != 0:
                alike[j * 64 + __builtin_ctzll(bits)] += 1
                bits &= bits - 1
    v.counted += n
    # A new token, or a quarter more to judge by.
    if v.weighed < 0 or v.counted * RENEW_PART >= v.weighed * (RENEW_PART + 1):
        _weigh(v)
    memset(votes, 0, sizeof(uint32_t) * v.n_expert[layer])
    # A place that is not in use has an empty row.
    for i in range(WINDOW):
        at = layer * WINDOW + i
        row = v.rows + <size_t>at * v.n_used
        w = v.weight[i]
        m = v.length[at]
        for j in range(m):
            votes[row[j]] += w


cdef void votes_reject(Votes *v, int n) noexcept nogil:
    cdef int i, l
    for i in range(min(n, v.n_batch)):
        for l in range(v.n_layers):
            _empty(v, l, v.head)
        v.head = (v.head - 1) & (WINDOW - 1)
        v.n_tokens -= 1
        v.n_batch -= 1
