"""The documents' code: every command, snippet and block of output in README.md and docs/*.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cli_process import ROOT

LANGUAGES = {"sh": "command", "python": "snippet", "text": "output", "mermaid": "output"}
"""What a fenced block is, by the word after its fence."""
# What the program says: "cache: auto 23 MiB", "mtp: 79/119 drafts".
_OUTPUT = re.compile(r"^(?:[\w-]+|gate breached): ")
_INLINE = re.compile(r"^(?:[A-Z_]+=\S* )*(?:(?:\S*/)?(?:python3?|pip|bmoe) \S|(?:sh )?\S*tests/run\.sh)")


@dataclass(frozen=True)
class Piece:
    """A command (one line, continued lines joined), a snippet or a block of output, and where it begins."""

    document: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def pieces(path: Path) -> Iterator[Piece]:
    """What a document has, blocks first, then the commands in its sentences. Raises ValueError for an odd fence."""
    text = path.read_text(encoding="utf-8")
    name, prose = path.relative_to(ROOT).as_posix(), []
    lines = [*text.splitlines(), ""]
    at = 0
    while at < len(lines):
        start, line = at, lines[at]
        at += 1
        if line.startswith("```"):
            language = line[3:].strip()
            while lines[at] != "```":
                at += 1
            if language not in LANGUAGES:
                raise ValueError(f"{name}:{start + 1}: a fence is one of {', '.join(LANGUAGES)}, not {language!r}")
            yield from _block(name, start + 2, LANGUAGES[language], lines[start + 1 : at])
            at += 1
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while lines[at].startswith("    "):
                at += 1
            block = [x[4:] for x in lines[start:at]]
            yield from _block(name, start + 1, "output" if _OUTPUT.match(block[0]) else "command", block)
        else:
            prose.append((start + 1, line))
    yield from _inline(name, prose)


def _block(name: str, line: int, kind: str, lines: list[str]) -> Iterator[Piece]:
    if kind != "command":
        yield Piece(name, line, kind, "\n".join(lines))
        return
    start, command = line, ""
    for i, text in enumerate(lines):
        if not command:
            start = line + i
        command += text.removesuffix("\\")
        if not text.endswith("\\"):
            if command.strip() and not command.startswith("#"):
                yield Piece(name, start, kind, command.strip())
            command = ""


def _inline(name: str, prose: list[tuple[int, str]]) -> Iterator[Piece]:
    whole, starts, at = "\n".join(text for _, text in prose), [], 0
    for number, text in prose:
        starts.append((at, number))
        at += len(text) + 1
    for m in re.finditer(r"`([^`]+)`", whole):
        text = " ".join(m[1].split())
        if _INLINE.match(text):
            yield Piece(name, next(n for at, n in reversed(starts) if at <= m.start()), "command", text)


def simple_commands(text: str) -> list[list[str]]:
    """The words of each command of a line, settings of the environment left out. Raises ValueError for other shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;<>()")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word == "&&":
            found.append([])
        elif set(word) <= set("&|;<>()"):
            raise ValueError(f"{word!r} is more shell than is run here")
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=\S*", word):
            found[-1].append(word)
    return found
