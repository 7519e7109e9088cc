"""`python -m bmoe report`: what it reads, what it makes of it, and files that it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_process import run
from run_files import row, steady, write_run

from bmoe.cli.commands.report import short_names


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: "", "not '# bmoe run v1'"),
        (lambda t: "turn,phase\n1,2\n", "not '# bmoe run v1'"),
        (lambda t: t.replace("# arch=", "# arch"), "the preamble is damaged"),
        (lambda t: t.replace('"bmoe-0"', '"bmoe'), "the preamble is damaged: 'engine'"),
        (lambda t: t.replace(",wall_ms,", ",wall,"), "no column 'wall_ms'"),
        (lambda t: t.replace(",wall_ms,", ",wall_ms,wall_ms,"), "more than one column 'wall_ms'"),
        (lambda t: t.replace("\n2,9,", "\n2,"), ":9: not a whole row"),
        (lambda t: t.replace("\n2,9,3.", "\n2,9,x."), ":9: not a whole row"),
        (lambda t: t.replace("\n2,9,3.000000", "\n2,9,nan"), ":9: not a whole row"),
        (lambda t: t.replace("\n2,9,3.000000", "\n2,9,inf"), ":9: not a whole row"),
        (lambda t: t.replace("\n2,9,3.000000", "\n2,9,"), ":9: not a whole row"),
        (lambda t: t[: t.index("\n0,9,") + 1], "no rows after line 6"),
        (lambda t: t[: t.index("\nstep,") + 1], "no line of column names"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    path = write_run(tmp_path / "a.csv", [row(i, 3.0) for i in range(6)])
    path.write_text(change(path.read_text()))
    done = run("report", path)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert done.err.startswith(f"bmoe: {path}:")
    assert says in done.err


def test_files_that_are_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"GGUF\xff\xfe\x00")
    for path, says in (
        (tmp_path / "b", "not a text file"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "directory"),
    ):
        done = run("report", path)
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert says in done.err
    assert run("report").code == 2


def test_names_tell_files_apart() -> None:
    assert short_names([Path("/a/x.csv"), Path("/b/y.csv")]) == ["x.csv", "y.csv"]
    assert short_names([Path("/a/x.csv"), Path("/b/x.csv")]) == ["a/x.csv", "b/x.csv"]
    assert short_names([Path("x.csv"), Path("x.csv")]) == ["1: x.csv", "2: x.csv"]


def test_the_report_of_one_run(tmp_path: Path) -> None:
    done = run("report", write_run(tmp_path / "a.csv", [row(0, 500), *(row(i, 10.0) for i in range(1, 21))]))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("a.csv: tiny.gguf (qwen3moe), bmoe-0, 21 tokens, stopped: length\n")
    for part in (
        r"first token after 0.500 s, 1.0 MiB read before it",  # (of the first row)
        r"decode: +100.00 tok/s +\[100.00, 100.00\]",
        r"read: +1.00 MiB/token",
        r"hit: +75.00 %",
        r"time: computing 75.0 %, waiting for reads 25.0 %",
        r"MiB by cause: base 21.0",
    ):
        assert re.search(part, done.out), (part, done.out)


def test_the_report_of_two_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a.csv", steady(100, 10.0))
    b = write_run(tmp_path / "b.csv", steady(100, 5.0), end=False, overlap=False)
    done = run("report", a, b, "--html", tmp_path / "r.html")
    assert done.code == 0, done
    assert "no summary at its end" in done.err
    assert "  overlap: True | False" in done.out
    assert re.search(r"b.csv: 2\d\d\.\d\d, x 2.000 \[1.9\d\d, 2.0\d\d\] better", done.out)
    assert re.search(r"x 1.000 \[1.000, 1.000\] no difference that the tokens show", done.out)
    assert "time: computing 75.0 %" in done.out
    page = (tmp_path / "r.html").read_text()
    check_page(page, 8)
    for title in ("Tokens per second", "95 % intervals", "Where the time went: a.csv", "Bytes read by cause: b.csv"):
        assert title in page


def check_page(page: str, n_figures: int) -> None:
    """A page that stands alone: as many figures as there should be, each with data that a browser can parse."""
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:)?//", page)
    calls = re.findall(r"Plotly\.newPlot\(\s*\"[^\"]+\",\s*(\[.*?\]),\s*\{\"", page, re.DOTALL)
    assert len(calls) == n_figures
    assert all(json.loads(call) for call in calls)


def test_output_that_cannot_be(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a.csv", steady(5, 1.0))
    before = a.read_text()
    done = run("report", a, "--html", a)
    assert (done.code, a.read_text()) == (2, before)
    assert "--html" in done.err
    assert run("report", a, "--html", tmp_path / "no" / "r.html").code == 2
