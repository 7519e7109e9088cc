"""A generation: prefill, then verify steps until a limit, an end token or a stop request."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..accounting.results import GenerationResult, Token
from ..accounting.timing import DRAFT, LOOP
from ..speculation import DrafterStack, DraftWidth
from ..speculation.verify import Choice, Step, verify_steps
from .account import TurnAccount
from .books import GenerationBooks
from .choosing import Chooser, Greedy, Sampled, Scripted
from .request import Request
from .sequence import TokenSequence
from .stop_strings import StopStrings
from .target import SequenceTarget
from .text import TokenText
from .turn import Turn

if TYPE_CHECKING:
    from ..observe.telemetry import Telemetry  # loaded where records are asked for


@dataclass
class Drafting:
    """How an engine drafts: with what, how much of a draft is verified, and the longest that can be taken back."""

    drafter: DrafterStack
    width: DraftWidth
    longest: int


@dataclass(frozen=True)
class Hooks:
    """What a turn calls of its engine. `cancel` stops the graph that runs; `progress` is told of prefill, in tokens;
    `note` keeps a line for the user; `telemetry` begins the records of so many tokens at most."""

    cancel: Callable[[], None]
    progress: Callable[[int, int], None]
    note: Callable[[str], None]
    telemetry: Callable[[int], Telemetry]


class Generation(Turn):
    """A turn that writes: its tokens are what the model chooses behind the prompt.

    `request`: what was asked for, with the seed of its draws.
    """

    def __init__(self, request: Request, sequence: TokenSequence, drafting: Drafting, hooks: Hooks) -> None:
        context, drafter = sequence.context, drafting.drafter
        request.check(context.n_ctx, context.n_vocab, drafts=drafter.name != "none")
        self.request = request
        self._text = TokenText(StopStrings(request.stop), request.stop_tokens, request.stop_at_end)
        self._sequence, self._drafting, self._hooks = sequence, drafting, hooks
        result = GenerationResult(prompt_tokens=len(request.ids), seed=request.sampling.seed)
        result.spec.type = drafter.name
        super().__init__(hooks.cancel, result)

    def _run(self) -> Generator[Token, None, None]:
        sequence, result = self._sequence, self.result
        account = TurnAccount(sequence.graphs.streamer, result.flash_split)
        books = GenerationBooks(account, sequence.graphs.counters, result)
        chooser = self._chooser()
        try:
            with self._noting_the_end():
                sequence.begin_turn(account)
                if self.request.records:
                    books.telemetry = self._hooks.telemetry(self.request.max_tokens)
                self._prefill(account)
                books.end_prefill()
                yield from self._decode(books, chooser)
                result.stop, result.stop_string = self._text.stop or "length", self._text.stop_string
            if rest := self._text.finish():  # of a generation that was cancelled
                yield books.rest(rest)
        finally:
            chooser.close()
            books.close()
            self._text.finish()
            result.text = self._text.text
            self.running = False

    def _chooser(self) -> Chooser:
        """How this request has its tokens chosen."""
        request, context = self.request, self._sequence.context
        if request.script is not None:
            return Scripted(context, request.script, self._sequence.ids, len(request.ids))
        return Greedy(context) if request.sampling.greedy else Sampled(context, request.sampling)

    def _prefill(self, account: TurnAccount) -> None:
        """The prompt, as far as the sequence does not have it from before."""
        ids, result = self.request.ids, self.result
        account.clock.switch(DRAFT)
        self._drafting.drafter.begin(np.array(ids, np.int32))
        account.clock.switch(LOOP)
        result.reused_tokens = self._sequence.keep_prefix(ids)

        def computed(n: int) -> None:
            result.prefill_tokens = n

        self._sequence.prefill(ids, self._hooks.progress, computed=computed)

    def _decode(self, books: GenerationBooks, chooser: Chooser) -> Generator[Token, None, None]:
        """The tokens behind the prompt; ends after the last, or where the text ends."""
        request, drafting = self.request, self._drafting
        if request.max_tokens == 0:
            return
        target = SequenceTarget(
            self._sequence, chooser, drafting.width, self.result.spec, self._hooks.progress, self._hooks.note
        )
        (first,) = chooser.choose()
        books.first_chosen()
        yield self._token(books, first, last=target.room() <= 0)
        books.account.clock.switch(LOOP)
        if self._text.stop:
            return
        drafting.width.begin()
        steps = verify_steps(
            target,
            drafting.drafter,
            list(request.ids),
            first,
            request.max_tokens - 1,
            drafting.longest,
            drafting.width,
            books.account.clock,
        )
        for step in steps:
            took = books.step(step)
            for i, choice in enumerate(step.confirmed):
                # No step follows where the context is full.
                last = target.room() <= 0 and i + 1 == len(step.confirmed)
                # A group's whole cost sits on its first token.
                yield self._token(books, choice, last, *((0.0, None) if i else (took, step)))
                books.account.clock.switch(LOOP)
                if self._text.stop:
                    return

    def _token(
        self, books: GenerationBooks, choice: Choice, last: bool, decode_s: float = 0.0, step: Step | None = None
    ) -> Token:
        """The token of one choice, with its text; the last one has what was held back of that."""
        piece = self._text.add(choice)
        if last or self._text.stop or len(self.result.token_ids) + 1 == self.request.max_tokens:
            piece += self._text.finish()
        return books.token(choice, piece, decode_s, step)
