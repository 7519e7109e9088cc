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
# Tables of numbers teach a model of this size nothing and are a fortieth of the text.
TABLE_SHARE = 0.35
_TABLE = re.compile(r"[0-9\\]")
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
    seen: set[int] = set()
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
            if len(text) < 200 or is_table(text) or hash(text) in seen:
                continue
            seen.add(hash(text))
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


def repetitions(documents: Iterable[Document], count: int, seed: int, longest: int = 2800) -> list[str]:
    """Texts in which a definition comes twice, other ones between: what teaches a model to copy.

    Half of the second copies have a name changed throughout, as an edited copy does. No text is longer than `longest`
    characters, so that both copies fit in one training window.
    """
    draw = random.Random(seed)
    pools = [blocks for d in documents if d.kind == "library" and len(blocks := definitions(d.text)) >= 4]
    texts = []
    for _ in range(count):
        blocks = draw.choice(pools)
        first, *between = draw.sample(blocks, min(len(blocks), draw.randint(1, 4)))
        again = first
        names = [n for n in set(re.findall(r"\b[a-z_]{4,}\b", first)) if first.count(n) > 1]
        if names and draw.random() < 0.5:
            old = draw.choice(sorted(names))
            again = re.sub(rf"\b{old}\b", draw.choice(("value", "item", "name", "source", "result", old + "s")), first)
        parts = [first]
        for block in between:
            if sum(map(len, parts)) + len(block) + len(again) < longest:
                parts.append(block)
        parts.append(again)
        texts.append("\n".join(parts))
    return texts
