"""Every command and every snippet of README.md and docs/*.md is run, long ones in a shortened form.

A command without a rule fails, with a line that says where to add one. Nothing is skipped.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_process import ROOT, environment, run
from documents import Piece, documents, pieces, simple_commands

from bench.models.make_model import make_model

HERE = "tests/project/test_document_commands.py"
SECONDS = 600.0
"""How long a command may take: a hundred times what it does, for machines with other work."""


@dataclass(frozen=True)
class Short:
    """How a command is shortened: flags that are set, whatever the document gives them, and how the run ends.

    `added`: flags that are set where the document does not. `says`: what must be in its output. `why`: for a run that
    only begins, the reason.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    added: dict[str, list[str]] = field(default_factory=dict)
    code: int = 0
    says: str = ""
    why: str = ""


BENCH: dict[str, Short] = {
    "bench/models/make_model.py": Short({"--layers": ["2"], "--scale": ["16"]}, says="2 layers"),
    "bench/studies/streaming.py": Short(
        {"--repeats": ["1"], "--tokens": ["2"], "--budgets": ["20"], "--prompt-tokens": ["8"], "--ctx": ["64"]},
        says="the same tokens in every cell",
    ),
    "bench/studies/prefetch.py": Short({"--repeats": ["1"], "--tokens": ["3"], "--budgets": ["30"]}, says="next-layer"),
    "bench/studies/warm_start.py": Short(
        {"--repeats": ["1"], "--tokens": ["4"], "--history": ["8"]}, says="the same tokens with and without"
    ),
    "bench/studies/speculation.py": Short(
        {"--repeats": ["1"], "--tokens": ["4"], "--chars": ["80"], "--ctx": ["1024"]},
        added={"--texts": ["copy"]},
        says="|---|---|---|",
    ),
    "bench/studies/quality.py": Short(
        {"--chunks": ["1"], "--window": ["32"], "--parts": ["0.5"], "--thresholds": ["0.5"], "--used": ["3"]},
        says="perplexity",
    ),
    "bench/studies/inspect_accuracy.py": Short(
        {"--rounds": ["1"]},
        added={
            "--tokens": ["4"],
            "--prompt-tokens": ["8"],
            "--budgets": ["100 %"],
            "--scale": ["16"],
            "--within": ["99"],
        },
        says="range",
    ),
    "bench/studies/replay.py": Short({"--budgets": ["20"]}, says="belady"),
    "bench/studies/eviction.py": Short(),
    "bench/gates/bench_drafters.py": Short(says="bytes held per token"),
    "bench/studies/drafter_compare.py": Short(
        {"--sdist": ["."]},
        code=1,
        says="no llama.cpp source with common/ngram-map.cpp under",
        why="it downloads 70 MB and compiles them: here it is given a folder without sources, and says so",
    ),
}
"""Scripts of bench/. They run in a folder where the models and traces that they name are tiny ones."""

COMMANDS: dict[str, Short] = {
    "": Short({"-n": ["4"]}),
    "trace": Short(),
    "report": Short(says="tok/s"),
    "inspect": Short(added={"--no-measure": []}, says="experts:"),
    "perplexity": Short({"-c": ["32"], "--chunks": ["1"]}, says="perplexity"),
    "abi": Short({"--only": ["names: bindings"]}, says="names: bindings"),
}
"""Commands of `python -m bmoe`, "" where it generates."""

PLACEHOLDERS: dict[str, list[str]] = {
    "MODEL": ["model.gguf"],
    "PROMPT": ["Once upon a time there was"],
    "N": ["20"],
    "P": ["lru"],
    "trace FILE": ["routes.csv"],
    "report RUN.csv": ["run.csv"],
    "perplexity FILE": ["text.txt"],
    "../shared/data/route-traces/*.gz": ["routes.csv", "routes-2.csv"],
    "../shared/data/route-traces/*.route.csv.gz": ["routes.csv"],
}
"""What stands for a word of a document, or for such a word of one command ("trace FILE")."""

INSTALLS: dict[str, str] = {
    "python3 -m venv .venv": '-m venv "$venv"',
    ".venv/bin/pip install -e .": "-m pip install --quiet -e '.[dev]'",
    "pip install bmoe[plots]": "-m pip install --quiet -e '.[dev]'",
}
"""What installs, and where tests/run.sh does the same, or more: CI runs that script in a fresh environment."""

SNIPPETS: dict[str, dict[str, Any]] = {
    "docs/drafting.md": {"prompt": [1, 2, 3] * 9, "history": [1, 2, 3] * 9, "last": 1, "n_accepted": 1},
}
"""Names that a document's snippets take for granted."""

ALL = [piece for path in documents() for piece in pieces(path)]
FIRST = list({piece.text: piece for piece in reversed(ALL) if piece.kind == "command"}.values())[::-1]
SNIPPET_PIECES = [p for p in ALL if p.kind == "snippet"]

BENCH_RUNNER = """
import runpy, sys
sys.path.insert(0, {root!r})
from bench import cgroup
cgroup.drop_page_cache = lambda: True  # others on this machine may need it
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# ---- rules ----------------------------------------------------------------------------------------


def no_rule(piece: Piece, what: str, table: str) -> str:
    return f"{piece}: {what}: add it to {table} in {HERE}, so that the command is run"


def shorten(words: Sequence[str], short: Short) -> list[str]:
    """The words with the flags of `short` set: those that are there are replaced where they stand."""
    found, skipping = list[str](), False
    left = {**{flag: values for flag, values in short.added.items() if flag not in words}, **short.flags}
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            skipping = word in left
            if skipping:
                found += [word, *left.pop(word)]
                continue
        if not skipping:
            found.append(word)
    return found + [x for flag, values in left.items() for x in (flag, *values)]


def fill(piece: Piece, words: Sequence[str], command: str = "") -> list[str]:
    """The words with what stands for the document's placeholders."""
    found = []
    for word in words:
        values = PLACEHOLDERS.get(f"{command} {word}", PLACEHOLDERS.get(word))
        if values is None and re.fullmatch(r"[A-Z][A-Z_]*", word):
            pytest.fail(no_rule(piece, f"nothing stands for {word!r} of `{piece.text}`", "PLACEHOLDERS"))
        found += values if values is not None else [word]
    return found


# ---- what they run on -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny files in the shapes that the documents' benchmarks use: a uniform router, a skewed one, one with a head."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for router in ("uniform", "zipf"):
        found[router] = make_model(folder / f"{router}.gguf", layers=2, router=router, scale=16).path
    found["hybrid"] = make_model(folder / "hybrid.gguf", "qwen3.6-35b-a3b", layers=4, scale=16, mtp=True).path
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """Where commands run, with what documents name: routes and reads of a run, a text."""
    folder = tmp_path_factory.mktemp("place")
    words = ["--cache-mb", "20", "--overlap", "-n", "40", "-t", "1", "-p", "def read_config(path):"]
    done = run(
        *words,
        "--route-trace",
        "routes.csv",
        "--io-trace",
        "reads.csv",
        "--csv",
        "run.csv",
        cwd=folder,
        timeout=SECONDS,
    )
    assert done.code == 0, done.err
    shutil.copy(folder / "routes.csv", folder / "routes-2.csv")
    shutil.copy(folder / "run.csv", folder / "other.csv")
    (folder / "text.txt").write_text("def read_config(path):\n    return open(path).read()\n" * 8)
    return folder


@pytest.fixture
def links(place: Path, models: dict[str, Path]) -> Callable[[Sequence[str]], None]:
    """Puts a model where the words of a command name one."""

    def link(words: Sequence[str]) -> None:
        for word in words:
            if re.fullmatch(r"[\w.-]+\.gguf", word) and not (place / word).exists():
                kind = "zipf" if word.startswith(("zipf", "warm")) else "uniform"
                (place / word).symlink_to(models["hybrid" if word.startswith("hybrid") else kind])

    return link


# ---- the runs -------------------------------------------------------------------------------------


def check(piece: Piece, short: Short, code: int | None, out: str) -> None:
    assert code == short.code, f"{piece}: exit code {code}\n{out[-2000:]}"
    assert short.says in out, f"{piece}: {short.says!r} is not in its output\n{out[-2000:]}"
    assert "Traceback" not in out


def run_bmoe(piece: Piece, words: list[str], place: Path, links: Callable[[Sequence[str]], None]) -> None:
    """A command of `python -m bmoe`."""
    command = words[0] if words and not words[0].startswith("-") else ""
    if command not in COMMANDS:
        pytest.fail(no_rule(piece, f"no rule for `bmoe {command}`", "COMMANDS"))
    rest = fill(piece, words[1:] if command else words, command)
    short = COMMANDS[command]
    if "--help" not in rest:
        rest = shorten(rest, short)
    if "--mtp" in rest:
        rest = [w for i, w in enumerate(rest) if w != "-m" and rest[i - 1] != "-m"]  # the demo model has a head
    links(rest)
    done = run(*([command] if command else []), *rest, cwd=place, timeout=SECONDS)
    check(piece, short, done.code, done.out + done.err)


def run_script(piece: Piece, words: list[str], place: Path, links: Callable[[Sequence[str]], None]) -> None:
    """A script of bench/."""
    script = words[0]
    if script not in BENCH:
        pytest.fail(no_rule(piece, f"no rule for `{script}`", "BENCH"))
    rest = shorten(fill(piece, words[1:]), BENCH[script])
    if any(cell.startswith("mtp") for word in rest for cell in word.split(";")) and "hybrid.gguf" not in rest:
        rest = [w for w in rest if not w.endswith(".gguf")]
    links(rest)
    if script == "bench/models/make_model.py":
        rest[rest.index("--out") + 1] = f"made-{piece.document.rpartition('/')[2]}-{piece.line}.gguf"
    if script == "bench/studies/drafter_compare.py":
        (place / "empty").mkdir(exist_ok=True)
        rest[rest.index("--sdist") + 1] = "empty"
    runner = BENCH_RUNNER.format(root=str(ROOT))
    command = [sys.executable, "-c", runner, str(ROOT / script), *rest]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    check(piece, BENCH[script], done.returncode, done.stdout + done.stderr)


def run_pytest(piece: Piece, words: list[str]) -> None:
    """A suite of benchmarks: each of its tests once, without timing, but for the long ones.

    Of the gates, the exact ones of the drafters: .ci/run runs all, and `--rebase` would write a file.
    """
    if "--gate" in words:
        words = ["bench", "--gate", "-m", "exact", "-k", "drafters"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--benchmark-disable",
        "-k",
        "not 131072",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{piece}: {done.stdout[-2000:]}"


@pytest.mark.parametrize("piece", FIRST, ids=str)
def test_command(piece: Piece, place: Path, links: Callable[[Sequence[str]], None]) -> None:
    try:
        commands = simple_commands(piece.text)
    except ValueError as e:
        pytest.fail(f"{piece}: `{piece.text}`: {e}")
    for words in commands:
        if " ".join(words) in INSTALLS or words in (["tests/run.sh"], ["sh", "tests/run.sh"]):
            continue  # test_what_installs_is_what_ci_runs
        program = words[0].rpartition("/")[2]
        if program in ("python", "python3") and words[1:3] == ["-m", "bmoe"]:
            run_bmoe(piece, words[3:], place, links)
        elif program == "bmoe":
            run_bmoe(piece, words[1:], place, links)
        elif program in ("python", "python3") and words[1:3] == ["-m", "pytest"]:
            run_pytest(piece, words[3:])
        elif program in ("python", "python3") and words[1:2] and words[1].startswith("bench/"):
            run_script(piece, words[1:], place, links)
        else:
            pytest.fail(no_rule(piece, f"no rule for `{' '.join(words)}`", "INSTALLS, BENCH or COMMANDS"))


@pytest.mark.parametrize("piece", SNIPPET_PIECES, ids=str)
def test_snippet(
    piece: Piece, place: Path, links: Callable[[Sequence[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    links(re.findall(r'"([\w.-]+\.gguf)"', piece.text))
    names = {"__name__": "snippet", **SNIPPETS.get(piece.document, {})}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(piece.text, str(piece), "exec"), names)
    except NameError as e:
        pytest.fail(no_rule(piece, f"a snippet does not run by itself ({e})", "SNIPPETS"))
    assert out.getvalue() or "print" not in piece.text


def test_what_installs_is_what_ci_runs() -> None:
    """tests/run.sh makes the environment and installs as the README does, with more extras; CI runs it."""
    script = (ROOT / "tests" / "run.sh").read_text()
    for command, same in INSTALLS.items():
        assert same in script, command
    assert '-m pytest "$@"' in script
    assert re.search(r"^tests/run\.sh ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    extras = dict(re.findall(r"^(\w+) = \[\n((?:    .*\n)+)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert "bmoe[test]" in extras["dev"]
    assert "bmoe[plots]" in extras["test"]


# ---- the test itself ------------------------------------------------------------------------------


def test_every_rule_is_used() -> None:
    """A rule whose command has gone from the documents goes too."""
    text = "\n".join(p.text for p in ALL if p.kind == "command")
    assert [s for s in BENCH if s not in text] == []
    assert [c for c in COMMANDS if c and f"bmoe {c}" not in text] == []
    used = {" ".join(words) for p in FIRST for words in simple_commands(p.text)}
    assert set(INSTALLS) - used == set()
    assert all(any(key.split()[-1] in p.text for p in FIRST) for key in PLACEHOLDERS)


def _of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    monkeypatch.setattr("documents.ROOT", tmp_path)
    (tmp_path / "x.md").write_text(text)
    return list(pieces(tmp_path / "x.md"))


def test_commands_are_found_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "Run `python -m bmoe\n--help`, see `bmoe/cli/main.py` or `bmoe.cli`.\n\n"
        '    python bench/a.py --x \\\n        --y\n    bmoe -p "a b"\n\n'
        "    cache: auto 23 MiB\n      more of it\n\n"
        "```sh\n# a comment\npip install x && .venv/bin/python -m bmoe\n```\n\n"
        "```python\nimport bmoe\n```\n"
    )
    found = [(p.kind, p.line, p.text) for p in _of(tmp_path, text, monkeypatch)]
    assert found == [
        ("command", 4, "python bench/a.py --x     --y"),
        ("command", 6, 'bmoe -p "a b"'),
        ("output", 8, "cache: auto 23 MiB\n  more of it"),
        ("command", 13, "pip install x && .venv/bin/python -m bmoe"),
        ("snippet", 17, "import bmoe"),
        ("command", 1, "python -m bmoe --help"),
    ]
    assert simple_commands('A=1 python x "b c" && tests/run.sh') == [["python", "x", "b c"], ["tests/run.sh"]]
    with pytest.raises(ValueError, match=r"'\|' is more shell"):
        simple_commands("bmoe | head")
    with pytest.raises(ValueError, match="a fence is one of"):
        _of(tmp_path, "```json\n{}\n```\n", monkeypatch)


UNKNOWN = {
    "make install": "no rule for `make install`: add it to INSTALLS, BENCH or COMMANDS",
    "python bench/new.py --x": "no rule for `bench/new.py`: add it to BENCH",
    "python -m bmoe dance": "no rule for `bmoe dance`: add it to COMMANDS",
    "bmoe -m THING": "nothing stands for 'THING' of `bmoe -m THING`: add it to PLACEHOLDERS",
    "bmoe | head": "is more shell than is run here",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_command_fails(text: str, place: Path, links: Callable[[Sequence[str]], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match=re.escape(UNKNOWN[text])):
        test_command(Piece("docs/x.md", 7, "command", text), place, links)


def test_a_wrong_flag_fails(place: Path, links: Callable[[Sequence[str]], None]) -> None:
    for text in (
        "python -m bmoe --no-such",
        "python bench/studies/replay.py --no-such ../shared/data/route-traces/*.gz",
    ):
        with pytest.raises(AssertionError, match="exit code 2"):
            test_command(Piece("docs/x.md", 7, "command", text), place, links)


def flags_of(words: Sequence[str]) -> Iterator[str]:
    return (w for w in words if w.startswith("-"))


def test_shortened_commands_keep_their_flags() -> None:
    short = Short({"--repeats": ["1"], "--tokens": ["2"]}, added={"--only": ["x"], "--seed": ["0"]})
    given = ["m.gguf", "--repeats", "3", "--only", "a", "b", "--free", "--cells", "x;y"]
    assert shorten(given, short) == [
        "m.gguf", "--repeats", "1", "--only", "a", "b", "--free", "--cells", "x;y", "--seed", "0", "--tokens", "2",
    ]  # fmt: skip
    assert set(flags_of(given)) <= set(flags_of(shorten(given, short)))
