"""`bmoe perplexity`: modes, reports, refusals, and what an interrupted run says."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path

import pytest
from cli_process import check_usage, interruptible, run, start
from conftest import Tiny
from gguf_edit import Gguf


@pytest.fixture(scope="module")
def moe(tiny: Tiny) -> Path:
    return tiny("qwen3moe", "Q8_0", n_expert=16, n_used=6)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The stone and the other stones, and the rest of them: Grüße! " * 40, encoding="utf-8")
    return path


def test_modes_and_reports(moe: Path, text: Path, tmp_path: Path) -> None:
    found = {}
    for mode in ("batch", "decode"):
        metrics = tmp_path / f"{mode}.json"
        flags = ("--mode", mode, "-c", "64", "-t", "1", "--chunks", "3", "--metrics-json", metrics)
        done = run("perplexity", text, "-m", moe, *flags)
        assert done.code == 0, done
        assert done.out.startswith("perplexity ")
        assert "3 of 3 windows of 64" in done.err
        assert "moe-stream: " in done.err
        assert "moe-drop" not in done.err
        found[mode] = json.loads(metrics.read_text())
    assert found["batch"]["nats_per_token"] == pytest.approx(found["decode"]["nats_per_token"], rel=1e-2)
    for mode, m in found.items():
        assert (m["command"], m["mode"], m["windows"], m["tokens"], m["complete"]) == ("perplexity", mode, 3, 93, True)
        assert m["perplexity"] == pytest.approx(math.exp(m["nats_per_token"]))
        assert m["bits_per_byte"] == pytest.approx(m["nats_per_token"] * 93 / math.log(2) / m["bytes"])
        assert m["expert"]["drop"] == {"threshold": None, "routed": 0, "dropped": 0, "weight_mass_dropped": 0.0}
    assert found["batch"]["expert"]["routed"] == 0
    # 31 of each window one by one, its first 32 as one batch of which the last layer computes one token.
    assert found["decode"]["expert"]["routed"] == 93 * 6 * 3
    assert run("perplexity", text, "-m", moe, "-c", "64", "--stride", "8", "-t", "1", "-q").err == ""
    piped = run("perplexity", "-", "-m", moe, "-c", "64", "-t", "1", "--chunks", "3", stdin=text.read_bytes())
    assert piped.out == run("perplexity", text, "-m", moe, "-c", "64", "-t", "1", "--chunks", "3").out


def test_dropping_is_reported(moe: Path, text: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "m.json"
    flags = ("-c", "64", "-t", "1", "--cache-mb", "20", "--force-cache", "--metrics-json", metrics)
    done = run("perplexity", text, "-m", moe, "--chunks", "2", "--mode", "decode", "--drop-cold-experts", "1", *flags)
    assert done.code == 0, done
    m = json.loads(metrics.read_text())
    drop = m["expert"]["drop"]
    assert m["config"]["drop_cold_experts"] == drop["threshold"] == 1.0
    assert drop["routed"] == 2 * 31 * 6 * 3
    assert f"moe-drop: {drop['dropped']} of {drop['routed']} routed experts dropped" in done.err
    assert "are dropped in decode: output differs" in done.err
    done = run("-m", moe, "-p", "Hello", "-n", "20", *flags, "--drop-cold-experts", "0.9", "--drop-in-prefill")
    assert done.code == 0, done
    m = json.loads(metrics.read_text())
    assert m["prefill"]["expert"]["drop"]["routed"] > 0
    assert m["expert"]["drop"]["routed"] == m["expert"]["routed"] == 19 * 6 * 3
    assert "moe-drop: " in done.err
    assert "decode and prefill" in done.err


def test_bos_stands_at_the_start_of_each_window(moe: Path, text: Path, tmp_path: Path) -> None:
    other = Gguf(moe).set("tokenizer.ggml.add_bos_token", True).write(tmp_path / "bos.gguf")
    flags = ("-c", "64", "-t", "1", "--chunks", "2")
    with_bos, without = (run("perplexity", text, "-m", path, *flags) for path in (other, moe))
    assert with_bos.code == without.code == 0
    assert with_bos.out != without.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "FILE"),
        ("none.txt", "none.txt: No such file"),
        (".", ".: Is a directory"),
        ("TEXT --mode fast", "--mode: invalid choice: 'fast'"),
        ("TEXT --chunks 0", "--chunks: 0 is out of range"),
        ("TEXT --stride 0", "--stride: 0 is out of range, give 1 to 511"),
        ("TEXT -c 64 --stride 64", "--stride: 64 is out of range, give 1 to 63"),
        ("TEXT -c 3", "--ctx-size: a window of 3 tokens is too short"),
        ("TEXT -c 20000", "do not fill one window of 20000; use -c "),
        ("TEXT -p x", "-p"),
        ("TEXT --drop-cold-experts 0.5", "drops in decode only: add --mode decode, or --drop-in-prefill"),
        ("TEXT --mode decode --drop-cold-experts 2", "--drop-cold-experts: 2.0 is out of range"),
        ("TEXT --mode decode --drop-cold-experts 0.5 --cache-mb 0", "--drop-cold-experts needs a cache"),
        ("TEXT --drop-in-prefill", "--drop-in-prefill goes with --drop-cold-experts"),
        ("TEXT --metrics-json TEXT", "is read by this run"),
        ("TEXT --cache-mb x", "--cache-mb: 'x'"),
    ],
)
def test_what_is_refused(moe: Path, text: Path, flags: str, says: str) -> None:
    check_usage(run("perplexity", *flags.replace("TEXT", str(text)).split(), "-m", moe, "-t", "1"), says)


def test_texts_that_are_none(moe: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff\xfe")
    check_usage(run("perplexity", bad, "-m", moe), str(bad), "not UTF-8")
    bad.write_bytes(b"")
    check_usage(run("perplexity", bad, "-m", moe), str(bad), "a text of 0 tokens is too short")
    done = run("perplexity", bad, "-m", tmp_path / "none.gguf")
    assert (done.code, "none.gguf: no such file" in done.last) == (1, True), done


def test_help() -> None:
    done = run("perplexity", "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("usage: bmoe perplexity ")
    for title in ("model and text:", "compute:", "expert streaming:", "reports:"):
        assert f"\n{title}\n" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    assert "perplexity (how well a model predicts a text)" in " ".join(run("--help").out.split())


def test_an_interrupted_run_says_what_it_has(moe: Path, text: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "m.json"
    long = tmp_path / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 30, encoding="utf-8")
    flags = ("--mode", "decode", "-c", "64", "-t", "1", "--metrics-json", metrics)
    process = start("perplexity", long, "-m", moe, *flags, preexec_fn=interruptible)
    assert process.stderr is not None
    while b"cache: " not in process.stderr.readline():
        pass
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, (out, err)
    found = json.loads(metrics.read_text())
    assert found["complete"] is False
    assert found["tokens"] > 0
    assert out.decode().startswith(f"perplexity {found['perplexity']:.4f} ")
    assert b"Traceback" not in err


def test_a_reader_that_has_gone(moe: Path, text: Path) -> None:
    process = start("perplexity", text, "-m", moe, "-t", "1", "-c", "64")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert b"Traceback" not in err
