"""The metrics file of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_process import FAST, check_usage, run

import bmoe


@pytest.fixture(scope="module")
def metrics(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("metrics") / "m.json"
    done = run("-m", moe, "-p", "Hello there", "-n", "12", *FAST, "--ignore-eos", "--metrics-json", path)
    assert done.code == 0, done
    assert list(path.parent.iterdir()) == [path]
    return json.loads(path.read_text())


PROMISED = {
    *("version", "model", "arch", "config", "token_ids", "tokens", "prefill_tokens", "load_s", "ttft_s", "stop"),
    *("prefill_tok_s", "decode_tok_s", "effective_tok_s", "stall_s", "major_faults", "peak_rss_bytes", "expert"),
}


PROMISED_OF_EXPERTS = {
    *("bytes_read", "bytes_per_token", "hits", "misses", "hit_rate", "evictions", "rereads"),
    *("budget_bytes", "resident_bytes"),
}


def test_metrics_have_what_was_asked_for(metrics: dict[str, Any]) -> None:
    assert metrics.keys() >= PROMISED
    assert metrics["expert"].keys() >= PROMISED_OF_EXPERTS
    assert metrics["prefill"]["expert"].keys() == metrics["expert"].keys()
    assert metrics["version"] == bmoe.__version__
    assert (metrics["arch"], metrics["stop"]) == ("qwen3moe", "length")
    assert metrics["config"]["threads"] == 1
    assert metrics["config"]["ctx"] == 256  # as llama.cpp rounded it


def test_metrics_agree_with_themselves(metrics: dict[str, Any]) -> None:
    m, decode, prefill = metrics, metrics["expert"], metrics["prefill"]["expert"]
    assert m["tokens"] == len(m["token_ids"]) == 12
    assert m["decode_steps"] == 11
    assert m["prefill_tokens"] == m["prompt_tokens"] > 0
    for part, steps in ((decode, m["decode_steps"]), (prefill, m["prefill_tokens"])):
        assert part["bytes_per_token"] * steps == pytest.approx(part["bytes_read"])
        assert part["hit_rate"] == pytest.approx(part["hits"] / (part["hits"] + part["misses"]))
        assert 0 < part["resident_bytes"] <= part["budget_bytes"]
    # Two layers, two experts of four; every expert is read once, in three slices of 64 x 32 floats.
    assert decode["routed"] == decode["hits"] + decode["misses"] == 2 * 2 * m["decode_steps"]
    assert prefill["misses"] + decode["misses"] <= 8
    assert prefill["bytes_read"] + decode["bytes_read"] == (prefill["misses"] + decode["misses"]) * 3 * 64 * 32 * 4
    assert (decode["evictions"], decode["rereads"]) == (0, 0)
    assert m["decode_tok_s"] == pytest.approx(m["decode_steps"] / m["decode_s"])
    assert m["prefill_tok_s"] == pytest.approx(m["prefill_tokens"] / m["prefill_s"])
    assert m["prefill_s"] <= m["ttft_s"] <= m["total_s"]
    assert m["prefill_s"] + m["decode_s"] <= m["total_s"]
    assert m["effective_tok_s"] <= m["decode_tok_s"]
    assert m["peak_rss_bytes"] >= m["rss_bytes"] > 0


def test_metrics_that_cannot_be_written(moe: Path, tmp_path: Path) -> None:
    flags = ("-m", moe, "-p", "Hello", "-n", "2", *FAST)
    for path, says in (
        (tmp_path / "none" / "m.json", "No such file"),
        (tmp_path, "directory"),
        ("", "directory"),
        (tmp_path / ("x" * 300), "name too long"),
        (tmp_path / ("x" * 250), "name too long"),
        (moe, "is read by this run"),
    ):
        done = run(*flags, "--metrics-json", path)
        check_usage(done, "--metrics-json", says)
        assert done.err.count("\n") == 1
    prompt = tmp_path / "p.txt"
    prompt.write_text("Hello")
    check_usage(run("-m", moe, "-f", prompt, *FAST, "--metrics-json", prompt), "--metrics-json", "is read by this run")
    assert prompt.read_text() == "Hello"
    done = run(*flags, "--metrics-json", "/dev/full")
    assert done.code == 1
    assert done.last == "bmoe: --metrics-json: cannot write /dev/full: No space left on device"
    assert Path("/dev/full").is_char_device()


def test_metrics_on_a_disk_that_fills_up(moe: Path, tmp_path: Path) -> None:
    """The old file stays; what was begun does not. (A limit on the size of files stands for the disk's end.)"""
    path = tmp_path / "m.json"
    path.write_text("old")
    flags = ("-m", moe, "-p", "Hello", "-n", "2", *FAST, "-q", "--metrics-json", path)
    done = run(*flags, limits={"RLIMIT_FSIZE": 500})
    assert (done.code, done.last) == (1, f"bmoe: --metrics-json: cannot write {path}: File too large")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_replace_a_file_whole_and_follow_links(moe: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target.name)
    flags = ("-m", moe, "-p", "Hello", "-n", "2", *FAST, "-q")
    assert run(*flags, "--metrics-json", link).code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["tokens"] == 2
    done = run(*flags, "--metrics-json", "/dev/stdout")
    assert done.code == 0
    assert json.loads(done.out[done.out.index("{") :])["tokens"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "target.json"]
