"""Texts to draft on: what a model is asked for, and what it is made to answer. All from this machine's own files."""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that the target is made to follow."""

    name: str
    prompt: str
    answer: str


def _source(limit: int) -> str:
    return inspect.getsource(textwrap)[:limit]


def copy(limit: int = 2400) -> Text:
    """A file in the prompt, repeated unchanged; asked for with the line that the demo model was taught."""
    code = _source(limit)
    return Text("copy", f"Repeat this file unchanged.\n{code}\n# Again:\n", code)


def edited_copy(limit: int = 2400, every: int = 30) -> Text:
    """The same with one line in `every` changed."""
    code = _source(limit)
    rng, lines = random.Random(5), code.splitlines(keepends=True)
    for i in range(every // 2, len(lines), every):
        word = "".join(rng.choice("abcdefghij") for _ in range(8))
        lines[i] = f"        self.{word} = {rng.randrange(1000)}\n"
    return Text("edited copy", f"Rename what needs it.\n{code}\n# edited:\n", "".join(lines))


def prose(limit: int = 2400) -> Text:
    """Prose that follows its own beginning: the licence's text."""
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    return Text("prose", text[:600], text[600 : 600 + limit])


def new_code(limit: int = 2400) -> Text:
    """Code that was not in the prompt."""
    code = inspect.getsource(random)[1500:]
    return Text("new code", code[:600], code[600 : 600 + limit])


def records(limit: int = 2400) -> Text:
    """JSON records: the same keys, other values."""
    rng = random.Random(11)
    rows = [
        {"id": rng.randrange(10**6), "name": rng.choice(["Ada", "Bo", "Cy", "Di", "Ed", "Fay"]), "score": rng.random(),
         "tags": rng.sample(["red", "green", "blue", "old"], 2), "active": rng.random() < 0.5}
        for _ in range(60)
    ]  # fmt: skip
    text = json.dumps(rows, indent=1)
    return Text("json records", text[:500], text[500 : 500 + limit])


def noise(limit: int = 2400) -> Text:
    """Nothing to find: letters at random."""
    rng = random.Random(3)
    text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(300 + limit))
    return Text("nothing to find", text[:300], text[300:])


def all_texts(limit: int = 2400) -> list[Text]:
    return [copy(limit), edited_copy(limit), prose(limit), new_code(limit), records(limit), noise(limit)]
