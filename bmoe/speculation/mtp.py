"""Drafting with the model's own multi-token-prediction head (`nextn` blocks), streamed like any other layer.

A head is one more layer: from a token and the target's hidden row of the token before it, it predicts the token
after. It has a context of its own, with keys and values of its own, beside the target's. The target's rows are
handed over by `take`; `feed` gives the head what has been confirmed; `draft` goes on from there on the head's own
rows, and takes that back: whatever becomes of the draft, the head holds confirmed tokens with the target's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..gguf.file import ModelFile
from ..llama.head import HEADS, Rows

Tokens = npt.NDArray[np.int32]
RunGraph = Callable[[Callable[[], int], bool], None]
"""Runs a graph of the head, accounts for it, and raises where it was stopped or failed; called with the graph, which
returns llama_decode's code, and whether its experts' results are wanted."""

WIDTH = 64
"""Tokens that a head is fed at once. Its compute buffers grow with it, and come out of the expert budget; a feed
reads no experts, so that a narrow one costs little else."""

_NO_TOKENS: Tokens = np.empty(0, np.int32)
_NO_TOKENS.setflags(write=False)


def count_heads(file: ModelFile) -> int:
    """How many heads the model has. Raises UsageError where there is none that llama.cpp can draft with."""
    path, n = file.paths[0], file.number("nextn_predict_layers")
    first = file.number("block_count") - n
    names = {t.name for t in file.tensors}
    if not n or any(f"blk.{first + i}.nextn.eh_proj.weight" not in names for i in range(n)):
        raise UsageError(
            f"--spec-type mtp: {path} has no multi-token-prediction head (a nextn block); "
            "draft from the text instead, with --spec-type ngram-mod"
        )
    if n > HEADS.get(file.arch, 0):
        what = f"{n} heads of {file.arch}" if file.arch in HEADS else f"the head of {file.arch}"
        raise UsageError(
            f"--spec-type mtp: {path}: llama.cpp cannot draft with {what}; "
            "draft from the text instead, with --spec-type ngram-mod"
        )
    return n


class Head(Protocol):
    """What the source drives: `bmoe.llama.head.HeadContext`, or a table in a test."""

    n_heads: int
    size: int
    n_batch: int

    def run(self, head: int, tokens: Sequence[int], rows: Rows, position: int, outputs: bool) -> int: ...
    def row(self, i: int) -> Rows: ...
    def output_logits(self, i: int) -> Rows: ...
    def truncate(self, n: int) -> bool: ...
    def first_kept(self) -> int: ...
    def clear(self) -> None: ...


class PendingRows:
    """The target's hidden rows, of the positions that the head has yet to be fed with. Each float32 [size].

    `window`: the first position and the rows from there on; replaced whole, so that no exception comes between. The
    rows are the beginning of an array with room for `WIDTH` more: where the head is not asked, each step adds one.
    """

    def __init__(self, size: int) -> None:
        self.window: tuple[int, Rows] = (0, np.empty((0, size), np.float32))

    @property
    def start(self) -> int:
        """The position of the first row."""
        return self.window[0]

    @property
    def rows(self) -> Rows:
        return self.window[1]

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.window[0] + len(self.window[1])

    def put(self, position: int, rows: Rows) -> None:
        """Rows of `position` and the positions after it; what lay there and beyond is replaced."""
        start, kept = self.window
        if start <= position <= self.end:
            kept = kept[: position - start]
        else:
            start, kept = position, kept[:0]
        self.window = (start, kept)  # what is written over is not there meanwhile
        n, total = len(kept), len(kept) + len(rows)
        whole: Rows = kept if kept.base is None else kept.base
        if total > len(whole):
            whole = np.empty((total + WIDTH, rows.shape[1]), np.float32)
            whole[:n] = kept
        whole[n:total] = rows
        self.window = (start, whole[:total])

    def before(self, first: int, last: int) -> Rows | None:
        """For each of the positions `first` to `last` (excluded) the row before it, zeros before position 0.

        float32 [last - first, size]; None where one is not there.
        """
        start, rows = self.window
        low = max(0, first - 1)
        if first == 0 and last == 1:
            return np.zeros((1, rows.shape[1]), np.float32)
        if low < start or last - 1 > self.end:
            return None
        found = rows[low - start : last - 1 - start]
        if first == 0:
            return np.concatenate([np.zeros((1, rows.shape[1]), np.float32), found])
        return np.ascontiguousarray(found)

    def cut(self, first: int, end: int) -> None:
        """Forgets all rows but those of the positions `first` to `end` (excluded)."""
        start, rows = self.window
        first, end = max(first, start), min(end, self.end)
        if end <= first:
            self.window = (first, rows[:0].copy())
        elif first == start:
            self.window = (start, rows[: end - start])
        else:
            self.window = (first, rows[first - start : end - start].copy())


class MtpSource:
    """A source of drafts (`bmoe.speculation.Source`) that asks the model's own head.

    `n_max`: tokens drafted at most. `p_min`: a token that the head gives less than this probability, of all the
    vocabulary, is not drafted, and ends the draft. `limit`: rows that may wait while it is not asked; as many as a
    batch of a prompt hands over at once cost no memory beyond what that takes. `held`: tokens that the head has been
    fed with, but for the first `left_out` of them (`skip`).

    Safe against an exception between any two lines: what the head's context holds beyond `held` is taken back
    before it is used again.
    """

    name = "mtp"
    costs = True  # a draft takes graphs

    def __init__(self, head: Head, n_max: int, p_min: float = 0.0, limit: int = 512) -> None:
        self.head, self.p_min, self.limit = head, p_min, limit
        # Each further head predicts one token further.
        self.n_max = n_max if head.n_heads == 1 else min(n_max, head.n_heads)
        self.held = self.left_out = 0
        self.pending = PendingRows(head.size)
        self.run_graph: RunGraph = _run_alone
        self._reaches = 0  # positions that the head's context may hold
        self._drafted = 0
        self._counts = dict.fromkeys(
            ("steps", "drafted_steps", "drafted", "accepted", "accepted_whole", "refused_whole", "graphs", "fed",
             "left_out"), 0
        )  # fmt: skip

    # ---- the target's side ------------------------------------------------------------------------

    def take(self, position: int, rows: Rows) -> None:
        """The target has decoded a batch at `position`: its hidden rows, float32 [n, size]; they are copied."""
        self.pending.put(position, rows)

    def resume(self, n: int) -> int:
        """The sequence is now its first `n` tokens: how many of them the target may keep.

        One or more fewer than `n` where the row before the next token has to be computed again.
        """
        if n < self.held and self.left_out:
            self._begin_at(max(0, n - 1))
        elif n < self.held and self.head.first_kept() > 0:
            self._forget()  # a sliding window has dropped what the earlier positions need
        self.held = min(self.held, n)
        self._settle()
        self.pending.cut(max(0, self.held - 1), n)
        return n if self.pending.before(self.held, n + 1) is not None else max(0, self.held - 1)

    def drop(self, n: int) -> None:
        """The target has taken rejected tokens back: its sequence is its first `n` tokens."""
        self.pending.cut(self.pending.start, n)

    @property
    def behind(self) -> int:
        """Rows that wait to be fed."""
        return len(self.pending.rows)

    def skip(self) -> None:
        """Leaves out the tokens whose rows wait: the head goes on after them as if the text began there.

        For a head that is not worth catching up: what it drafts later is verified like any draft.
        """
        self._counts["left_out"] += self.pending.end - self.held
        self._begin_at(self.pending.end)
        self.pending.cut(self.held - 1, self.held)

    def feed(self, tokens: Sequence[int] | Tokens) -> None:
        """Catches up with the sequence `tokens`, all confirmed and decoded by the target."""
        while self.held < len(tokens):
            first = self.held
            last = min(len(tokens), first + min(WIDTH, self.head.n_batch))
            rows = self.pending.before(first, last)
            if rows is None:
                return  # they come when the target has decoded as far again
            batch = [int(t) for t in tokens[first:last]]
            for i in range(self.head.n_heads):
                # The heads share positions, each has keys and values of its own: the same places once for each.
                self._settle()
                self._graph(i, batch, rows, first, outputs=False)
            self.held = last
            self._counts["fed"] += last - first
        self.pending.cut(self.held - 1, self.pending.end)

    # ---- the drafter's side -----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of hidden rows that wait."""
        return self.pending.rows.nbytes

    @property
    def stats(self) -> dict[str, int]:
        """Counts since creation: draft calls, drafts made, tokens drafted and accepted, drafts accepted whole,
        drafts refused whole, graphs of the head, tokens it was fed with, tokens left out."""
        return dict(self._counts)

    def begin(self, prompt: Tokens) -> None:
        """Nothing to do: the head learns of a prompt when the target decodes it."""

    def draft(self, history: Tokens, last: int, n_max: int | None = None) -> Tokens:
        """Up to `n_max` tokens that the head expects after `history` and `last`; int32[k]."""
        size = self.n_max if n_max is None else min(self.n_max, n_max)
        self._drafted = 0
        self._counts["steps"] += 1
        if size <= 0:
            return _NO_TOKENS
        self.feed(history)
        n = len(history)
        row = self.pending.before(n, n + 1) if self.held == n else None
        if row is None:
            return _NO_TOKENS
        draft = self._chained(last, row, n, size) if self.head.n_heads > 1 else self._repeated(last, row, n, size)
        self._settle()
        self._drafted = len(draft)
        self._counts["drafted_steps"] += bool(draft)
        self._counts["drafted"] += len(draft)
        return np.array(draft, np.int32)

    def trim(self, n: int) -> None:
        """Only the first `n` tokens of the last draft are verified; 0: none."""
        if n < self._drafted:
            self._counts["drafted"] -= self._drafted - n
            self._counts["drafted_steps"] -= n == 0
            self._drafted = n

    def accept(self, n_accepted: int, is_other: bool = False) -> None:
        """Reports how many tokens of the last draft were confirmed."""
        if self._drafted and not is_other:
            self._counts["accepted"] += n_accepted
            self._counts["accepted_whole"] += n_accepted == self._drafted
            self._counts["refused_whole"] += n_accepted == 0
        self._drafted = 0

    def _repeated(self, last: int, row: Rows, n: int, size: int) -> list[int]:
        """One head, asked again with its own rows for each further token."""
        draft: list[int] = []
        token = last
        for i in range(size):
            self._graph(0, [token], row, n + i, outputs=True)
            if i == 0:
                self.held = n + 1  # `last` is confirmed, and its row is the target's
            token, sure = self.choose(0)
            if not sure:
                break
            draft.append(token)
            row = self.head.row(0)
        return draft

    def _chained(self, last: int, row: Rows, n: int, size: int) -> list[int]:
        """Several heads, one for each further token; each is given all of the draft so far."""
        draft: list[int] = []
        rows = row
        for i in range(size):
            self._settle()
            self._graph(i, [last, *draft], rows, n, outputs=True)
            token, sure = self.choose(i)
            if not sure:
                break
            draft.append(token)
            rows = np.concatenate([rows, self.head.row(i)])
        return draft

    def choose(self, i: int) -> tuple[int, bool]:
        """The likeliest token by output `i` of the last graph, and whether it is likely enough to draft."""
        logits = self.head.output_logits(i)
        token = int(logits.argmax())
        if self.p_min <= 0.0:
            return token, True
        return token, bool(1.0 / np.exp(logits - logits[token]).sum(dtype=np.float64) >= self.p_min)

    # ---- the head's context -----------------------------------------------------------------------

    def _graph(self, head: int, tokens: list[int], rows: Rows, position: int, *, outputs: bool) -> None:
        self._reaches = position + len(tokens)
        self._counts["graphs"] += 1
        self.run_graph(lambda: self.head.run(head, tokens, rows, position, outputs), outputs)

    def _settle(self) -> None:
        """Takes back what the head's context holds beyond the tokens it was fed with."""
        if self._reaches > self.held:
            if self.head.truncate(self.held):
                self._reaches = self.held
            else:
                self._forget()

    def _forget(self) -> None:
        self._begin_at(0)

    def _begin_at(self, n: int) -> None:
        """Clears the head's context: the next token that it is fed with is that of position `n`."""
        self.held = self.left_out = 0  # whatever comes between, the head has nothing
        self.head.clear()
        self._reaches = 0
        self.left_out = n
        self.held = n


def _run_alone(graph: Callable[[], int], wanted: bool) -> None:
    code = graph()
    if code:
        raise RuntimeError(f"the head's graph returned {code}")
