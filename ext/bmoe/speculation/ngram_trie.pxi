# `ngram`: the longest suffix of the history that occurred before, at its most recent place.
#
# A path-compressed trie holds, for every end position e, the tokens before e read backwards
# (toks[e-1], toks[e-2], ...), at most max_match of them. Walking down with the tokens before the
# newest position finds how far any earlier position agrees, which is the longest common suffix; each
# node keeps the newest position below it, which is the place to copy from. The same walk inserts the
# newest position: it adds at most one leaf and one split, and marks the nodes that it passes. What it
# overwrote is logged, so that recent positions can be taken out again, newest first.

cdef struct TrieNode:
    uint32_t label      # the path to this node reads toks[label - 1], toks[label - 2], ...
    uint32_t depth      # ... for `depth` tokens
    uint32_t latest     # the newest end position at or below this node

cdef struct TrieEdge:
    uint32_t parent
    tok_t token         # first token of the edge
    uint32_t child      # 0: free slot (the root is nobody's child)

cdef enum:
    LOG_WORDS = 1 << 19     # newest words of the undo log kept (2 MiB); a cut that needs older ones rebuilds the trie


cdef class Ngram(Drafter):
    """`ngram`: drafts what followed the most recent of the longest earlier matches of the history's end.

    A match is capped at `max_match` tokens, may overlap the end itself, and must have `min_match`; at most
    `n_max` tokens are drafted, clipped at the history's end.
    """

    cdef Py_ssize_t min_match, max_match, n_max
    cdef TrieNode* nodes
    cdef Py_ssize_t n_nodes, cap_nodes
    cdef TrieEdge* edges
    cdef uint32_t edge_mask
    cdef uint32_t* log          # a ring; per position: the old `latest` of the nodes passed, then two words
    cdef Py_ssize_t cap_log     # a power of two, LOG_WORDS at most
    cdef int64_t n_log          # words written, less those undone
    cdef int64_t log_floor      # words below this one have been overwritten
    cdef Py_ssize_t n_done      # end positions inserted: 1 .. n_done
    cdef Py_ssize_t best, source    # length and place of the match of position n_done

    def __cinit__(self, *, Py_ssize_t min_match=3, Py_ssize_t max_match=16, Py_ssize_t n_max=3, bint compat=False):
        self.min_match, self.max_match, self.n_max = min_match, max_match, n_max
        self.base_init("ngram", n_max, compat)
        self.edge_mask = 1023
        self.edges = <TrieEdge*>calloc(self.edge_mask + 1, sizeof(TrieEdge))
        self.nodes = <TrieNode*>grow(NULL, &self.cap_nodes, 256, sizeof(TrieNode))
        self.cap_log = 4096
        self.log = <uint32_t*>malloc(self.cap_log * sizeof(uint32_t))
        if self.edges == NULL or self.log == NULL:
            raise MemoryError("drafter index")
        self.clear()

    def __dealloc__(self):
        free(self.nodes)
        free(self.edges)
        free(self.log)

    cdef Py_ssize_t bytes_held(self) noexcept:
        return (self.cap_nodes * <Py_ssize_t>sizeof(TrieNode) + self.cap_log * <Py_ssize_t>sizeof(uint32_t)
                + (<Py_ssize_t>self.edge_mask + 1) * <Py_ssize_t>sizeof(TrieEdge))

    cdef void clear(self) noexcept nogil:
        memset(self.edges, 0, (<size_t>self.edge_mask + 1) * sizeof(TrieEdge))
        self.nodes[0].label = self.nodes[0].depth = self.nodes[0].latest = 0
        self.n_nodes = 1
        self.n_log = self.n_done = self.log_floor = self.best = self.source = 0

    # Edges: an open-addressed table from (parent, first token) to child, linear probing.

    cdef inline uint32_t edge_home(self, uint32_t parent, tok_t token) noexcept nogil:
        cdef uint64_t key = (<uint64_t>parent << 32) | <uint32_t>token
        key = (key ^ (key >> 32)) * <uint64_t>0x9E3779B97F4A7C15
        return <uint32_t>(key >> 32) & self.edge_mask

    cdef inline TrieEdge* edge(self, uint32_t parent, tok_t token) noexcept nogil:
        """The slot of an edge: its own if there is one, else the free slot where it would go."""
        cdef uint32_t i = self.edge_home(parent, token)
        while self.edges[i].child != 0 and (self.edges[i].parent != parent or self.edges[i].token != token):
            i = (i + 1) & self.edge_mask
        return &self.edges[i]

    cdef inline void edge_put(self, uint32_t parent, tok_t token, uint32_t child) noexcept nogil:
        cdef TrieEdge* slot = self.edge(parent, token)
        slot.parent = parent
        slot.token = token
        slot.child = child

    cdef void edge_drop(self, uint32_t parent, tok_t token) noexcept nogil:
        """Frees an edge's slot, moving later ones of its run up so that probing still finds them."""
        cdef uint32_t hole = <uint32_t>(self.edge(parent, token) - self.edges), i = hole, home
        while True:
            i = (i + 1) & self.edge_mask
            if self.edges[i].child == 0:
                break
            home = self.edge_home(self.edges[i].parent, self.edges[i].token)
            if ((i - home) & self.edge_mask) >= ((i - hole) & self.edge_mask):
                self.edges[hole] = self.edges[i]
                hole = i
        self.edges[hole].child = 0

    cdef int edges_double(self) except -1 nogil:
        cdef TrieEdge* old = self.edges
        cdef Py_ssize_t size = <Py_ssize_t>self.edge_mask + 1, i
        self.edges = <TrieEdge*>calloc(2 * size, sizeof(TrieEdge))
        if self.edges == NULL:
            self.edges = old
            with gil:
                raise MemoryError("drafter index")
        self.edge_mask = <uint32_t>(2 * size - 1)
        for i in range(size):
            if old[i].child != 0:
                self.edge_put(old[i].parent, old[i].token, old[i].child)
        free(old)
        return 0

    cdef inline uint32_t node_new(self, Py_ssize_t label, Py_ssize_t depth, Py_ssize_t latest) noexcept nogil:
        cdef TrieNode* node = &self.nodes[self.n_nodes]
        node.label, node.depth, node.latest = <uint32_t>label, <uint32_t>depth, <uint32_t>latest
        self.n_nodes += 1
        return <uint32_t>(self.n_nodes - 1)

    cdef int insert(self, Py_ssize_t end) except -1 nogil:
        """Matches the tokens before `end` against all earlier positions, then adds `end` to them."""
        cdef const tok_t* text = self.toks
        cdef Py_ssize_t limit = min(end, self.max_match), depth = 0, stop, visits = 0, source = 0, ring
        cdef uint32_t node = 0, child, split = 0, above, leaf = 0
        cdef const tok_t* label
        # Room for the worst case first, so that nothing below can fail half way.
        self.nodes = <TrieNode*>grow(self.nodes, &self.cap_nodes, self.n_nodes + 2, sizeof(TrieNode))
        if self.n_log + limit + 2 - self.log_floor > self.cap_log:
            self.log_room(limit + 2)
        if 2 * (self.n_nodes + 2) > <Py_ssize_t>self.edge_mask:
            self.edges_double()
        ring = self.cap_log - 1
        while depth < limit:
            child = self.edge(node, text[end - 1 - depth]).child
            if child == 0:
                break
            stop = min(<Py_ssize_t>self.nodes[child].depth, limit)
            label = text + self.nodes[child].label - 1
            depth += 1
            while depth < stop and label[-depth] == text[end - 1 - depth]:
                depth += 1
            source = self.nodes[child].latest
            if depth < <Py_ssize_t>self.nodes[child].depth:
                split = child
                break
            node = child
            self.log[(self.n_log + visits) & ring] = <uint32_t>source
            visits += 1
            self.nodes[node].latest = <uint32_t>end
        self.best, self.source = depth, source
        if split != 0:
            above = node
            label = text + self.nodes[split].label - 1
            node = self.node_new(self.nodes[split].label, depth, end)
            self.edge_put(above, label[-<Py_ssize_t>self.nodes[above].depth], node)
            self.edge_put(node, label[-depth], split)
        if depth < limit:
            leaf = self.node_new(end, limit, end)
            self.edge_put(node, text[end - 1 - depth], leaf)
        self.log[(self.n_log + visits) & ring] = split
        self.log[(self.n_log + visits + 1) & ring] = <uint32_t>(2 * visits) | (leaf != 0)
        self.n_log += visits + 2
        self.n_done = end
        return 0

    cdef bint undo(self) noexcept nogil:
        """Takes the newest position out again; false if the log does not reach back to it."""
        cdef const tok_t* text = self.toks
        cdef Py_ssize_t end = self.n_done, ring = self.cap_log - 1, visits, i
        cdef uint32_t word = self.log[(self.n_log - 1) & ring], split = self.log[(self.n_log - 2) & ring]
        cdef uint32_t node = 0, middle
        cdef const tok_t* label
        visits = word >> 1
        if self.n_log - 2 < self.log_floor or self.n_log - 2 - visits < self.log_floor:
            return False
        self.n_log -= visits + 2
        for i in range(visits):
            node = self.edge(node, text[end - 1 - <Py_ssize_t>self.nodes[node].depth]).child
            self.nodes[node].latest = self.log[(self.n_log + i) & ring]
        middle = <uint32_t>(self.n_nodes - 1 - (word & 1)) if split != 0 else node
        if word & 1:
            self.edge_drop(middle, text[end - 1 - <Py_ssize_t>self.nodes[middle].depth])
        if split != 0:
            label = text + self.nodes[split].label - 1
            self.edge_drop(middle, label[-<Py_ssize_t>self.nodes[middle].depth])
            self.edge_put(node, label[-<Py_ssize_t>self.nodes[node].depth], split)
        self.n_nodes -= (split != 0) + (word & 1)
        self.n_done = end - 1
        self.best = self.source = 0
        return True

    cdef int log_room(self, Py_ssize_t words) except -1 nogil:
        """Makes room for `words` more in the log: doubles it up to LOG_WORDS, then gives up the oldest."""
        cdef uint32_t* log
        cdef int64_t i
        while self.n_log + words - self.log_floor > self.cap_log and self.cap_log < LOG_WORDS:
            log = <uint32_t*>malloc(2 * self.cap_log * sizeof(uint32_t))
            if log == NULL:
                with gil:
                    raise MemoryError("drafter index")
            for i in range(self.log_floor, self.n_log):
                log[i & (2 * self.cap_log - 1)] = self.log[i & (self.cap_log - 1)]
            free(self.log)
            self.log, self.cap_log = log, 2 * self.cap_log
        self.log_floor = max(self.log_floor, self.n_log + words - self.cap_log)
        return 0

    cdef int cut(self, Py_ssize_t keep) except -1 nogil:
        if self.n_done <= keep:
            return 0
        # The position `keep` is inserted again by what follows, which finds its match.
        while self.n_done > 0 and self.n_done >= keep:
            if not self.undo():
                self.clear()
        return 0

    cdef int started(self) except -1 nogil:
        while self.n_done < self.n_toks:
            self.insert(self.n_done + 1)
        return 0

    cdef Py_ssize_t evidence(self) noexcept:
        return self.best

    cdef Py_ssize_t propose(self) except -1 nogil:
        cdef Py_ssize_t n
        self.started()
        if self.best < self.min_match:
            return 0
        n = min(self.n_max, self.n_toks - self.source)
        memcpy(self.out, self.toks + self.source, n * sizeof(tok_t))
        return n
