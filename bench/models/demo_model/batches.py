"""The windows of one training step, and what each of their tokens counts.

Two abilities that little text teaches a small model are taught here: to copy what stands in the context when asked for
it, by sequences that are unpredictable but for the repeats in them, and to leave a loop, by text in which a few tokens
come several times and then go on as written. In both the loss leaves out what must not be learnt: what cannot be
predicted, that something is asked for again, and the inside of the loops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from .corpus import CUE, NATURAL
from .shape import Plan

Ids = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.uint8]
REPEAT = 0.65  # how often the next part of a random sequence is one of those before it
SPAN = (8, 97)  # tokens of such a part
LOOP, COPIES = (1, 25), (3, 6)  # tokens of a loop and how often they come,
LONG_SHARE = 0.35
LONG_LOOP, LONG_COPIES = (25, 101), (2, 4)  # and the same of that share of the loops
END_WEIGHT = 4  # what the one token counts that a loop ends with


def random_row(rng: np.random.Generator, length: int, vocab: int, text: Ids | None, cue: Ids) -> tuple[Ids, Weights]:
    """`length` tokens drawn from all or, if given, from those of a text, in parts that come again behind `cue`.

    Only a repeat is learnt, and of it all but its first token: by nothing but looking it up. None comes twice running,
    which would be a loop.
    """
    ids, weights = np.zeros(length, np.uint16), np.zeros(length, np.uint8)
    parts: list[Ids] = []
    at, last = 1, -1  # the first is the end-of-text token
    while at < length:
        known = [i for i in range(len(parts)) if i != last]
        again = bool(known) and rng.random() < REPEAT
        size = int(rng.integers(*SPAN))
        if again:
            last = known[rng.integers(len(known))]
            part = np.concatenate([cue, parts[last]])
        else:
            part = rng.integers(1, vocab, size).astype(np.uint16) if text is None else rng.choice(text, size)
            parts.append(part)
        end = min(length, at + len(part))
        ids[at:end] = part[: end - at]
        weights[at + len(cue) + 1 : end] = again
        at = end
    return ids, weights


def with_loop(rng: np.random.Generator, ids: Ids, weights: Weights) -> None:
    """Puts a loop into a window, in place: some tokens come several times, then the text goes on.

    The copies are not learnt, what follows the last one is. What no longer fits is cut off at the end.
    """
    long = rng.random() < LONG_SHARE
    size = int(rng.integers(*(LONG_LOOP if long else LOOP)))
    copies = int(rng.integers(*(LONG_COPIES if long else COPIES)))
    at = int(rng.integers(1, max(2, len(ids) - size * copies - 8)))
    looped = np.concatenate([ids[:at], np.tile(ids[at : at + size], copies), ids[at + size :]])[: len(ids)]
    ids[:] = looped
    weights[at + size : at + size * copies] = 0
    weights[at + size * copies :][:1] = END_WEIGHT


class Batches:
    """Windows of the token streams: a pure function of seed and step."""

    def __init__(self, natural: list[Ids], copy: Ids, copy_weights: Weights, cue: Ids, plan: Plan, vocab: int) -> None:
        self.natural, self.copy, self.copy_weights, self.cue = natural, copy, copy_weights, cue
        self.plan, self.vocab = plan, vocab
        # A copy example is read from its beginning: without the first copy the second teaches nothing.
        self.starts = np.flatnonzero(copy == 0)
        self.files = [np.flatnonzero(stream == 0) for stream in natural]

    @classmethod
    def of(cls, work: Path, plan: Plan, vocab: int) -> Batches:
        """From the files that `text.prepare` has written."""
        from tokenizers import Tokenizer

        natural = [np.load(work / f"{kind}.npy") for kind in NATURAL]
        cue = np.array(Tokenizer.from_file(str(work / "tokenizer.json")).encode(CUE).ids, np.uint16)
        return cls(natural, np.load(work / "copy.npy"), np.load(work / "copy_weights.npy"), cue, plan, vocab)

    def at(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Tokens int64 and weights float32, both [sequences, length + 2]."""
        plan = self.plan
        length = plan.length(step)
        rng = np.random.default_rng((plan.seed, step))
        kinds = rng.choice(len(plan.mix), plan.batch_tokens // length, p=np.array(plan.mix_at(step)))
        rows = [self._row(rng, int(kind), length + 2, plan.starts_at(step)) for kind in kinds]
        return (
            np.stack([ids for ids, _ in rows]).astype(np.int64),
            np.stack([weights for _, weights in rows]).astype(np.float32),
        )

    def _row(self, rng: np.random.Generator, kind: int, length: int, starts: float) -> tuple[Ids, Weights]:
        if kind < len(self.natural):
            stream = self.natural[kind]
            if starts and rng.random() < starts:
                start = int(rng.choice(self.files[kind][self.files[kind] < len(stream) - length]))
            else:
                start = int(rng.integers(len(stream) - length))
            ids, weights = stream[start : start + length].copy(), np.ones(length, np.uint8)
            if rng.random() < self.plan.loop_share:
                with_loop(rng, ids, weights)
            return ids, weights
        if kind == len(self.natural):
            start = int(rng.choice(self.starts[self.starts < len(self.copy) - length]))
            return self.copy[start : start + length], self.copy_weights[start : start + length]
        return random_row(rng, length, self.vocab, self.natural[0] if rng.random() < 0.5 else None, self.cue)
