"""The picture of the packages in docs/architecture.md, drawn from what the packages say of themselves.

    python tests/project/package_picture.py > docs/packages.svg

A package stands above all that it imports. Arrows that follow from others are left out.
"""

from __future__ import annotations

import ast
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BOX, GAP, FLOOR, HEIGHT = 1000, 270, 50, 96, 54


def packages(root: Path = ROOT) -> dict[str, tuple[str, set[str]]]:
    """Name -> what its docstring says first, and what it says that it imports."""
    found = {}
    for init in sorted((root / "bmoe").glob("*/__init__.py")):
        doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        said = re.search(r"^Imports: ([\w, ]+)\.$", doc, re.MULTILINE)
        names = set() if not said or said[1] == "nothing" else set(said[1].split(", "))
        found[init.parent.name] = (doc.split("\n")[0], names)
    return found


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each, 0 the lowest: one above the highest that it imports."""
    known: dict[str, int] = {}
    while len(known) < len(imports):
        for name, below in imports.items():
            if name not in known and below <= known.keys():
                known[name] = 1 + max((known[b] for b in below), default=-1)
    return known


def needed(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that do not follow from two or more others."""

    def reach(name: str) -> set[str]:
        return imports[name] | {far for b in imports[name] for far in reach(b)}

    return [
        (name, b)
        for name, below in sorted(imports.items())
        for b in sorted(below)
        if not any(b in reach(other) for other in below - {b})
    ]


def wrap(text: str, width: int) -> list[str]:
    """The first two lines of a text."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    lines.append(line)
    return lines if len(lines) <= 2 else [lines[0], lines[1][: width - 1].rstrip(" ,;:.") + "\u2026"]


def picture(found: dict[str, tuple[str, set[str]]]) -> str:
    imports = {name: below for name, (_, below) in found.items()}
    level = floors(imports)
    top = max(level.values())
    place: dict[str, tuple[float, float]] = {}
    for floor in range(top + 1):
        row = sorted(n for n in level if level[n] == floor)
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2
        for i, name in enumerate(row):
            place[name] = left + i * (BOX + GAP), 16 + (top - floor) * FLOOR
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {32 + top * FLOOR + HEIGHT}" '
        'font-family="sans-serif">',
        "<title>The packages of bmoe: each imports only what lies below it</title>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{32 + top * FLOOR + HEIGHT}" fill="#fff"/>',
    ]
    for above, below in needed(imports):
        (x1, y1), (x2, y2) = place[above], place[below]
        share = (sorted(b for a, b in needed(imports) if a == above).index(below) + 1) / (
            sum(a == above for a, _ in needed(imports)) + 1
        )
        x1, x2 = x1 + BOX * share, x2 + BOX / 2
        out.append(
            f'<path d="M{x1:.0f} {y1 + HEIGHT}C{x1:.0f} {y1 + HEIGHT + 30} {x2:.0f} {y2 - 34} {x2:.0f} {y2 - 2}" '
            'fill="none" stroke="#667" stroke-width="1.3" marker-end="url(#a)"/>'
        )
    for name, (x, y) in sorted(place.items()):
        out.append(
            f'<rect x="{x:.0f}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" fill="#eef3fa" stroke="#7a90b0"/>'
            f'<text x="{x + 9:.0f}" y="{y + 18}" font-size="14" font-weight="bold">bmoe/{name}</text>'
        )
        out += [
            f'<text x="{x + 9:.0f}" y="{y + 33 + 13 * i}" font-size="10" fill="#333">{escape(line)}</text>'
            for i, line in enumerate(wrap(found[name][0], 44))
        ]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(picture(packages()))
