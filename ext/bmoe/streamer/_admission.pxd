from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t

cdef enum:
    WINDOW = 128          # past tokens that vote; a power of two, a multiple of 64
    WORDS = WINDOW // 64
    PROMPT_ROWS = 32      # of a prompt, its last tokens: what decode has used keeps most of the window
    EXP_STEPS = 16        # steps of the exponential's table for one unit
    EXP_MOST = 12         # largest exponent in the table: 32 bits hold every sum of votes
    UNIT = 1 << 20        # a score of 1: every past token that is alike has used it

cdef struct Votes:
    int n_layers
    int n_used            # experts of a row, at most
    int *base             # [n_layers] first of a layer's experts in `users`
    int *n_expert         # [n_layers]
    uint16_t *rows        # [n_layers][WINDOW][n_used] experts of a token in a layer
    unsigned char *length # [n_layers][WINDOW] how many of them
    uint64_t *users       # [sum of n_expert][WORDS] bit p: the token at place p has used it
    int head              # place of the newest token
    int n_tokens          # places in use, the newest last
    int n_batch           # of these, of the batch that runs
    int prompt_left       # tokens of the prompt after this batch; -1 in decode
    # The newest token against the others.
    int32_t alike[WINDOW] # experts that it shares with the token at a place, in the layers so far
    int counted           # its experts in the layers so far
    int weighed           # the same when `weight` was made; -1: for an earlier token
    uint32_t weight[WINDOW]   # of the vote of the token at a place
    uint32_t *votes       # [max of n_expert] sums of weights, of the layer compared last
    int64_t norm          # score = votes * norm >> 20
    # Constants of the policy.
    int sharpness         # exponent of a token with the same routes, in EXP_STEPS
    uint32_t exps[EXP_STEPS * EXP_MOST + 1]
    uint32_t recency[WINDOW]  # [age] share of the plain recency vote, in 1/65536
    int next_weight       # weights of the first and the second token after one that is alike
    int second_weight

cdef int votes_init(Votes *v, list n_expert, int n_used) except -1
cdef void votes_constants(Votes *v, double sharpness, double recency, double second) noexcept
cdef void votes_free(Votes *v) noexcept nogil
# A layer's batch of `n_tok` tokens begins; layer 0 begins new tokens.
cdef void votes_begin(Votes *v, int layer, int n_tok) noexcept nogil
# The `tok`-th of its tokens has routed `expert`.
cdef void votes_note(Votes *v, int layer, int n_tok, int tok, int expert) noexcept nogil
# Compares the newest token with the others by what was noted for this layer, and counts the votes.
cdef void votes_compare(Votes *v, int layer) noexcept nogil
cdef void votes_reject(Votes *v, int n) noexcept nogil


cdef inline int votes_of(Votes *v, int expert) noexcept nogil:
    # The votes for an expert of the layer compared last, in 1/UNIT.
    return <int>((v.votes[expert] * v.norm) >> 20)
