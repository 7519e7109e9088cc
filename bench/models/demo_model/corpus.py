"""The text: the standard library of one Python on this machine and the sources of its documentation.

Both are under the PSF License Version 2.0, documentation examples under the Zero-Clause BSD licence as well. No file
outside these two trees is read.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LICENSE = "PSF License Version 2"
DOCS = ("/usr/share/doc/python3.{minor}/html/_sources", "/usr/share/doc/python3/html/_sources")
# One file in fifty, by a hash of its name: the same ones on every machine.
HELD_OUT = 50
NATURAL = ("library", "docs", "tests")  # kinds of documents
# Tables of numbers teach a model of this size nothing and are a fortieth of the text.
TABLE_SHARE = 0.35
_TABLE = re.compile(r"[0-9\\]")
AGAIN = 0.55  # how often the next definition of a copy example has come before
# What asks for a copy. Only behind it is copying taught: a model that is taught it everywhere repeats itself.
CUE = "# Again:"
_DEFINITION = re.compile(r"^( *)(?:async def|def|class) \w+", re.M)


@dataclass(frozen=True)
class Document:
    """One file: where it was, of which kind ("library", "tests", "docs"), its text, and whether it is held out."""

    name: str
    kind: str
    text: str
    held_out: bool


def held_out(name: str) -> bool:
    """Whether a file of this name is kept from training."""
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def is_table(text: str) -> bool:
    """Whether more than a third of a text is digits and backslashes."""
    return len(_TABLE.findall(text)) > TABLE_SHARE * max(1, len(text))


def kind_of(relative: Path) -> str:
    parts = relative.parts
    return "tests" if "test" in parts or "tests" in parts or "idle_test" in parts else "library"


def collect(stdlib: Path, docs: Path) -> list[Document]:
    """All usable files of both trees, in the order of their names; duplicates by content once.

    Raises FileNotFoundError where a tree is missing or has no text.
    """
    found: list[Document] = []
    seen: set[str] = set()
    for root, pattern, source in ((stdlib, "*.py", "lib"), (docs, "*.rst*", "doc")):
        files = sorted(p for p in root.rglob(pattern) if "site-packages" not in p.parts and p.is_file())
        if not files:
            raise FileNotFoundError(f"no {pattern} below {root}")
        for path in files:
            relative = path.relative_to(root)
            try:
                text = path.read_text("utf-8").replace("\r\n", "\n").strip() + "\n"
            except UnicodeDecodeError:
                continue  # a test of other encodings
            if len(text) < 200 or is_table(text) or text in seen:
                continue
            seen.add(text)
            name = f"{source}/{relative.as_posix()}"
            kind = "docs" if source == "doc" else kind_of(relative)
            found.append(Document(name, kind, text, held_out(name)))
    return found


def definitions(text: str, least: int = 200, most: int = 1600) -> list[str]:
    """Functions and classes of a Python text of a length in characters between the two, with their indentation."""
    starts = [(m.start(), len(m.group(1))) for m in _DEFINITION.finditer(text)]
    blocks = []
    for i, (at, indent) in enumerate(starts):
        end = next((s for s, other in starts[i + 1 :] if other <= indent), len(text))
        block = text[at:end].rstrip() + "\n"
        if least <= len(block) <= most:
            blocks.append(block)
    return blocks


@dataclass(frozen=True)
class Repetition:
    """A text in which definitions come again; `unscored`: the parts [begin, end) in characters, that one is asked for
    and which, that a reader cannot know beforehand."""

    text: str
    unscored: tuple[tuple[int, int], ...]


def repetitions(documents: Iterable[Document], count: int, seed: int, least: int = 3600) -> list[Repetition]:
    """Texts of definitions of one file, of which about half have come before in the text: they teach to copy.

    One that comes again stands behind a line `CUE`, and never directly behind itself twice. In half of the texts no
    definition is longer than 600 characters, so that a window of 512 tokens holds several. Texts are `least`
    characters or a definition more, less where the file has too few.
    """
    draw = random.Random(seed)
    pools = [blocks for d in documents if d.kind == "library" and len(blocks := definitions(d.text, 120)) >= 4]
    made = []
    for _ in range(count):
        most = draw.choice((600, 1600))
        left = [b for b in draw.choice(pools) if len(b) <= most]
        draw.shuffle(left)
        text, before, unscored = "", list[str](), []
        repeats, last = 0, None
        while len(text) < least and (left or repeats < 2 * len(before)):
            known = [b for b in before if b != last]
            if known and (not left or draw.random() < AGAIN):
                last = block = draw.choice(known)
                begin = _DEFINITION.match(block)
                assert begin is not None  # every block begins with one
                asked = f"{begin.group(1)}{CUE}\n"
                unscored.append((max(0, len(text) - 1), len(text) + len(asked) + begin.end()))
                text += asked
                repeats += 1
            elif left:
                block = left.pop()
                if block in text or any(b in block for b in before):
                    continue  # a method of a class that is here
                before.append(block)
            else:
                break
            text += block + "\n"
        made.append(Repetition(text, tuple(unscored)))
    return made
