"""`python -m bmoe report`: what it reads, what it makes of it, and files that it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cli_process import run

from bmoe.accounting.bytes_by_cause import CAUSES
from bmoe.accounting.token_record import COLUMNS, TIME_COLUMNS
from bmoe.analysis import run_page, run_stats
from bmoe.analysis.run_csv import CsvError, read_run
from bmoe.cli.commands.report import short_names
from bmoe.observe.telemetry import csv_head, csv_row, csv_summary

Row = dict[str, float | None]


def row(step: int, wall: float, batch: int = 1, **values: float | None) -> Row:
    """One row: `wall` ms, three quarters of it computing and one waiting; all else 0."""
    out: Row = dict.fromkeys(COLUMNS, 0)
    out |= {"step": step, "steps": 9, "wall_ms": wall, "compute_ms": 0.75 * wall, "stall_ms": 0.25 * wall}
    out |= {"phase": int(step > 0), "mtp_batch": batch if step else 0, "hits": 3 * batch, "misses": batch}
    return out | {"read_bytes": batch << 20, "base_bytes": batch << 20, "cgroup_limit_mib": None} | values


def write(path: Path, rows: Sequence[Row], end: bool = True, **config: object) -> Path:
    run_facts = {"engine": "bmoe-0", "model": "/m/tiny.gguf", "arch": "qwen3moe", "config": {"overlap": True, **config}}
    text = csv_head(run_facts) + "".join(csv_row(list(r.values())) for r in rows)
    path.write_text(text + (csv_summary({"stop": "length"}) if end else ""))
    return path


def steady(n: int, wall: float) -> list[Row]:
    rng = np.random.default_rng(1)
    return [row(0, 500.0), *(row(i, wall + float(rng.normal(0, 0.05 * wall))) for i in range(1, n))]


# ---- reading -----------------------------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rows = [row(0, 9.5), row(1, 2.0, tight_usage_mib=None), row(2, 4.0)]
    got = read_run(write(tmp_path / "a.csv", rows, cache_mb="20"))
    assert got.columns["wall_ms"].tolist() == [9.5, 2.0, 4.0]
    assert np.isnan(got.columns["tight_usage_mib"]).tolist() == [False, True, False]
    assert got.decode.tolist() == [False, True, True]
    assert got.config == {"overlap": True, "cache_mb": "20"}
    assert (got.summary, got.notes) == ({"stop": "length"}, [])


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """Wherever it is cut, it is read up to there with notes, or refused with one line."""
    path = write(tmp_path / "a.csv", steady(6, 3.0))
    whole = path.read_bytes()
    head = whole.index(b"\n0,") + 1
    first = whole.index(b"\n", head) + 1
    for at in [*range(0, head, 41), *range(head, len(whole), 7), len(whole)]:
        path.write_bytes(whole[:at])
        if at < first - 1:
            with pytest.raises(CsvError) as e:
                read_run(path)
            assert str(e.value).startswith(str(path))
            assert "\n" not in str(e.value)
        elif at == first - 1:
            continue  # a whole row that only lacks its line break
        else:
            got = read_run(path)
            rows = whole[head:at].count(b"\n") - whole[head:at].count(b"# summary ")
            assert len(got) in (rows, rows + 1)
            assert any("no summary" in note for note in got.notes) == (got.summary is None) == (at < len(whole))


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
    path = write(tmp_path / "a.csv", [row(i, 3.0) for i in range(6)])
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


# ---- statistics ------------------------------------------------------------------------------------------------


def test_groups_are_batches(tmp_path: Path) -> None:
    rows = [row(0, 100), row(1, 9, 3), row(2, 0.5, 0), row(3, 0.5, 0), row(4, 4, 1), row(5, 8, 2), row(6, 1, 0)]
    g = run_stats.groups(read_run(write(tmp_path / "a.csv", rows)))
    assert g.tokens.tolist() == [3, 1, 2]
    assert g.sums["wall_ms"].tolist() == [10, 4, 9]
    rate, wall = run_stats.METRICS[:2]
    assert rate.value(g) == pytest.approx(1e3 * 6 / 23)
    assert wall.value(g) == pytest.approx(23 / 6)
    # Each sample is made of whole groups: three drawn from three.
    possible = {
        sum(g.tokens[i] for i in (a, b, c)) / sum(g.sums["wall_ms"][i] for i in (a, b, c)) * 1e3
        for a in range(3) for b in range(3) for c in range(3)
    }  # fmt: skip
    samples = run_stats.resampled(g, [rate], n=500)[:, 0]
    assert {round(s, 6) for s in samples.tolist()} <= {round(p, 6) for p in possible}


def test_intervals_cover(tmp_path: Path) -> None:
    """Of many runs with a known rate, about 95 of 100 intervals have it; the seed decides all of it."""
    metric = run_stats.METRICS[1]
    rng, inside = np.random.default_rng(3), 0
    for _ in range(120):
        n = 60
        sums = {name: np.zeros(n) for name in run_stats.SUMMED} | {"wall_ms": rng.gamma(4.0, 2.5, n)}
        g = run_stats.Groups(np.ones(n), sums)
        e = run_stats.estimates(g, [metric])[0]
        inside += e.low <= 10.0 <= e.high
        assert e == run_stats.estimates(g, [metric])[0]
        assert e.low <= e.value <= e.high
    assert 102 <= inside <= 119


def test_a_comparison_tells_runs_apart(tmp_path: Path) -> None:
    slow = run_stats.groups(read_run(write(tmp_path / "a.csv", steady(200, 10.0))))
    same = run_stats.groups(read_run(write(tmp_path / "b.csv", steady(200, 10.0))))
    fast = run_stats.groups(read_run(write(tmp_path / "c.csv", steady(200, 8.0))))
    rate = run_stats.METRICS[:1]
    e = run_stats.ratios(slow, fast, rate)[0]
    assert e.value == pytest.approx(1.25)
    assert 1.2 < e.low < 1.25 < e.high < 1.3
    e = run_stats.ratios(slow, same, rate)[0]
    assert e.low < 1.0 < e.high
    nothing = run_stats.Groups(np.empty(0), {name: np.empty(0) for name in run_stats.SUMMED})
    assert all(math.isnan(v) for v in run_stats.ratios(slow, nothing, rate)[0])


def test_a_moving_rate() -> None:
    rate = run_page.moving_rate(np.array([100.0, 100.0, 0.0, 300.0]), 2)
    assert rate.tolist() == pytest.approx([10.0, 10.0, 20.0, 2000 / 300])


def test_names_tell_files_apart() -> None:
    assert short_names([Path("/a/x.csv"), Path("/b/y.csv")]) == ["x.csv", "y.csv"]
    assert short_names([Path("/a/x.csv"), Path("/b/x.csv")]) == ["a/x.csv", "b/x.csv"]
    assert short_names([Path("x.csv"), Path("x.csv")]) == ["1: x.csv", "2: x.csv"]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_report_of_one_run(tmp_path: Path) -> None:
    done = run("report", write(tmp_path / "a.csv", [row(0, 500), *(row(i, 10.0) for i in range(1, 21))]))
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
    a = write(tmp_path / "a.csv", steady(100, 10.0))
    b = write(tmp_path / "b.csv", steady(100, 5.0), end=False, overlap=False)
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
    a = write(tmp_path / "a.csv", steady(5, 1.0))
    before = a.read_text()
    done = run("report", a, "--html", a)
    assert (done.code, a.read_text()) == (2, before)
    assert "--html" in done.err
    assert run("report", a, "--html", tmp_path / "no" / "r.html").code == 2


def test_columns_are_what_the_original_has() -> None:
    """Their places, too: a program that reads by position goes on working."""
    assert ",".join(COLUMNS[:25]) == (
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
        "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
        "mem_available_mib,mem_free_mib,swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms"
    )
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert {f"{cause}_bytes" for cause in CAUSES} | set(TIME_COLUMNS) <= set(COLUMNS)
