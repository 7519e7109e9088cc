"""How the next token is chosen: the likeliest, one that is drawn, or one that is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .. import llama
from ..speculation.verify import Choice
from .config import Sampling


class Chooser(Protocol):
    """Chooses by the logits that the context holds."""

    def choose(self, n: int = 1) -> list[Choice]:
        """What follows each of the last `n` decoded tokens; more than one where the logits of all were kept."""
        ...

    def close(self) -> None: ...


class Greedy:
    """The likeliest token."""

    def __init__(self, context: llama.Context) -> None:
        self._context = context

    def choose(self, n: int = 1) -> list[Choice]:
        if n == 1:
            return [Choice(*self._context.greedy())]
        return [Choice(*self._context.greedy(i)) for i in range(n)]

    def close(self) -> None:
        pass


class Sampled:
    """A draw from what `sampling`, which has a seed, leaves of the distribution; of one token at a time."""

    def __init__(self, context: llama.Context, sampling: Sampling) -> None:
        assert sampling.seed is not None
        self._context = context
        self._chain = llama.SamplerChain(sampling.temp, sampling.top_k, sampling.top_p, sampling.seed)

    def choose(self, n: int = 1) -> list[Choice]:
        assert n == 1, "drafts need greedy decoding"
        return [_choice(self._context.model, self._chain.sample(self._context))]

    def close(self) -> None:
        self._chain.close()


class Scripted:
    """The tokens of a script, one after the other, whatever the logits are.

    `held`: the tokens that the context holds now, of which the first `prompt_len` are the prompt.
    """

    def __init__(self, context: llama.Context, script: Sequence[int], held: Sequence[int], prompt_len: int) -> None:
        self._model, self._script, self._held, self._prompt_len = context.model, script, held, prompt_len

    def choose(self, n: int = 1) -> list[Choice]:
        end = len(self._held) - self._prompt_len + 1
        # A rejected draft reaches past the end of the script: what is chosen there does not matter.
        last = len(self._script) - 1
        return [_choice(self._model, self._script[min(at, last)]) for at in range(end - n, end)]

    def close(self) -> None:
        pass


def _choice(model: llama.Model, token: int) -> Choice:
    return Choice(token, llama.is_end(model, token), llama.piece(model, token))
