"""Making drafters: one to use alone, or the decode loop's, several sources in order. No model, no llama.cpp.

`make(name, **config)` gives one drafter; `make_drafter(spec)` gives the decode loop its `Drafter`, a `DrafterStack`.
The drafters themselves are in ext/bmoe/speculation/_drafters.pyx, what they do is in docs/drafting.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from . import _drafters
from .settings import CONFIGS, MTP, TYPES, DraftSpec, ModConfig, NgramConfig

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel

Tokens: TypeAlias = npt.NDArray[np.int32]

_NO_TOKENS: Tokens = np.empty(0, np.int32)
_NO_TOKENS.setflags(write=False)


class Source(Protocol):
    """One producer of drafts, as `make` returns it; a draft model can be another.

    `draft` gets int32[n], all confirmed tokens before `last`, and returns int32[k], k <= n_max, empty to
    abstain. `accept` tells what became of the draft, its own or (`is_other`) another source's.
    """

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stats(self) -> dict[str, int]: ...
    def begin(self, prompt: Tokens) -> None: ...
    def draft(self, history: Tokens, last: int, n_max: int | None = None) -> Tokens: ...
    def accept(self, n_accepted: int, is_other: bool = False) -> None: ...
    def trim(self, n: int) -> None: ...


def make(name: str, *, compat: bool = False, **config: Any) -> _drafters.Drafter:
    """One drafter by llama.cpp's name for it, or `ngram`.

    Args:
        name: one of TYPES.
        compat: draft what llama.cpp's own drafter would, token for token, defects included.
        config: the fields of its config class (NgramConfig, MapConfig, ModConfig).

    Raises UsageError for an unknown name or setting, or a value out of range.
    """
    if name not in CONFIGS:
        raise UsageError(f"--spec-type: {name!r} is none of {', '.join(TYPES)}")
    known = [f.name for f in fields(CONFIGS[name])]
    unknown = [key for key in config if key not in known]
    if unknown:
        raise UsageError(f"{name}: no setting {unknown[0]!r}; it has {', '.join([*known, 'compat'])}")
    settings = CONFIGS[name](**config)
    if isinstance(settings, NgramConfig):
        settings.check()
        return _drafters.Ngram(compat=compat, **vars(settings))
    if isinstance(settings, ModConfig):
        settings.check()
        return _drafters.NgramMod(compat=compat, **vars(settings))
    settings.check(name)
    if name == "ngram-simple":
        return _drafters.NgramSimple(compat=compat, **vars(settings))
    return _drafters.NgramMap(four_values=name == "ngram-map-k4v", compat=compat, **vars(settings))


class DrafterStack:
    """The decode loop's drafter: sources in order of precedence, of which the first that drafts wins.

    Without sources it never drafts, which is plain decoding. `free_only`: sources that take time to draft (their
    attribute `costs`) are not asked.
    """

    def __init__(self, sources: Sequence[Source] = (), n_max: int | None = None) -> None:
        self.sources = tuple(sources)
        self.n_max = n_max
        self.free_only = False
        self._winner: Source | None = None

    @property
    def name(self) -> str:
        return ",".join(source.name for source in self.sources) or "none"

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by the sources."""
        return sum(source.nbytes for source in self.sources)

    @property
    def stats(self) -> dict[str, dict[str, int]]:
        """Each source's counts, by its name."""
        return {source.name: source.stats for source in self.sources}

    @property
    def winner(self) -> str | None:
        """The source whose draft is waiting for `accept`; None after an abstention."""
        return None if self._winner is None else self._winner.name

    @property
    def matched(self) -> int:
        """Tokens by which the draft that is waiting was found; 0 for a source that does not look it up."""
        return int(getattr(self._winner, "matched", 0))

    def begin(self, prompt: Tokens | Sequence[int]) -> None:
        """Starts a request with its prompt: int32[n]."""
        self._winner = None
        tokens = np.ascontiguousarray(prompt, np.int32)
        for source in self.sources:
            source.begin(tokens)

    def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
        """Tokens expected after `history`, int32[n] with the last confirmed token at its end: int32[k], k <= n_max.

        Empty when every source abstains, when the history is empty, and for `n_max` 0.
        """
        self._winner = None
        if self.n_max is not None:
            n_max = self.n_max if n_max is None else min(n_max, self.n_max)
        if len(history) == 0 or n_max == 0:
            return _NO_TOKENS
        before, last = history[:-1], int(history[-1])
        for source in self.sources:
            if self.free_only and getattr(source, "costs", False):
                continue
            tokens = source.draft(before, last, n_max)
            if len(tokens):
                self._winner = source
                return tokens
        return _NO_TOKENS

    def trim(self, n: int) -> None:
        """Only the first `n` tokens of the last draft are verified; 0: none, and nobody is told of it."""
        if self._winner is None:
            return
        self._winner.trim(n)
        if n == 0:
            self._winner = None

    def accept(self, n_accepted: int) -> None:
        """Reports that the target confirmed `n_accepted` tokens of the last draft; nothing after an abstention."""
        winner, self._winner = self._winner, None
        if winner is None:
            return
        winner.accept(n_accepted)
        for source in self.sources:
            if source is not winner:
                source.accept(n_accepted, True)


def make_drafter(spec: DraftSpec, draft_model: Source | None = None) -> DrafterStack:
    """The drafter that `spec` describes; `draft_model` is what `mtp` stands for, asked when all others abstain."""
    sources: list[Source] = [make(name, **vars(spec.config(name))) for name in spec.ordered() if name != MTP]
    if draft_model is not None:
        sources.append(draft_model)
    return DrafterStack(sources, spec.n_max)


def llama_draft_model(drafter: Source) -> LlamaDraftModel:
    """`drafter` as the `draft_model` of `llama_cpp.Llama`, which reports nothing back: what was accepted is read
    off the next call's tokens, and tokens that do not continue the last call's start a new request."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Adapter(LlamaDraftModel):
        def __init__(self) -> None:
            self.seen = _NO_TOKENS
            self.drafted = _NO_TOKENS

        def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> Tokens:
            ids = np.ascontiguousarray(input_ids, np.int32)
            n = len(self.seen)
            if n == 0 or len(ids) <= n or not np.array_equal(ids[:n], self.seen):
                drafter.begin(ids[:-1])
            elif len(self.drafted):
                size = min(len(self.drafted), len(ids) - n)
                differs = np.flatnonzero(ids[n : n + size] != self.drafted[:size])
                drafter.accept(int(differs[0]) if len(differs) else size)
            self.seen = ids.copy()
            self.drafted = drafter.draft(ids[:-1], int(ids[-1])) if len(ids) else _NO_TOKENS
            return self.drafted

    return Adapter()
