"""What a generation is asked for, checked in one place. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from .config import Sampling


@dataclass(frozen=True)
class Request:
    """One generation: `Engine.generate` says what the settings are. `ids`: the prompt.

    `stop_tokens`: ids that end it, special tokens that `stop` names, and the string of each. Raises UsageError for
    what makes no sense.
    """

    ids: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_at_end: bool = True
    script: Sequence[int] | None = None
    stop: Sequence[str] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    records: bool = False

    def __post_init__(self) -> None:
        if not self.ids:
            raise UsageError("the prompt is empty: give at least one token")
        if self.max_tokens < 0:
            raise UsageError(f"--n-predict: {self.max_tokens} is negative; give 0 or more tokens")
        if self.script is not None and len(self.script) < self.max_tokens:
            raise UsageError(f"the script has {len(self.script)} tokens, {self.max_tokens} are asked for")

    def check(self, n_ctx: int, n_vocab: int, drafts: bool) -> None:
        """Raises UsageError where a context of `n_ctx` tokens, `n_vocab` ids or a drafter cannot serve it."""
        if len(self.ids) > n_ctx:
            raise UsageError(
                f"the prompt has {len(self.ids)} tokens, the context holds {n_ctx}: "
                f"use -c {len(self.ids) + self.max_tokens} or more"
            )
        check_ids(self.ids, n_vocab)
        if not self.sampling.greedy and drafts:
            raise UsageError(
                f"--temp {self.sampling.temp}: speculation needs greedy decoding; drop --temp or --spec-type"
            )


def check_ids(ids: Sequence[int], n_vocab: int) -> None:
    """Raises UsageError where one of `ids` is no token of a vocabulary of `n_vocab`."""
    bad = next((t for t in ids if not 0 <= t < n_vocab), None)
    if bad is not None:
        raise UsageError(f"token id {bad} is not in the vocabulary of {n_vocab}")
