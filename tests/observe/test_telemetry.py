"""Records of tokens: they add up, files of them stay whole, and they cost next to nothing."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path
from typing import Any

import held
import pytest
from cli_process import run, start
from conftest import SMALL, OpenEngine, Tiny
from csv_rows import rows_of

import bmoe
from bmoe.accounting.token_record import COLUMNS, TIME_COLUMNS
from bmoe.analysis.run_csv import read_run
from bmoe.analysis.table import TableError
from bmoe.cli import main
from bmoe.observe import telemetry
from bmoe.observe.record_format import csv_row, json_line
from bmoe.speculation import DraftSpec

FAST = ("-t", "1", "-c", "512")


# ---- records --------------------------------------------------------------------------------------------


def test_records_add_up_to_the_result(tiny: Tiny, open_engine: OpenEngine) -> None:
    for flags in ({}, {"overlap": True}, {"draft": DraftSpec(types=("ngram-mod", "ngram"), policy="always")}):
        engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", **flags)
        for turn in range(2):
            script = [9, 5, 6, 7, 8, 11] * 5
            generation = engine.generate(
                [5, 6, 7, 8] * 6, max_tokens=30, stop_at_end=False, script=script, records=True
            )
            tokens = list(generation)
            records = [t.record for t in tokens if t.record is not None]
            result = generation.result
            assert [r.step for r in records] == list(range(30))
            assert {(r.turn, r.steps) for r in records} == {(turn, 30)}
            assert [r.phase for r in records] == [0] + [1] * 29
            assert [r.token_id for r in records] == result.token_ids
            total = records[0].stream
            for r in records[1:]:
                total = total.plus(r.stream)
            both = result.prefill.plus(result.decode)
            exact = ("plans", "routed", "hits", "misses", "evictions", "rereads", "streamed", "reads", "bytes")
            assert [getattr(total, n) for n in exact] == [getattr(both, n) for n in exact]
            assert records[0].stream.bytes == result.prefill.bytes
            for cause, size in result.flash_split.bytes.items():
                assert sum(r.flash.get(cause, (0, 0))[0] for r in records) == size
                assert sum(r.flash.get(cause, (0, 0))[1] for r in records) == result.flash_split.rereads[cause]
            # A group's whole cost sits on its first row.
            assert sum(r.drafted for r in records) == result.spec.drafted
            assert sum(r.accepted for r in records) == result.spec.accepted
            assert sum(r.batch > 0 for r in records) == result.spec.decodes
            assert all(r.batch == r.drafted + 1 for r in records if r.batch)
            at = 1
            while at < len(records):
                group = records[at : at + 1 + records[at].accepted]
                assert group[0].batch > 0
                for r in group[1:]:
                    assert (r.batch, r.stream.plans, r.stream.bytes, r.time.graph, r.time.draft) == (0, 0, 0, 0, 0)
                at += len(group)
            assert sum(r.time.draft for r in records[1:]) / 1e9 == pytest.approx(result.spec.draft_s)
        if "draft" in flags:
            assert result.spec.accepted > 0


def test_without_records_there_are_none(tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the system asked, or a file opened."""
    monkeypatch.setattr(telemetry, "Telemetry", None)
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    before = held.files()
    generation = engine.generate([1, 2, 3], max_tokens=4)
    assert [t.record for t in generation] == [None] * len(generation.result.token_ids)
    assert held.files() == before


def test_files_are_closed_however_a_generation_ends(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    before = len(held.files())
    for how in ("whole", "closed", "cancelled"):
        generation = engine.generate([1, 2, 3], max_tokens=5, stop_at_end=False, records=True)
        next(generation)
        assert len(held.files()) > before
        if how == "closed":
            generation.close()
        elif how == "cancelled":
            engine.cancel()
        list(generation)
        assert len(held.files()) == before


def test_what_is_not_measured_is_not_zero(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("llama", **SMALL))
    token = list(engine.generate([1, 2, 3], max_tokens=2, stop_at_end=False, records=True))[-1]
    assert token.record is not None
    host = replace_host(token.record.host, rss=None, swap=None, tight_limit=None, dense_resident=None)
    record = token.record._replace(host=host)
    values = record.values()
    assert list(values) == list(COLUMNS)
    none = {name for name, value in values.items() if value is None}
    # A dense model routes nothing: there is no hit rate.
    assert none >= {"rss_mib", "swap_mib", "tight_limit_mib", "dense_resident_frac", "cache_hit_pct"}
    fields = dict(zip(COLUMNS, csv_row(list(values.values())).rstrip("\n").split(","), strict=True))
    assert {name for name, field in fields.items() if not field} == none
    line = json.loads(json_line(record, "é\n"))
    assert {name for name, value in line.items() if value is None} == none
    assert line["text"] == "é\n"


def replace_host(host: Any, **changes: Any) -> Any:
    return host._replace(**changes)


# ---- files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    base = tmp_path_factory.mktemp("csv")
    flags = ("--csv", base / "run.csv", "--metrics-json", base / "m.json", "--progress", "-q")
    done = run("-m", moe, "-p", "Hello there", "-n", "12", *FAST, "--ignore-eos", *flags)
    assert done.code == 0, done
    return base / "run.csv", json.loads((base / "m.json").read_text()), [json.loads(x) for x in done.err.splitlines()]


def test_csv_json_and_metrics_are_one_account(written: tuple[Path, dict[str, Any], list[Any]]) -> None:
    path, m, lines = written
    rows = rows_of(path)
    assert len(rows) == len(lines) == m["tokens"] == 12
    for row, line in zip(rows, lines, strict=True):
        assert list(row) == list(COLUMNS)
        for name, field in row.items():
            assert (float(field) if field else None) == (pytest.approx(line[name]) if field else line[name])
        assert sum(float(row[c]) for c in TIME_COLUMNS) == pytest.approx(float(row["wall_ms"]), abs=1e-4)
    assert [line["token_id"] for line in lines] == m["token_ids"]
    decode = rows[1:]

    def total(name: str) -> float:
        return sum(float(row[name]) for row in decode)

    assert total("read_bytes") == m["expert"]["bytes_read"]
    assert float(rows[0]["read_bytes"]) == m["prefill"]["expert"]["bytes_read"]
    for name in ("hits", "misses", "evictions", "rereads", "routed"):
        assert total(name) == m["expert"][name]
    assert sum(m["flash_split"].values()) == m["run"]["bytes_read"] > 0
    for cause, size in m["flash_split"].items():
        assert sum(int(row[f"{cause}_bytes"]) for row in rows) == size
    assert total("stall_ms") + total("mtp_draft_stall_ms") == pytest.approx(1e3 * m["stall_s"], abs=1e-4)
    assert total("mgmt_ms") == pytest.approx(1e3 * m["plan_s"], abs=1e-4)
    assert total("io_ms") == pytest.approx(1e3 * m["disk_s"], abs=1e-4)
    for name, part in (("wall_ms", "wall_s"), ("compute_ms", "compute_s"), ("loop_overhead_ms", "loop_s")):
        assert total(name) == pytest.approx(1e3 * m["time"]["decode"][part], abs=1e-4)
    graph = sum(total(c) for c in ("compute_ms", "stall_ms", "mgmt_ms", "build_ms", "rest_ms"))
    assert graph == pytest.approx(1e3 * m["decode_s"], abs=1e-3)


def test_the_head_and_the_end_of_a_file(written: tuple[Path, dict[str, Any], list[Any]]) -> None:
    path, m, _ = written
    read = read_run(path)
    assert read.facts["engine"] == f"bmoe-{bmoe.__version__}"
    assert (read.facts["model"], read.facts["arch"]) == (m["model"], m["arch"])
    assert read.config == {**m["config"], "n_predict": 12}
    assert read.summary is not None
    for name in ("tokens", "stop", "decode_tok_s", "total_s", "ttft_s", "major_faults"):
        assert read.summary[name] == m[name]
    assert read.summary["read_bytes"] == m["run"]["bytes_read"]
    assert read.notes == []
    assert m["bound"]["sentence"].startswith(("bound by", "cannot tell"))


def test_progress_goes_beside_the_text(moe: Path) -> None:
    flags = ("-m", moe, "-p", "Hello", "-n", "6", *FAST, "--ignore-eos")
    plain, told = run(*flags), run(*flags, "--progress")
    assert told.out == plain.out
    lines = [json.loads(line) for line in told.err.splitlines() if line.startswith("{")]
    assert len(lines) == 6
    assert plain.out.startswith("".join(line["text"] for line in lines))
    assert "generation: 6 tokens" in told.err


def test_a_run_that_is_killed_leaves_whole_rows(moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    process = start("-m", moe, "-p", "Hi", "-n", "100000", "-t", "1", "-c", "200000", "--ignore-eos", "--csv", path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 60):
        time.sleep(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    text = path.read_text()
    assert text.endswith("\n")
    rows = rows_of(path)
    assert len(rows) > 40
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    found = read_run(path)
    assert len(found) == len(rows)
    assert found.notes == [f"{path}: no summary at its end: the run was killed, or its disk was full"]


def test_rows_come_as_tokens_do(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is there when the next token is asked for."""
    path, seen = tmp_path / "run.csv", list[int]()
    real = bmoe.engine.generation.Generation.__next__

    def watched(self: bmoe.engine.generation.Generation) -> bmoe.Token:
        seen.append(len(rows_of(path)) if path.exists() else -1)
        return real(self)

    monkeypatch.setattr(bmoe.engine.generation.Generation, "__next__", watched)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    argv = ["-m", str(moe), "-p", "Hi", "-n", "5", *FAST, "--ignore-eos", "-q", "--csv", str(path)]
    assert main.main(argv) == 0
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_file_not_the_run(moe: Path, tmp_path: Path) -> None:
    flags = ("-m", moe, "-p", "Hello", "-n", "40", *FAST, "--ignore-eos")
    plain = run(*flags)
    done = run(*flags, "-q", "--csv", "/dev/full")
    assert (done.code, done.out) == (0, plain.out)
    assert done.err == "bmoe: --csv: ended early: cannot write /dev/full: No space left on device\n"
    # A limit on the size of files stands for the disk's end: what did not fit is cut off at a whole row.
    path = tmp_path / "run.csv"
    done = run(*flags, "-q", "--csv", path, limits={"RLIMIT_FSIZE": 8192})
    assert (done.code, done.out) == (0, plain.out)
    assert done.err == f"bmoe: --csv: ended early: cannot write {path}: File too large\n"
    assert path.read_text().endswith("\n")
    assert 5 < len(read_run(path)) < 40


def test_paths_that_cannot_be_written(moe: Path, tmp_path: Path) -> None:
    flags = ("-m", moe, "-p", "Hello", "-n", "2", *FAST)
    for path, says in ((tmp_path / "no" / "r.csv", "No such file"), (tmp_path, "directory"), (moe, "is read by")):
        done = run(*flags, "--csv", path)
        assert done.code == 2
        assert done.err.startswith(f"bmoe: --csv: {'cannot write ' if 'No such' in says else ''}{path}")
        assert says in done.err
        assert done.err.count("\n") == 1
    done = run(*flags, "--csv", tmp_path / "a", "--metrics-json", tmp_path / "a")
    assert done.code == 2
    assert "is what --metrics-json writes" in done.err


def test_a_run_that_generates_nothing(moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    done = run("-m", moe, "-p", "Hello", "-n", "0", *FAST, "--csv", path)
    assert done.code == 0, done
    assert rows_of(path) == []
    with pytest.raises(TableError, match="no rows after line"):
        read_run(path)
    assert "cannot tell what bounds this run: 0 tokens" in done.err
