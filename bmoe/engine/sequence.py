"""The tokens that a context holds, and all that changes them: appended, taken back, kept for the next prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .. import llama
from ..accounting.bytes_by_cause import FlashSplit
from ..accounting.timing import DRAFT, LOOP
from ..errors import ReadError
from ..llama.head import TargetRows
from ..speculation import mtp
from .account import TurnAccount
from .graphs import GraphRunner

IntArray = npt.NDArray[np.int32]


class TokenSequence:
    """One sequence of a target's context, and the model's own head beside it, where it drafts.

    `ids`: the tokens that the context holds; `in_step` is False while a change of it is under way: an exception may
    come between any two lines, and `ids` is then what can be relied on again after `recover`. `account`: the books of
    the turn that uses it. `rows`: the target's hidden rows, for `head`.
    """

    def __init__(
        self,
        context: llama.Context,
        graphs: GraphRunner,
        head: mtp.MtpSource | None = None,
        rows: TargetRows | None = None,
        drop_in_prefill: bool = False,
    ) -> None:
        self.context, self.graphs, self.head, self.rows = context, graphs, head, rows
        self.ids: list[int] = []
        self.in_step = True
        self.account = TurnAccount(graphs.streamer, FlashSplit())
        self._drop_in_prefill = drop_in_prefill

    def begin_turn(self, account: TurnAccount) -> None:
        """What is done from now on is charged to `account`."""
        self.account = account
        if self.head is not None:
            self.head.run_graph = self._run_head

    def room(self) -> int:
        """Positions that the context still has."""
        return self.context.n_ctx - len(self.ids)

    # ---- growing ----------------------------------------------------------------------------------

    def append(
        self,
        tokens: IntArray,
        *,
        each: bool = False,
        skip: int = 0,
        drop: bool = True,
        cause: str = "decode",
        for_head: bool = True,
    ) -> None:
        """Decodes int32 [n] tokens behind the others, or leaves the sequence as it was and says why not.

        `each`: logits of every one are kept, but for the first `skip`; `drop`: cold experts may be dropped, where the
        engine does that; `cause`: what its traces call the batch, "prefill", "decode" or "recovery"; `for_head`: the
        head gets the hidden rows. Raises Stopped, ReadError, UsageError or BmoeError.
        """
        self.graphs.check_cancelled()
        self.account.open_batch(len(tokens))
        context, account, position, n = self.context, self.account, len(self.ids), len(tokens)
        self.in_step = False
        if each:
            code = self.graphs.run(account, cause, position, n, drop, context.decode_each, tokens, position, skip)
        else:
            code = self.graphs.run(account, cause, position, n, drop, context.decode, tokens)
        if code:
            self.recover()
            self.graphs.fail(code)
        if for_head and self.head is not None and self.rows is not None:
            self.head.take(position, self.rows.last(len(tokens)))
        self.ids.extend(tokens.tolist())
        self.in_step = True
        if fault := self.graphs.fault():
            self.empty()
            raise ReadError(fault)
        self.graphs.raise_interrupt()

    def prefill(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None],
        *,
        cause: str = "prefill",
        computed: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Appends what of `ids` is not there yet, in batches; logits of the last token are kept.

        `progress` is told of tokens done and of all, `computed` of those decoded so far, after each batch.
        """
        start, step = len(self.ids), self.context.n_batch
        whole = len(ids) - start
        for at in range(start, len(ids), step):
            progress(at - start, whole)
            self.graphs.expect_prompt(max(0, len(ids) - at - step))
            try:
                self.append(np.array(ids[at : at + step], np.int32), drop=self._drop_in_prefill, cause=cause)
                computed(min(at + step, len(ids)) - start)
            finally:
                self.graphs.expect_prompt(-1)
                self.account.charge(cause)
            if self.head is not None:
                self.feed_head()
        progress(whole, whole)

    # ---- going back -------------------------------------------------------------------------------

    def keep_prefix(self, ids: Sequence[int]) -> int:
        """Drops what the sequence does not share with `ids`; how many tokens stay, fewer than all of `ids`."""
        old = self.ids
        if not self.in_step:
            self.recover()
        # At least one token is computed, for its logits.
        limit = min(len(old), len(ids) - 1)
        same = next((i for i in range(limit) if old[i] != ids[i]), limit)
        if self.head is not None:
            same = self.head.resume(same)
        if same < len(old):
            self.in_step = False
            del old[same:]
            # A sliding window that has dropped its beginning, or a recurrent state, cannot go back.
            if same == 0 or self.context.first_kept() > 0 or not self.context.truncate(same):
                self.empty()
            self.in_step = True
        return len(old)

    def take_back(self, n: int) -> bool:
        """Takes the last `n` tokens back, which were drafts. False where this kind of memory refuses.

        `ids` is then what has to be decoded again, after `clear`.
        """
        self.in_step = False
        del self.ids[-n:]
        self.graphs.reject(n)
        if self.head is not None:
            self.head.drop(len(self.ids))
        if not self.context.truncate(len(self.ids)):
            return False
        self.in_step = True
        return True

    def clear(self) -> None:
        """Empties it."""
        self.in_step = False
        self.empty()
        if self.head is not None:
            self.head.resume(0)
        self.in_step = True

    def recover(self) -> None:
        """Takes back what a stopped batch has put into the context.

        Also after an exception from a signal handler that came between a graph and its account.
        """
        # A recurrent state may have moved on in the middle of the batch: no snapshot of it can be trusted.
        if self.context.recurrent or not self.context.truncate(len(self.ids)):
            self.empty()
        self.in_step = True

    def empty(self) -> None:
        """Empties the context, where nothing of it can be kept; the head finds out by itself."""
        self.ids.clear()
        self.context.clear()

    # ---- the head ---------------------------------------------------------------------------------

    def feed_head(self) -> None:
        """The head catches up with the sequence."""
        assert self.head is not None
        self.account.clock.switch(DRAFT)
        self.head.feed(self.ids)
        self.account.clock.switch(LOOP)

    def _run_head(self, graph: Callable[[], int], wanted: bool) -> None:
        self.graphs.run_head(graph, wanted, self.account)
