"""`bmoe trace`: what it prints of a trace, its page, and the traces that it refuses."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_process import environment, run
from conftest import OpenEngine, Tiny
from csv_rows import rows_of
from generating import generate

from bench.models.tiny import prompt_ids
from bmoe.analysis.replay import CacheReplay
from bmoe.analysis.route_trace import read_trace
from bmoe.analysis.table import TableError
from bmoe.observe import io_trace, route_trace

PROMPT = prompt_ids(40, 3)
MODEL = {"n_expert": 16, "n_used": 4}


@pytest.fixture
def traced(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> tuple[Path, Path, Any]:
    """A route trace, an I/O trace, and the result of the run that wrote both."""
    route, reads = tmp_path / "route.csv", tmp_path / "io.csv"
    engine = open_engine(
        tiny("qwen3moe", "Q8_0", **MODEL), "few", route_trace=str(route), io_trace=str(reads), overlap=True
    )
    result = generate(engine, PROMPT)
    engine.close()
    return route, reads, result


def test_the_command_gives_the_reported_rate(traced: tuple[Path, Path, Any]) -> None:
    route, reads, result = traced
    done = run("trace", route)
    assert done.code == 0, done.err
    rate = f"{100 * result.decode.hit_rate:.2f} %"
    assert f"run: {rate} hit in decode" in done.out
    assert f"replay: {rate} and" in done.out
    assert "every hit and miss the same" in done.out
    for word in ("reuse:", "predictors:", "hot experts", "votes", "lru", "40 tokens of prefill and 23 of decode"):
        assert word in done.out
    io_done = run("trace", reads)
    assert io_done.code == 0
    assert "decode:" in io_done.out
    assert "prefill:" in io_done.out


def test_the_page_is_self_contained(traced: tuple[Path, Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for path in traced[:2]:
        out = tmp_path / f"{path.stem}.html"
        done = run("trace", path, "--html", out, timeout=60)
        assert done.code == 0, done.err
        page = out.read_text()
        assert page.startswith("<!DOCTYPE html>")
        assert not re.search(r"<(script|img|iframe)\b[^>]*\bsrc=|<link\b|@import", page[: page.index("</style>") + 400])
        assert not re.search(r"<(script|link|iframe)\b[^>]*(src|href)=[\"']?(https?:)?//", page)
        assert page.count("Plotly.newPlot(") >= 2
    assert "Hit rate in decode by memory" in (tmp_path / "route.html").read_text()
    assert "What was resident" in (tmp_path / "route.html").read_text()


def test_without_plotly_the_page_is_refused(traced: tuple[Path, Path, Any], tmp_path: Path) -> None:
    (tmp_path / "plotly.py").write_text("raise ImportError\n")
    import subprocess

    places = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "bmoe", "trace", str(traced[0]), "--html", str(tmp_path / "x.html")],
        capture_output=True, text=True, env=environment(PYTHONPATH=places),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == "bmoe: --html needs plotly: pip install 'bmoe[plots]', or pip install plotly"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a route trace"),
        (b"\x00\xff\x00", "not a text file"),
        (b"# io_trace v1\n", "cut off"),
        (b"# io_trace v1\nturn,step\n", "not an I/O trace"),
        (b"# io_trace v1\n" + ",".join(io_trace.IO_COLUMNS).encode() + b"\n0,1,2\n", ":3: not a whole row"),
        (b"# route_trace v1\nturn,phase,step,layer,slot,expert\n", "the preamble has no line"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    done = run("trace", tmp_path / "t.csv")
    assert done.code == 1
    assert message in done.last
    assert str(tmp_path / "t.csv") in done.last
    assert len(done.err.splitlines()) == 1


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    done = run("trace", tmp_path / "none.csv")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "No such file" in done.last


def test_events_that_nobody_writes_are_refused(traced: tuple[Path, Path, Any], tmp_path: Path) -> None:
    text = traced[0].read_text()
    for event in ("burn:3", "warm:0", "forget", "load:99:1", "reject:x"):
        bad = tmp_path / "bad.csv"
        bad.write_text(re.sub(r"left:\d+", event, text, count=1))
        with pytest.raises(TableError, match="event"):
            CacheReplay.recorded(read_trace(bad)).run()


def test_columns_are_found_by_name(traced: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """Another order, and a column that nobody knows."""
    lines = traced[0].read_text().splitlines()
    preamble = [line for line in lines if line.startswith("#")]
    rows = rows_of(traced[0])
    out = io.StringIO()
    names = ["new", *reversed(route_trace.ROUTE_COLUMNS)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows([{**r, "new": "x"} for r in rows])
    (tmp_path / "other.csv").write_text("\n".join(preamble) + "\n" + out.getvalue())
    a, b = (CacheReplay.recorded(read_trace(p)).run() for p in (traced[0], tmp_path / "other.csv"))
    assert a == b
