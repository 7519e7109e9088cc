"""The target that verify steps drive: a sequence, what is chosen behind it, and how rejected drafts are taken back."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from ..accounting.results import SpecResult
from ..speculation import mtp
from ..speculation.draft_width import DraftWidth
from ..speculation.verify import Choice
from .choosing import Chooser
from .sequence import IntArray, TokenSequence


class SequenceTarget:
    """One sequence as `speculation.verify.Target`. `spec` takes what recoveries cost, `note` what a user should know.

    `progress`: as `TokenSequence.prefill` has it, of the sequence that is decoded again.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        chooser: Chooser,
        width: DraftWidth,
        spec: SpecResult,
        progress: Callable[[int, int], None],
        note: Callable[[str], None],
    ) -> None:
        self._sequence, self._chooser, self._width = sequence, chooser, width
        self._spec, self._progress, self._note = spec, progress, note

    def room(self) -> int:
        """Positions that the context still has."""
        return self._sequence.room()

    def decode(self, tokens: IntArray) -> list[Choice]:
        """Appends the confirmed token and its drafts; what the model chooses after each of them."""
        head = self._sequence.head
        if head is not None and head.behind > mtp.WIDTH:
            # Not asked for long: others have drafted, or it does not pay, and then neither does catching up.
            if self._width.ready():
                self._sequence.feed_head()
            elif head.behind >= head.limit:
                head.skip()
        n = len(tokens)
        self._sequence.append(tokens, each=n > 1)
        return self._chooser.choose(n)

    def drop(self, n: int) -> None:
        """Takes the rejected tail back; where this kind of memory refuses, decodes the rest of the sequence again."""
        sequence, spec = self._sequence, self._spec
        if sequence.take_back(n):
            return
        started, before = perf_counter(), sequence.graphs.counters().bytes
        sequence.account.charge_rejected(n)
        if not spec.recoveries:
            self._note("this model's memory cannot take rejected drafts back: the sequence is decoded again")
        kept = list(sequence.ids)
        sequence.empty()
        sequence.prefill(kept, self._progress, cause="recovery")
        spec.recoveries += 1
        spec.recovery_s += perf_counter() - started
        spec.recovery_bytes += sequence.graphs.counters().bytes - before
