# `ngram-map-k` and `ngram-map-k4v`, after llama.cpp common/ngram-map.

cdef enum:
    MAP_SLOTS = 262144          # COMMON_NGRAM_HASH_MAP_SIZE
    MAP_VALUES = 4              # COMMON_NGRAM_MAX_VALUES
    MAP_COUNT_MAX = 16380       # COMMON_NGRAM_MAX_VALUE_COUNT

cdef struct MapValue:
    uint32_t at             # where the value's tokens are; 0: no value
    uint16_t count          # how often it was seen after the key
    int16_t limit           # how many of its tokens may be drafted

cdef struct MapKey:
    uint32_t at             # where the key's tokens are
    uint32_t counted        # the values have been counted up to this occurrence
    uint16_t hits           # how often the key was looked up and found
    MapValue values[MAP_VALUES]


cdef class NgramMap(Drafter):
    """`ngram-map-k` (`four_values` off): drafts the `size_m` tokens that followed an earlier occurrence of the
    last `size_n`. `ngram-map-k4v` (on): counts up to four different continuations, and drafts only when one was
    seen at least twice as often as the others together.

    The occurrence is the first that the slot table took for the key, as in llama.cpp. Each continuation's draft
    is limited by what the target accepted of it: by default a draft refused whole leaves a limit of one token and
    one accepted whole doubles it; compat keeps the last accepted count, 0 included. compat also carries what it
    learnt over into the next request, ignores `min_hits` without four_values, and raises ValueError where
    llama.cpp aborts because the history shrank.
    """

    cdef Py_ssize_t size_n, size_m, min_hits
    cdef bint four_values
    cdef Chain chain            # hashes; linked only where occurrences have to be enumerated
    cdef uint32_t* slots        # per hash: the position of an n-gram, 0 for none; the first one stays
    cdef Py_ssize_t slots_last  # the slots have seen the positions up to this one
    cdef Py_ssize_t n_begin     # tokens of the prompt
    cdef Py_ssize_t n_checked   # history at the last lookup
    cdef bint slots_mixed       # compat: slots may hold positions of a text that is gone
    cdef MapKey* keys
    cdef Py_ssize_t n_keys, cap_keys
    cdef uint32_t* key_ids      # open-addressed: 1 + index into keys, by the key's hash
    cdef Py_ssize_t key_ids_size
    cdef bint key_ids_stale     # compat: the tokens under the keys have changed
    cdef uint32_t* found        # scratch: occurrences to count, newest first
    cdef Py_ssize_t cap_found
    cdef MapKey* drafted_key    # whose value the last draft used; NULL for none
    cdef int drafted_value

    def __cinit__(self, *, Py_ssize_t size_n=12, Py_ssize_t size_m=48, Py_ssize_t min_hits=1,
                  bint four_values=False, bint compat=False):
        self.size_n, self.size_m, self.min_hits = size_n, size_m, min_hits
        self.four_values = four_values
        self.base_init("ngram-map-k4v" if four_values else "ngram-map-k", size_m, compat)
        chain_init(&self.chain, size_n)
        self.key_ids_size = 256
        self.key_ids = <uint32_t*>calloc(self.key_ids_size, sizeof(uint32_t))
        self.slots = <uint32_t*>calloc(MAP_SLOTS, sizeof(uint32_t))
        if self.key_ids == NULL or self.slots == NULL:
            raise MemoryError("drafter index")

    def __dealloc__(self):
        chain_free(&self.chain)
        free(self.slots)
        free(self.keys)
        free(self.key_ids)
        free(self.found)

    cdef Py_ssize_t bytes_held(self) noexcept:
        return (chain_bytes(&self.chain) + self.cap_keys * <Py_ssize_t>sizeof(MapKey)
                + (MAP_SLOTS + self.key_ids_size + self.cap_found) * <Py_ssize_t>sizeof(uint32_t))

    # A new request.

    cdef int c_begin(self, const tok_t* prompt, Py_ssize_t n) except -1 nogil:
        if self.compat:
            self.compat_begin(n)
        Drafter.c_begin(self, prompt, n)
        self.n_begin = self.n_checked = n
        return 0

    cdef int cut(self, Py_ssize_t keep) except -1 nogil:
        self.drafted_key = NULL
        if self.compat:
            self.compat_rewritten(keep)
        else:
            self.n_keys = 0
            memset(self.key_ids, 0, self.key_ids_size * sizeof(uint32_t))
            self.slots_clear(0)
            self.slots_last = 0
        chain_cut(&self.chain, keep)
        return 0

    cdef int started(self) except -1 nogil:
        return chain_hash(&self.chain, self.toks, self.n_toks)

    cdef int diverged(self, const tok_t* history, Py_ssize_t n, Py_ssize_t keep) except -1 nogil:
        if not self.compat:
            return Drafter.diverged(self, history, n, keep)
        self.cut(keep)
        self.n_toks = keep
        return 0

    cdef void slots_clear(self, Py_ssize_t first) noexcept nogil:
        """Empties the slots that hold positions >= `first`."""
        cdef Py_ssize_t p, i
        cdef uint32_t* slot
        if self.slots_mixed or self.slots_last - first > MAP_SLOTS // 4:
            for i in range(MAP_SLOTS):
                if self.slots[i] >= first:
                    self.slots[i] = 0
            return
        for p in range(max(first, 1), self.slots_last + 1):
            slot = &self.slots[self.chain.hash[p] & (MAP_SLOTS - 1)]
            if slot[0] >= first:
                slot[0] = 0

    cdef void compat_begin(self, Py_ssize_t n) noexcept nogil:
        """llama.cpp's clean-up before a prompt of `n` tokens: entries beyond what it has in common with the
        previous one, judged by lengths alone."""
        cdef Py_ssize_t first = self.n_begin, i, kept = 0
        cdef int v, w
        cdef MapKey* key
        if first > n:
            first = max(n - self.size_n - self.size_m, 0)
        if n >= self.n_checked:
            return
        self.slots_clear(first)
        self.slots_last = max(first - 1, 0)
        for i in range(self.n_keys):
            key = &self.keys[i]
            if key.at >= first:
                continue
            if self.four_values:
                for v in range(MAP_VALUES - 1, -1, -1):
                    if key.values[v].at == 0 or key.values[v].at < first:
                        continue
                    for w in range(v, MAP_VALUES - 1):
                        key.values[w] = key.values[w + 1]
                    key.values[MAP_VALUES - 1].at = 0
                    key.values[MAP_VALUES - 1].count = 0
                if key.values[0].at == 0:
                    continue
            self.keys[kept] = key[0]
            kept += 1
        self.n_keys = kept
        self.key_ids_stale = True

    cdef void compat_rewritten(self, Py_ssize_t keep) noexcept nogil:
        """The tokens from `keep` on are about to change under positions that stay listed."""
        if self.n_toks > keep:
            self.slots_mixed = self.slots_mixed or self.slots_last + self.size_n > keep
            self.key_ids_stale = True

    # Keys: an array in order of creation, found through an open-addressed table.

    cdef MapKey* key_find(self, Py_ssize_t key) noexcept nogil:
        """The record of the n-gram at position `key`, NULL if there is none."""
        cdef Py_ssize_t mask = self.key_ids_size - 1
        cdef Py_ssize_t i = ((self.chain.hash[key] * <uint32_t>0x85EBCA6B) >> 7) & mask
        cdef MapKey* record
        while self.key_ids[i] != 0:
            record = &self.keys[self.key_ids[i] - 1]
            if same_run(self.toks + record.at, self.toks + key, self.size_n):
                return record
            i = (i + 1) & mask
        return NULL

    cdef void key_list(self, Py_ssize_t id) noexcept nogil:
        cdef Py_ssize_t mask = self.key_ids_size - 1
        cdef Py_ssize_t i = ((self.chain.hash[self.keys[id].at] * <uint32_t>0x85EBCA6B) >> 7) & mask
        while self.key_ids[i] != 0:
            i = (i + 1) & mask
        self.key_ids[i] = <uint32_t>(id + 1)

    cdef int keys_list(self, Py_ssize_t size) except -1 nogil:
        """Lists all keys anew, in a table of `size` entries; of two equal ones the older is found first."""
        cdef uint32_t* table = <uint32_t*>calloc(size, sizeof(uint32_t))
        cdef Py_ssize_t i
        if table == NULL:
            with gil:
                raise MemoryError("drafter index")
        free(self.key_ids)
        self.key_ids, self.key_ids_size = table, size
        for i in range(self.n_keys):
            self.key_list(i)
        self.key_ids_stale = False
        return 0

    cdef MapKey* key_record(self, Py_ssize_t key, Py_ssize_t at) except NULL nogil:
        """The record of the n-gram at position `key`, made with its tokens at `at` if it is new."""
        cdef MapKey* record
        cdef int v
        if self.key_ids_stale:
            self.keys_list(self.key_ids_size)
        record = self.key_find(key)
        if record != NULL:
            return record
        self.keys = <MapKey*>grow(self.keys, &self.cap_keys, self.n_keys + 1, sizeof(MapKey))
        if 2 * self.n_keys >= self.key_ids_size:
            self.keys_list(2 * self.key_ids_size)
        record = &self.keys[self.n_keys]
        memset(record, 0, sizeof(MapKey))
        record.at = <uint32_t>at
        for v in range(MAP_VALUES):
            record.values[v].limit = <int16_t>self.size_m
        self.n_keys += 1
        self.key_list(self.n_keys - 1)
        return record

    # A step.

    cdef Py_ssize_t slots_add(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t key) noexcept nogil:
        """Offers the positions [first, end) to the slots, as if from the last to the first: a slot that was free
        keeps the last of them. The last occurrence of the n-gram at `key` among them, 0 if none."""
        cdef Py_ssize_t p, match = 0
        cdef uint32_t h = self.chain.hash[key]
        cdef uint32_t* slot
        for p in range(first, end):
            slot = &self.slots[self.chain.hash[p] & (MAP_SLOTS - 1)]
            if slot[0] == 0 or slot[0] >= first:
                slot[0] = <uint32_t>p
            if self.chain.hash[p] == h and same_run(self.toks + p, self.toks + key, self.size_n):
                match = p
        return match

    cdef Py_ssize_t lookup(self, Py_ssize_t key, Py_ssize_t end) noexcept nogil:
        """An earlier position of the n-gram at `key`, at most `end`; 0 if none is known. Lists what is new."""
        cdef Py_ssize_t match = 0, fresh, prompt_end, p = self.slots[self.chain.hash[key] & (MAP_SLOTS - 1)]
        if p != 0 and p < end and same_run(self.toks + p, self.toks + key, self.size_n):
            match = p
        # First the prompt, then what was generated. As in llama.cpp, the prompt's last size_n + size_m + 1
        # positions are in neither range.
        prompt_end = self.n_begin - self.size_n - self.size_m
        if prompt_end > 1:
            fresh = self.slots_add(self.slots_last + 1, prompt_end, key)
            match = match or fresh
        fresh = self.slots_add(max(self.n_begin, self.slots_last) + 1, end + 1, key)
        match = match or fresh
        self.slots_last = max(self.slots_last, end)
        return match

    cdef void count(self, MapKey* record, Py_ssize_t at) noexcept nogil:
        """Counts the continuation that begins at `at`, if it is one of the key's first four."""
        cdef int v
        cdef MapValue* value
        for v in range(MAP_VALUES):
            value = &record.values[v]
            if value.at == 0:
                value.at, value.count, value.limit = <uint32_t>at, 0, <int16_t>self.size_m
            elif not same_run(self.toks + at, self.toks + value.at, self.size_m):
                continue
            value.count = min(value.count + 1, MAP_COUNT_MAX)
            return

    cdef int count_occurrences(self, MapKey* record, Py_ssize_t key, Py_ssize_t first, Py_ssize_t end) except -1 nogil:
        """Counts the continuations of the key's occurrences in [first, end), oldest first."""
        cdef Py_ssize_t n = 0, k, p
        if first + 1 == end and same_run(self.toks + first, self.toks + key, self.size_n):
            self.count(record, first + self.size_n)
            return 0
        chain_link(&self.chain, end)
        p = chain_find(&self.chain, self.toks, key, end, chain_first(&self.chain, key))
        while p >= first:
            self.found = <uint32_t*>grow(self.found, &self.cap_found, n + 1, sizeof(uint32_t))
            self.found[n] = <uint32_t>p
            n += 1
            p = chain_find(&self.chain, self.toks, key, end, self.chain.prev[p])
        for k in range(n - 1, -1, -1):
            self.count(record, self.found[k] + self.size_n)
        return 0

    cdef int best_value(self, MapKey* record) noexcept nogil:
        """The value to draft: the most frequent one, if it has twice the count of the others; else -1."""
        cdef int v, best = 0
        cdef uint32_t total = 0
        for v in range(MAP_VALUES):
            total += record.values[v].count
            if record.values[v].count > record.values[best].count:
                best = v
        total -= record.values[best].count
        return best if total == 0 or record.values[best].count >= 2 * total else -1

    cdef Py_ssize_t copy_value(self, MapKey* record, int v, Py_ssize_t at) noexcept nogil:
        cdef Py_ssize_t size = min(self.size_m, <Py_ssize_t>record.values[v].limit)
        self.drafted_key, self.drafted_value = record, v
        if size <= 0:
            return 0
        memcpy(self.out, self.toks + at, size * sizeof(tok_t))
        return size

    cdef Py_ssize_t evidence(self) noexcept:
        return self.size_n

    cdef Py_ssize_t propose(self) except -1 nogil:
        cdef Py_ssize_t n = self.size_n, m = self.size_m
        cdef Py_ssize_t cur = self.n_toks - 1       # llama.cpp's history does not hold the last token
        cdef Py_ssize_t key = self.n_toks - n, end = cur - n - m - 1, match
        cdef MapKey* record
        cdef int v = 0
        self.drafted_key = NULL
        if cur < 2 * n + m:
            return 0
        if self.compat and max(self.n_checked, self.n_begin) > cur:
            with gil:
                raise ValueError(f"the history shrank to {cur} tokens without begin(): llama.cpp's {self.name} aborts")
        self.n_checked = cur
        chain_hash(&self.chain, self.toks, self.n_toks)
        match = self.lookup(key, end)
        if match == 0:
            return 0
        record = self.key_record(key, match)
        record.hits = min(record.hits + 1, MAP_COUNT_MAX)
        if record.hits < self.min_hits and (self.four_values or not self.compat):
            return 0
        if self.four_values:
            # llama.cpp counts the newest counted occurrence again at each lookup.
            self.count_occurrences(record, key, record.counted, match + 1)
            record.counted = <uint32_t>match
            v = self.best_value(record)
            if v < 0:
                return 0
        return self.copy_value(record, v, match + n)

    cdef void settle(self, Py_ssize_t n_accepted) noexcept nogil:
        cdef MapValue* value
        if self.drafted_key == NULL:
            return
        value = &self.drafted_key.values[self.drafted_value]
        if self.compat:
            value.limit = <int16_t>n_accepted
        elif n_accepted < self.n_out:
            value.limit = <int16_t>max(n_accepted, 1)
        else:
            value.limit = <int16_t>min(self.size_m, max(<Py_ssize_t>value.limit, 2 * n_accepted))
