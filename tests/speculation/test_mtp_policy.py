"""The head's bookkeeping without a model: which row goes with which token, what is fed, what is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.speculation.mtp import WIDTH, MtpSource, PendingRows, Rows

SIZE = 2


def rows_of(positions: Sequence[int], salt: int = 0) -> Rows:
    """Hidden rows that say which position they are of; `salt`: of which history."""
    return np.array([[p + 1, salt] for p in positions], np.float32).reshape(-1, SIZE)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "cut", "before"]), st.integers(0, 30), st.integers(0, 12))))
def test_pending_rows_are_a_window_of_a_table(steps: list[tuple[str, int, int]]) -> None:
    pending, table = PendingRows(SIZE), dict[int, int]()
    for salt, (what, first, n) in enumerate(steps):
        if what == "put":
            keep = {p: s for p, s in table.items() if p < first}
            # Rows that do not follow on from what is there replace it.
            table = keep if pending.start <= first <= pending.end else {}
            pending.put(first, rows_of(range(first, first + n), salt))
            table |= dict.fromkeys(range(first, first + n), salt)
        elif what == "cut":
            pending.cut(first, first + n)
            table = {p: s for p, s in table.items() if first <= p < first + n}
        elif n:
            got = pending.before(first, first + n)
            wanted = [p - 1 for p in range(first, first + n)]
            if all(p < 0 or p in table for p in wanted):
                assert got is not None
                assert got.tolist() == [[p + 1, table[p]] if p >= 0 else [0, 0] for p in wanted]
                assert got.flags.c_contiguous
            else:
                assert got is None
        assert pending.end - pending.start == len(pending.rows) == len(table)


class TableHead:
    """A head that is a table: notes keys by position, and refuses a gap or a wrong row."""

    size = SIZE

    def __init__(self, n_heads: int, n_batch: int = 512, window: int = 0) -> None:
        self.n_heads, self.n_batch, self.window = n_heads, n_batch, window
        self.keys: list[dict[int, tuple[int, tuple[float, ...]]]] = [{} for _ in range(n_heads)]
        self.reach = 0
        self.empty = True  # a sequence may begin anywhere
        self.outputs = 0
        self.fail = 0
        self.graphs = 0

    def run(self, head: int, tokens: Sequence[int], rows: Rows, position: int, outputs: bool) -> int:
        self.graphs += 1
        assert position == self.reach or self.empty, "a context appends"
        assert len(tokens) == len(rows) <= self.n_batch
        if self.fail and self.graphs == self.fail:
            return 2
        for i, token in enumerate(tokens):
            self.keys[head][position + i] = (token, tuple(rows[i].tolist()))
        self.reach, self.empty = position + len(tokens), False
        self.outputs = len(tokens) if outputs else 0
        return 0

    def row(self, i: int) -> Rows:
        assert i < self.outputs
        return np.array([[-self.reach, i]], np.float32)

    def output_logits(self, i: int) -> Rows:
        assert i < self.outputs
        return np.eye(64, dtype=np.float32)[(7 * self.reach + i) % 64] * 3

    def truncate(self, n: int) -> bool:
        # What lies there stays there, as in llama.cpp: each head overwrites its own.
        self.reach = min(self.reach, n)
        return True

    def first_kept(self) -> int:
        return max(0, self.reach - self.window) if self.window else 0

    def clear(self) -> None:
        self.truncate(0)
        self.empty = True


def check(source: MtpSource, head: TableHead, history: Sequence[int], salts: Sequence[int]) -> None:
    """The head holds confirmed tokens with the row before each, of the history that is now."""
    for keys in head.keys:
        for p in range(source.left_out, source.held):
            if p < len(history):
                assert keys[p] == (history[p], (p, salts[p - 1]) if p else (0, 0))


@settings(max_examples=300, deadline=None)
@given(
    n_heads=st.integers(1, 3),
    n_batch=st.sampled_from([3, 512]),
    window=st.sampled_from([0, 0, 5]),
    steps=st.lists(
        st.tuples(st.sampled_from(["prefill", "step", "step", "plain", "other", "new", "fail", "skip"]),
                  st.integers(0, 9), st.integers(0, 9)), max_size=25
    ),
)  # fmt: skip
def test_the_head_holds_what_is_confirmed(
    n_heads: int, n_batch: int, window: int, steps: list[tuple[str, int, int]]
) -> None:
    """Any order of prefills, drafts, rejections, other sources' drafts, new prompts and stopped graphs."""
    head = TableHead(n_heads, n_batch, window)
    source = MtpSource(head, 4)
    history: list[int] = []  # what the target holds
    salts: list[int] = []  # of which batch each of its rows is
    fresh = iter(range(10**6))

    class Stopped(Exception):
        pass

    def run_graph(graph: Any, wanted: bool) -> None:
        if graph():
            raise Stopped

    source.run_graph = run_graph

    def decode(tokens: Sequence[int]) -> None:
        salt = next(fresh)
        source.take(len(history), rows_of(range(len(history), len(history) + len(tokens)), salt))
        history.extend(tokens)
        salts.extend([salt] * len(tokens))

    def begin(shared: Sequence[int], tokens: Sequence[int]) -> None:
        """A new request that shares `shared` with the sequence; the target may have to decode the end of it again."""
        keep = source.resume(len(shared))
        assert keep <= len(shared)
        del history[keep:], salts[keep:]
        decode([*shared[keep:], *tokens])

    for what, a, b in steps:
        tokens = [(a * 5 + i + b) % 64 for i in range(a + 1)]
        try:
            if what == "prefill":
                decode(tokens)
                source.feed(history)
            elif what == "plain":
                decode(tokens[:1])
            elif what in ("step", "other"):
                if not history:
                    continue
                last = tokens[0]
                draft: list[int] = []
                if what == "step":
                    draft = source.draft(np.array(history, np.int32), last, b).tolist()
                    assert len(draft) == min(b, 4, n_heads if n_heads > 1 else 4)
                else:
                    draft = [9] * b
                accepted = min(a, len(draft))
                decode([last, *draft])
                if accepted < len(draft):
                    cut = len(draft) - accepted
                    del history[-cut:], salts[-cut:]
                    source.drop(len(history))
                source.accept(accepted, what == "other")
            elif what == "skip":
                source.skip()
                assert source.held == source.left_out == len(history)
                assert source.behind <= 1
            elif what == "fail":
                head.fail = head.graphs + 1 + b % 3
                continue
            else:
                begin(history[: a * 3], tokens)
        except Stopped:
            # The engine keeps what the target holds, and the next request begins.
            head.fail = 0
            begin(list(history), tokens)
        check(source, head, history, salts)
    head.fail = 0
    source.feed(history)
    assert source.held >= len(history) or source.pending.before(source.held, len(history)) is None
    if history:
        assert source.behind <= len(history)
    check(source, head, history, salts)


def test_a_feed_goes_in_narrow_batches() -> None:
    head = TableHead(1)
    source = MtpSource(head, 3)
    source.take(0, rows_of(range(200)))
    source.feed(list(range(200)))
    assert head.graphs == -(-200 // WIDTH)
    assert source.behind == 1
    assert source.nbytes == SIZE * 4
    assert source.stats["fed"] == 200


@pytest.mark.parametrize(("p_min", "expected"), [(0.0, 3), (0.23, 3), (0.25, 0), (1.0, 0)])
def test_p_min_is_a_probability_of_the_whole_vocabulary(p_min: float, expected: int) -> None:
    """One logit is 3, 63 are 0: e^3 / (e^3 + 63) = 0.2417."""
    source = MtpSource(TableHead(1), 3, p_min)
    source.take(0, rows_of([0]))
    assert len(source.draft(np.array([5], np.int32), 6, 3)) == expected
    assert source.held == 2, "the confirmed token stays, whatever becomes of the draft"


def test_rows_that_wait_are_not_copied_at_every_step() -> None:
    """Where the head is not asked for a thousand steps, each adds one row; the array moves sometimes, and has
    little room that is not used."""
    pending, arrays = PendingRows(SIZE), []
    for position in range(1000):
        pending.put(position, np.full((1, SIZE), position, np.float32))
        arrays.append(pending.rows if pending.rows.base is None else pending.rows.base)
    assert len({id(a) for a in arrays}) <= 1 + 1000 // WIDTH
    assert all(len(a) <= n + 1 + WIDTH for n, a in enumerate(arrays))
    pending.put(500, np.full((1, SIZE), 7, np.float32))
    assert pending.end == 501
    assert pending.rows[:, 0].tolist() == [*range(500), 7]


def test_a_head_that_left_tokens_out_costs_the_next_request_two_at_most() -> None:
    head = TableHead(1)
    source = MtpSource(head, 4)
    source.take(0, rows_of(range(100)))
    source.feed(list(range(100)))
    source.take(100, rows_of(range(100, 700)))
    source.skip()
    source.take(700, rows_of(range(700, 710)))
    assert source.draft(np.arange(710, dtype=np.int32), 5).tolist()
    assert sorted(head.keys[0])[100:] == list(range(700, 714))  # with the draft's own, which are taken back
    for n in (711, 710, 705, 300):
        assert n - 2 <= source.resume(n) <= n
    assert source.resume(0) == 0
    assert source.left_out == 0


def test_without_rows_it_abstains() -> None:
    source = MtpSource(TableHead(1), 3)
    assert len(source.draft(np.array([1, 2], np.int32), 3, 3)) == 0
    assert source.resume(0) == 0
    source.take(0, rows_of([0, 1]))
    assert len(source.draft(np.array([1, 2], np.int32), 3, 3)) == 3
    assert len(source.draft(np.array([1, 2], np.int32), 3, 0)) == 0
