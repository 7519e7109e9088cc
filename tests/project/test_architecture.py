"""docs/architecture.md is true of the code: its modules are there, all of them, and imports point down its list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EVERYWHERE = {"__init__", "errors", "version"}
"""Modules that all others may import."""


def _layers() -> dict[str, int]:
    """The layer of each module of bmoe, 0 the topmost, as the table has it; a folder stands for its modules."""
    table = TEXT.split("| layer | modules |")[1].split("\n\n")[0]
    found = {}
    for rank, row in enumerate(re.findall(r"^\| [^-|].*$", table, re.MULTILINE)):
        for name in re.findall(r"`(?:bmoe/)?(\w+)(?:\.py|/)`", row):
            found[name] = rank
    return found


def _module(path: Path) -> str:
    """A module by its name, one of a folder by the folder's."""
    first = path.relative_to(ROOT / "bmoe").parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """What a module imports of bmoe when it runs; of extensions, nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = {id(n) for f in ast.walk(tree) if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.dump(f.test)
             for n in ast.walk(f)}  # fmt: skip
    depth = len(path.relative_to(ROOT / "bmoe").parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth and id(node) not in types:
            names = [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            yield from (n for n in names if not n.startswith("_"))


SOURCES = sorted((ROOT / "bmoe").rglob("*.py"))


def test_every_module_has_a_place() -> None:
    there = {_module(p) for p in SOURCES} - EVERYWHERE
    assert there - set(_layers()) == set(), "add it to the table of modules in docs/architecture.md"
    assert set(_layers()) - there == set(), "it is in docs/architecture.md, but not in bmoe/"
    extensions = {p.name for p in (ROOT / "ext").iterdir() if p.suffix == ".pyx"}
    assert {e for e in extensions if f"`{e}`" not in TEXT} == set(), "add it to the extensions in docs/architecture.md"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    layers, own = _layers(), _module(path)
    if own in EVERYWHERE:
        return
    up = [n for n in _imports(path) if n not in EVERYWHERE and layers[n] < layers[own]]
    assert up == [], f"{own} is below what it imports, by the table of modules in docs/architecture.md"


def test_files_that_documents_name_are_there() -> None:
    """`bmoe/x.py`, `ext/y.pyx (name)` and the like, in every document."""
    missing = []
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(
            r"(?<![\w./-])((?:bmoe|ext|tests|bench|docs)/[\w./]+\.(?:py|pyx|pxi|pxd|h|sh|md|svg))\b", text
        ):
            missing += [f"{document.name}: {name}"] if not (ROOT / name).exists() else []
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            missing += [f"{document.name}: {link}"] if not (document.parent / link).exists() else []
    assert missing == []


def test_functions_of_the_route_are_there() -> None:
    """Every function that the document names in backticks is in the code."""
    code = "\n".join(p.read_text(encoding="utf-8") for p in [*SOURCES, *(ROOT / "ext").rglob("*.p*")])
    names = set(re.findall(r"`((?:\w+\.)?_?[a-z]\w*_\w+)`", TEXT))
    assert {n for n in names if not re.search(rf"\b{n.rpartition('.')[2]}\b", code)} == set()
    assert len(names) > 15
