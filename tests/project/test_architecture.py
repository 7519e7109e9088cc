"""The layers are what the packages say: what each may import, nothing back up, no circles, and docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import package_picture
import pytest
from cli_process import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EVERYWHERE = {"errors", "version"}
"""Modules at the root that every package may import."""
ROOMS = {"__init__", "__main__", "drafting"}
"""Modules at the root above all packages: the library's face and the command's."""


class Import(NamedTuple):
    """An import statement of a module, by the full name of what it loads: `bmoe.host.memory`."""

    line: int
    target: str


def module_name(path: Path, root: Path) -> str:
    """`bmoe/host/memory.py` is `bmoe.host.memory`; a package is its `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """All that a module imports of bmoe: relative or absolute, for types only, inside functions, by a string.

    `from a import b` loads `a.b` where that is a module, else `a`.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from _compiled_imports(text)
        return
    name = module_name(path, root)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "bmoe")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base.split(".")[0] == "bmoe":
                yield from (Import(node.lineno, _loaded(base, a.name, root)) for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            yield from _named_imports(node, package)


def _compiled_imports(text: str) -> Iterator[Import]:
    """Of Cython: `cimport` and `import`, which all stand at the beginning of a line."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*(?:from|cimport|import)\s+(bmoe(?:\.\w+)*)", line):
            yield Import(number, found[1])


def _loaded(base: str, name: str, root: Path) -> str:
    at = root.joinpath(*base.split("."), name)
    compiled = list(at.parent.glob(f"{name}.*.so")) + list(at.parent.glob(f"{name}.pyi"))
    return f"{base}.{name}" if at.with_suffix(".py").exists() or (at / "__init__.py").exists() or compiled else base


def _named_imports(call: ast.Call, package: str) -> Iterator[Import]:
    """`import_module(".x", __name__)` and the like; a name that is put together is the package's own business."""
    if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        name = call.args[0].value
        absolute = resolve_name(name, package) if name.startswith(".") else name
        if absolute.split(".")[0] == "bmoe":
            yield Import(call.lineno, absolute)


def package_of(module: str) -> str:
    """The package of a module: its first name below bmoe, "" for the root's own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in ROOMS | EVERYWHERE else ""


def packages(root: Path) -> dict[str, set[str]]:
    """What each package may import, as its docstring says: `Imports: a, b.` or `Imports: nothing.`"""
    found = {}
    for init in sorted((root / "bmoe").glob("*/__init__.py")):
        doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        said = re.search(r"^Imports: ([\w, ]+)\.$", doc, re.MULTILINE)
        assert said, f"{init.parent.name}/__init__.py does not say `Imports: ...`"
        found[init.parent.name] = set() if said[1] == "nothing" else {n.strip() for n in said[1].split(",")}
    return found


def sources(root: Path) -> list[Path]:
    """Python below bmoe/, and Cython below ext/bmoe/."""
    compiled = [p for p in (root / "ext").rglob("*") if p.suffix in (".pyx", ".pxd", ".pxi")]
    return sorted([*(root / "bmoe").rglob("*.py"), *compiled])


def home(path: Path, root: Path) -> tuple[Path, str]:
    """The folder that a source's module name counts from, and that name."""
    base = root / "ext" if path.is_relative_to(root / "ext") else root
    return base, module_name(path, base)


def wrong_arrows(root: Path) -> list[str]:
    """Imports that no package allows itself, one line each."""
    allowed, wrong = packages(root), []
    for path in sources(root):
        base, name = home(path, root)
        own = package_of(name)
        if not own and name.rpartition(".")[2] not in EVERYWHERE:
            continue  # the library's face is above everything
        for line, target in imports_of(path, base if path.suffix != ".py" else root):
            theirs = package_of(target)
            if theirs == own or (target.split(".")[1:2] and target.split(".")[1] in EVERYWHERE):
                continue
            if theirs not in allowed.get(own, set()):
                wrong.append(f"{path.relative_to(root)}:{line}: {own or name} may not import {target}")
    return wrong


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of more than one node that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def module_graph(root: Path) -> dict[str, set[str]]:
    """Which Python module imports which, at any time; a package's face counts as a module of its own."""
    graph: dict[str, set[str]] = {}
    for path in sorted((root / "bmoe").rglob("*.py")):
        name = module_name(path, root)
        graph[name] = {target for _, target in imports_of(path, root)} - {name}
    return graph


# ---- the project ----------------------------------------------------------------------------------


def test_packages_import_what_they_say() -> None:
    assert wrong_arrows(ROOT) == []


def test_no_package_is_above_itself() -> None:
    assert circles(packages(ROOT)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(module_graph(ROOT)) == []


def test_a_package_says_only_what_it_imports() -> None:
    """An arrow that nothing takes any more goes."""
    taken: dict[str, set[str]] = {name: set() for name in packages(ROOT)}
    for path in sources(ROOT):
        base, name = home(path, ROOT)
        if own := package_of(name):
            targets = imports_of(path, base if path.suffix != ".py" else ROOT)
            taken[own] |= {package_of(t) for _, t in targets} - {own, ""}
    assert {name: may - taken[name] for name, may in packages(ROOT).items() if may - taken[name]} == {}


def test_the_document_has_the_packages_in_order() -> None:
    """The table of docs/architecture.md: every package, each above all that it imports, and what that is."""
    rows = re.findall(r"^\| `bmoe/(\w+)/` \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
    allowed = packages(ROOT)
    assert [name for name, *_ in rows] == list(dict.fromkeys(name for name, *_ in rows))
    assert {name for name, *_ in rows} == set(allowed)
    order = [name for name, *_ in rows]
    for name, _, imports in rows:
        said = {n.strip(" `") for n in imports.split(",")} - {"nothing"}
        assert said == allowed[name], f"docs/architecture.md: {name}"
        assert all(order.index(other) > order.index(name) for other in said), f"docs/architecture.md: {name} is too low"
    extensions = {f"{p.parent.name}/{p.name}" for p in (ROOT / "ext").rglob("*.pyx")}
    assert {e for e in extensions if f"`{e}`" not in TEXT} == set(), "add it to the extensions in docs/architecture.md"


def test_the_picture_is_of_these_packages() -> None:
    drawn = package_picture.picture(package_picture.packages())
    assert (ROOT / "docs" / "packages.svg").read_text(encoding="utf-8") == drawn, "run tests/project/package_picture.py"


def test_tests_follow_the_packages() -> None:
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and list(p.glob("test_*.py"))}
    assert folders - set(packages(ROOT)) <= {"bench", "project", "support"}


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
    code = "\n".join(p.read_text(encoding="utf-8") for p in sources(ROOT))
    names = set(re.findall(r"`((?:\w+\.)?_?[a-z]\w*_\w+)`", TEXT))
    assert {n for n in names if not re.search(rf"\b{n.rpartition('.')[2]}\b", code)} == set()
    assert len(names) > 15


# ---- the test can fail ----------------------------------------------------------------------------

ARROWS_UP = {
    "relative": "from ..engine import engine\n",
    "relative to a face": "from .. import engine\n",
    "absolute": "from bmoe.engine.engine import Engine\n",
    "plain": "import bmoe.engine.engine\n",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..engine.engine import Engine\n",
    "in a function": "def late():\n    from ..engine.engine import Engine\n    return Engine\n",
    "by name": "from importlib import import_module\nimport_module('bmoe.engine.engine')\n",
    "by a relative name": "import importlib\nimportlib.import_module('..engine.engine', __package__)\n",
}


@pytest.fixture
def invented(tmp_path: Path) -> Path:
    """A tree of two layers, engine above host, with a compiled module in each."""
    for package, imports in (("engine", "host"), ("host", "nothing")):
        folder = tmp_path / "bmoe" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f'"""A package.\n\nImports: {imports}.\n"""\n')
        (tmp_path / "ext" / "bmoe" / package).mkdir(parents=True)
    (tmp_path / "bmoe" / "__init__.py").write_text("from .engine.engine import Engine\n")
    (tmp_path / "bmoe" / "errors.py").write_text("")
    (tmp_path / "bmoe" / "engine" / "engine.py").write_text("from ..errors import E\nfrom ..host import memory\n")
    (tmp_path / "bmoe" / "host" / "memory.py").write_text("from ..errors import E\n")
    (tmp_path / "ext" / "bmoe" / "host" / "_memory.pyx").write_text("from bmoe.errors import E\n")
    return tmp_path


def test_an_invented_tree_passes(invented: Path) -> None:
    assert wrong_arrows(invented) == []
    assert circles(module_graph(invented)) == []


@pytest.mark.parametrize("text", ARROWS_UP.values(), ids=ARROWS_UP)
def test_an_arrow_up_is_seen(invented: Path, text: str) -> None:
    (invented / "bmoe" / "host" / "memory.py").write_text(text)
    (found,) = wrong_arrows(invented)
    assert found.startswith("bmoe/host/memory.py:")
    assert found.split(": ")[1].startswith("host may not import bmoe.")


def test_an_arrow_up_is_seen_in_compiled_code(invented: Path) -> None:
    (invented / "ext" / "bmoe" / "host" / "_memory.pyx").write_text("from bmoe.engine._loop cimport Loop\n")
    assert wrong_arrows(invented) == ["ext/bmoe/host/_memory.pyx:1: host may not import bmoe.engine._loop"]


def test_a_module_for_everybody_stays_below(invented: Path) -> None:
    (invented / "bmoe" / "errors.py").write_text("from .host import memory\n")
    assert wrong_arrows(invented) == ["bmoe/errors.py:1: bmoe.errors may not import bmoe.host.memory"]


def test_a_circle_within_a_package_is_seen(invented: Path) -> None:
    (invented / "bmoe" / "host" / "memory.py").write_text("def f():\n    from . import probe\n")
    (invented / "bmoe" / "host" / "probe.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                                                         "    from .memory import f\n")  # fmt: skip
    assert circles(module_graph(invented)) == [["bmoe.host.memory", "bmoe.host.probe"]]


def test_packages_that_allow_each_other_are_seen(invented: Path) -> None:
    (invented / "bmoe" / "host" / "__init__.py").write_text('"""A package.\n\nImports: engine.\n"""\n')
    assert circles(packages(invented)) == [["engine", "host"]]
