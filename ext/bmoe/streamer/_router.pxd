from libc.stdint cimport int32_t, int64_t

from bmoe.llama._ggml cimport bm_tensor

cdef enum:
    ROUTER_OPS = 6

cdef struct Router:       # how one layer turns its router's input into chosen experts, read off a graph
    int graph             # the graph in which it was seen last
    int state             # 0: not seen yet; 1: can be reproduced; -1: cannot
    bm_tensor *w          # [n_embd, n_expert], a weight of the file
    bm_tensor *x          # [n_embd, n_tokens], the router's input in the graph that was walked last
    int alive             # x is the experts' input as well, hence still there when they run
    int n_embd
    int n_expert
    int n_used
    int n_ops             # from the product to the scores that are sorted
    int op[ROUTER_OPS]
    bm_tensor *arg[ROUTER_OPS]
    int n_groups          # 1: no groups
    int n_group_used

# Reads the router off the graph, from the experts that it chose (`ids`) back to its product. `input`: the experts'.
cdef void router_walk(Router *r, bm_tensor *ids, bm_tensor *input) noexcept nogil
# Scratch that `router_top` needs, bytes.
cdef int64_t router_scratch(const Router *r) noexcept nogil
# What the router chooses for one row of input, best first: n_used experts in `out`, and in `share` what part of the
# sum of their weights each has. `x`: float32 [n_embd].
cdef void router_top(const Router *r, const float *x, char *scratch, int *out, float *share) noexcept nogil
