"""What a model's own head drafted along its own text, recorded, and replayed as the head of another model.

    python bench/studies/recorded.py [MODEL] --texts prose copy     # prints the record, JSON

A file of random weights has the sizes of a real model and none of its words: its head is never right. Replayed, the
target follows the recorded text, the head's graphs run and stream as they would, and what is drafted in each place, and
how sure of it the head is, comes from the record. Acceptance is the recorded model's, time and bytes are the file's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from bench.studies import texts
from bmoe.engine.engine import Engine
from bmoe.speculation.mtp import Head, MtpSource, Tokens

PLACES = 4
"""Tokens that the recorded head drafts at each position."""


@dataclass
class Record:
    """A text and what a head drafted along it.

    `prompt`, `script`: token ids. `drafts[i]`: `PLACES` tokens drafted after `script[i]`, in the place of
    `script[i + 1]` and those after it; `sure[i]`: the head's probability of each, of the whole vocabulary.
    """

    name: str
    prompt: list[int]
    script: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    sure: list[list[float]] = field(default_factory=list)

    def accepted(self, i: int, width: int = PLACES) -> int:
        """How many of the first `width` tokens drafted after `script[i]` the script goes on with."""
        n = 0
        for drafted, token in zip(self.drafts[i][:width], self.script[i + 1 :], strict=False):
            if drafted != token:
                break
            n += 1
        return n


def decide(record: Record, at: int, place: int, p_min: float) -> tuple[int, bool]:
    """The token that draft place `place` after `script[at]` has, and whether the head was sure enough of it."""
    if at >= len(record.drafts) or place >= len(record.drafts[at]):
        return record.script[-1], False
    return record.drafts[at][place], p_min <= 0.0 or record.sure[at][place] >= p_min


class Recorder(MtpSource):
    """Drafts `PLACES` tokens at every position, writes them down, and offers none: every step is a plain one."""

    def __init__(self, head: Head, record: Record) -> None:
        super().__init__(head, PLACES)
        head.clear()  # of what another source has fed it with
        self.record = record

    def draft(self, history: Tokens, last: int, n_max: int | None = None) -> Tokens:
        assert len(history) - len(self.record.prompt) == len(self.record.drafts), "a position was left out"
        self.record.drafts.append([])
        self.record.sure.append([])
        super().draft(history, last, PLACES)
        self.trim(0)
        return np.empty(0, np.int32)

    def choose(self, i: int) -> tuple[int, bool]:
        token, _ = super().choose(i)
        logits = self.head.output_logits(i)
        self.record.drafts[-1].append(token)
        self.record.sure[-1].append(float(1.0 / np.exp(logits - logits[token]).sum(dtype=np.float64)))
        return token, True


class Replayed(MtpSource):
    """A head that runs its graphs and looks at their logits as ever, but drafts what is in `record`."""

    def __init__(self, head: Head, record: Record, n_max: int, p_min: float) -> None:
        super().__init__(head, n_max, p_min)
        head.clear()
        if n_max > PLACES:
            raise ValueError(f"{n_max} tokens to draft, and {PLACES} are recorded at each position")
        self.record = record
        self._at = self._place = 0

    def draft(self, history: Tokens, last: int, n_max: int | None = None) -> Tokens:
        self._at, self._place = len(history) - len(self.record.prompt), 0
        assert self.record.script[self._at] == last, "the target does not follow the recorded text"
        return super().draft(history, last, n_max)

    def choose(self, i: int) -> tuple[int, bool]:
        super().choose(i)
        place, self._place = self._place, self._place + 1
        return decide(self.record, self._at, place, self.p_min)


def record(engine: Engine, name: str, prompt: list[int], n: int) -> Record:
    """The model's own greedy text after `prompt`, `n` tokens, and what its head drafts along it.

    `engine` is open with the head (`types=("mtp",)`); its head and drafter are as before afterwards.
    """
    from bmoe.speculation import DrafterStack

    assert engine.sequence.head is not None
    if engine.sequence.head.head.n_heads > 1:
        raise ValueError("a chain of heads is as long as it is: only a single head can be recorded")
    kept = engine.sequence.head, engine.drafting.drafter
    try:
        engine.sequence.head, engine.drafting.drafter = None, DrafterStack([])
        script = [t.id for t in engine.generate(prompt, max_tokens=n, stop_at_end=False)]
        found = Record(name, list(prompt), script)
        engine.sequence.context.clear()
        engine.sequence.ids.clear()
        engine.sequence.head = Recorder(kept[0].head, found)
        engine.drafting.drafter = DrafterStack([engine.sequence.head])
        for _ in engine.generate(prompt, max_tokens=n, script=script, stop_at_end=False):
            pass
    finally:
        engine.sequence.head, engine.drafting.drafter = kept
        kept[0].head.clear()
        kept[0].resume(0)
        engine.sequence.context.clear()
        engine.sequence.ids.clear()
    return found


def fits(record: Record, n_vocab: int) -> bool:
    """Whether all ids of the record are ids of a vocabulary of `n_vocab` tokens."""
    ids = [*record.prompt, *record.script, *(t for row in record.drafts for t in row)]
    return max(ids) < n_vocab


def load(text: str) -> dict[str, Record]:
    """Records by name, from what the command printed."""
    return {row["name"]: Record(**row) for row in json.loads(text)}


def show(found: Record) -> str:
    """How far the head was right, one line."""
    rows: list[Any] = [found.accepted(i) for i in range(len(found.drafts))]
    parts = [f"{100 * sum(n > place for n in rows) / max(1, len(rows)):.0f} %" for place in range(PLACES)]
    return (
        f"recorded {found.name}: {len(found.script)} tokens, drafts right up to place 1 to {PLACES}: {', '.join(parts)}"
    )


def main() -> int:
    from bmoe.speculation import DraftSpec

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="a GGUF with a head (the demo model)")
    p.add_argument("--texts", nargs="*", default=["prose", "copy"])
    p.add_argument("--tokens", type=int, default=100)
    p.add_argument("--chars", type=int, default=2400)
    p.add_argument("--ctx", type=int, default=2048)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    found = []
    with Engine.open(
        args.model, ctx=args.ctx, threads=args.threads, draft=DraftSpec(types=("mtp",), draft=PLACES, policy="always")
    ) as engine:
        for text in (t for t in texts.all_texts(args.chars) if t.name in args.texts):
            found.append(record(engine, text.name, engine.tokenize(text.prompt), args.tokens))
    for one in found:
        print(show(one), file=sys.stderr)
    print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
