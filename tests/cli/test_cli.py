"""The command line: flags, prompts, what goes to stdout and what to stderr, and the metrics file."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_process import Finished, environment, run, start
from gguf_edit import Gguf

import bmoe
from bench.models.tiny import SPECIALS, vocabulary
from bmoe.cli import main
from bmoe.engine import demo

SMALL = {"n_layer": 2, "n_embd": 64, "n_ff": 32, "n_expert": 4}
FAST = ("-t", "1", "-c", "128")


@pytest.fixture(scope="module")
def moe(tiny: Any) -> Path:
    return tiny("qwen3moe", **SMALL)


@pytest.fixture(scope="module")
def dense(tiny: Any) -> Path:
    return tiny("llama", **SMALL)


def check_usage(done: Finished, *parts: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.last.startswith("bmoe: "), done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.last


# ---- flags ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nonsense", "--nonsense"),
        ("--overla", "--overla"),
        ("stray", "stray"),
        ("-n", "-n/--n-predict: expected one argument"),
        ("-n x", "-n/--n-predict: invalid int value: 'x'"),
        ("-n -1", "--n-predict: -1"),
        ("-t -1", "--threads: -1"),
        ("-t 513", "--threads: 513"),
        ("-t 99999999999", "--threads: 99999999999"),
        ("-t two", "-t/--threads"),
        ("-c -1", "--ctx-size: -1"),
        ("-c 99999999999", "--ctx-size: 99999999999"),
        ("--ubatch 0", "--ubatch: 0"),
        ("--ubatch 99999999999", "--ubatch: 99999999999"),
        ("--n-expert-used 0", "--n-expert-used: 0"),
        ("--n-expert-used 5", "--n-expert-used: 5 is more than the model's 4 experts"),
        ("--n-expert-used 99999999999", "--n-expert-used: 99999999999"),
        ("--cache-mb -5", "--cache-mb: '-5'"),
        ("--cache-mb 1.5", "--cache-mb: '1.5'"),
        ("--cache-mb lots", "--cache-mb: 'lots'"),
        ("--cache-mb 9999999999999", "--cache-mb: '9999999999999'"),
        ("--cache-floor-mb -1", "--cache-floor-mb: -1"),
        ("--cache-floor-mb 99999999", "--cache-mb auto is"),
        ("--cache-floor-mb 10 --cache-mb 100", "--cache-floor-mb goes with --cache-mb auto"),
        ("--cache-ceil-mb 0", "--cache-ceil-mb: 0"),
        ("--cache-ceil-mb 9 --cache-mb 0", "--cache-ceil-mb needs a cache"),
        ("--force-cache --cache-mb 0", "--force-cache needs a cache"),
        ("--cache-policy mru", "--cache-policy: invalid choice: 'mru'"),
        ("--io-threads 0", "--io-threads: 0"),
        ("--io-threads 17", "--io-threads: 17"),
        ("--dense-weights gold", "--dense-weights: invalid choice: 'gold'"),
        ("--temp -1", "--temp: -1.0"),
        ("--temp nan", "--temp: nan"),
        ("--temp inf", "--temp: inf"),
        ("--temp 1 --top-k -1", "--top-k: -1"),
        ("--temp 1 --top-k 99999999999", "--top-k: 99999999999"),
        ("--temp 1 --top-p 0", "--top-p: 0.0"),
        ("--temp 1 --top-p 1.5", "--top-p: 1.5"),
        ("--temp 1 --seed -1", "--seed: -1"),
        ("--temp 1 --seed 4294967296", "--seed: 4294967296"),
        ("--seed 3", "need --temp above 0"),
        ("--top-k 3", "need --temp above 0"),
        ("--chat --chatml", "--chat and --chatml exclude each other"),
        ("--no-think", "--no-think goes with --chat or --chatml"),
        ("-f x", "-p and -f exclude each other"),
        ("--metrics-json", "--metrics-json: expected one argument"),
        ("--temp 1 --ngram", "--temp"),
        ("--spec-type magic", "--spec-type: 'magic'"),
        ("--draft 0 --ngram", "--draft"),
        ("--rs-snapshots -1", "--rs-snapshots"),
    ],
)
def test_flags_that_cannot_be_honoured(moe: Path, flags: str, says: str) -> None:
    check_usage(run("-m", moe, "-p", "x", *flags.split()), says)


def test_flags_are_checked_before_the_model_is_read(tmp_path: Path) -> None:
    for flags in (("--io-threads", "0"), ("--temp", "-1"), ("--chat", "--chatml"), ("-n", "-1")):
        check_usage(run("-m", tmp_path / "none.gguf", "-p", "x", *flags), flags[0].strip("-"))


def test_help_and_version() -> None:
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    for title in ("model and prompt:", "sampling (greedy by default):", "compute:", "expert streaming:", "reports:"):
        assert f"\n{title}\n" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    done = run("--version")
    assert (done.code, done.out) == (0, f"bmoe {bmoe.__version__}\n")


# ---- prompts -------------------------------------------------------------------------------------------


def test_the_same_prompt_from_everywhere(moe: Path, tmp_path: Path) -> None:
    text = "Grüße, 世界!\nSecond line"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    flags = ("-m", moe, "-n", "8", *FAST)
    runs = [run(*flags, "-p", text), run(*flags, "-f", file), run(*flags, "-p", "-", stdin=text.encode())]
    assert [r.code for r in runs] == [0, 0, 0]
    assert len({r.out for r in runs}) == 1
    assert len(runs[0].out) > 1


def test_prompts_that_are_none(moe: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff\xfe")
    flags = ("-m", moe, *FAST)
    check_usage(run(*flags), "no prompt")
    check_usage(run(*flags, "-p", ""), "the prompt is empty")
    check_usage(run(*flags, "-p", "-"), "the prompt is empty")
    check_usage(run(*flags, "-p", "-", stdin=b"\xff"), "-p -: standard input is not UTF-8")
    check_usage(run(*flags, "-p", b"abc\xff".decode("utf-8", "surrogateescape")), "-p: the prompt is not UTF-8")
    check_usage(run(*flags, "-f", bad), "-f", str(bad), "not UTF-8")
    check_usage(run(*flags, "-f", tmp_path / "none"), "-f", str(tmp_path / "none"), "No such file")
    check_usage(run(*flags, "-f", tmp_path), "-f", str(tmp_path), "directory")


def test_a_prompt_and_its_context(moe: Path) -> None:
    """llama.cpp rounds a context up to 256: what fits is decided by what it says."""
    check_usage(run("-m", moe, "-p", "x" * 300, "-n", "4", "-t", "1", "-c", "64"), "300 tokens", "use -c 304 or more")
    done = run("-m", moe, "-p", "x" * 100, "-n", "4", "-t", "1", "-c", "4")
    assert (done.code, "stopped: length" in done.err) == (0, True), done
    done = run("-m", moe, "-p", "x" * 250, "-n", "99", "-t", "1", "-c", "256", "--ignore-eos")
    assert (done.code, "stopped: length" in done.err) == (0, True), done
    done = run("-m", moe, "-p", "x", "-n", "0", *FAST)
    assert (done.code, done.out) == (0, "\n"), done


def test_chat(moe: Path, tmp_path: Path) -> None:
    flags = ("-n", "8", "-p", "Hi", *FAST)
    written = f"{SPECIALS[1]}user\nHi{SPECIALS[2]}\n{SPECIALS[1]}assistant\n"
    by_hand = run("-m", moe, "-n", "8", "-p", written, *FAST)
    assert by_hand.code == 0
    assert run("-m", moe, *flags, "--chat").out == by_hand.out == run("-m", moe, *flags, "--chatml").out
    quiet = run("-m", moe, "-n", "8", "-p", f"{written}<think>\n\n</think>\n\n", *FAST)
    assert run("-m", moe, *flags, "--chatml", "--no-think").out == quiet.out
    template = "{% if enable_thinking is defined and not enable_thinking %}no{% else %}yes{% endif %}"
    path = Gguf(moe).set("tokenizer.chat_template", template).write(tmp_path / "think.gguf")
    assert run("-m", path, *flags, "--chat", "--no-think").out == run("-m", path, "-n", "8", "-p", "no", *FAST).out
    path = Gguf(moe).drop("tokenizer.chat_template").write(tmp_path / "bare.gguf")
    done = run("-m", path, *flags, "--chat")
    assert (done.code, done.out) == (1, "")
    assert done.last == f"bmoe: {path}: no chat template in the file: use --chatml, or a plain prompt"
    path = Gguf(moe).set("tokenizer.chat_template", "{{ 1/0 }}").write(tmp_path / "broken.gguf")
    done = run("-m", path, *flags, "--chat")
    assert (done.code, done.out) == (1, "")
    assert "its chat template fails (ZeroDivisionError" in done.last


# ---- models and budgets -----------------------------------------------------------------------------------


def test_a_dense_model(dense: Path) -> None:
    done = run("-m", dense, "-p", "Hello", "-n", "4", *FAST, "--cache-mb", "100", "--overlap")
    assert done.code == 0, done
    assert done.err.count("a dense model, nothing is streamed") == 1
    assert "moe-" not in done.err
    check_usage(run("-m", dense, "-p", "x", *FAST, "--n-expert-used", "1"), "--n-expert-used", str(dense), "no routed")


def test_n_expert_used(moe: Path) -> None:
    with_all = run("-m", moe, "-p", "Hello", "-n", "12", *FAST)
    fewer = run("-m", moe, "-p", "Hello", "-n", "12", *FAST, "--n-expert-used", "1")
    assert (with_all.code, fewer.code) == (0, 0)
    assert "1 experts per token instead of the model's own number" in fewer.err
    assert with_all.out != fewer.out


def huge(path: Path, moe: Path) -> Path:
    """`moe` with 512 experts of 192 MiB in each of its layers, none of them on disk: a sparse file."""
    gguf, width, n_expert, at = Gguf(moe), 1 << 18, 512, 0
    for t in gguf.tensors:
        if b"_exps" in t.name:
            t.dims = [64, width, n_expert] if b"down" not in t.name else [width, 64, n_expert]
        elif b"gate_inp" in t.name:
            t.dims = [64, n_expert]
        t.offset = at
        at += 4 * math.prod(t.dims)
    gguf.set("qwen3moe.expert_feed_forward_length", width).set("qwen3moe.expert_count", n_expert)
    path.write_bytes(gguf.header())
    os.truncate(path, len(gguf.header()) + at)
    return path


def test_a_budget_that_cannot_be(tmp_path: Path, tiny: Any) -> None:
    path = huge(tmp_path / "huge.gguf", tiny("qwen3moe", **(SMALL | {"n_layer": 16})))
    assert path.stat().st_size > 3 << 39
    flags = ("-m", path, "-p", "Hi", "-n", "1", *FAST)
    done = run(*flags, "--cache-mb", "99999999")
    check_usage(done, "--cache-mb 99999999", "the largest that fits is")
    assert done.seconds < 10
    check_usage(run(*flags, "--cache-mb", "50"), "--cache-mb 50 is too small", "the smallest that would do is")
    check_usage(run(*flags, "--cache-floor-mb", "99999999"), "--cache-mb auto is", "short")
    check_usage(run(*flags, "--cache-ceil-mb", "50"), "--cache-ceil-mb 50 is too small")


def test_a_small_budget_is_granted_or_forced(moe: Path) -> None:
    flags = ("-m", moe, "-p", "Hello", "-n", "8", *FAST)
    whole = run(*flags)
    refused = run(*flags, "--cache-ceil-mb", "1")
    # One token of the tiny model routes less than a MiB, but the process itself takes of a small budget.
    if refused.code:
        check_usage(refused, "--cache-ceil-mb 1 is too small")
    forced = run(*flags, "--cache-mb", "1", "--force-cache")
    assert (forced.code, forced.out) == (0, whole.out), forced
    off = run(*flags, "--cache-mb", "0")
    assert (off.code, off.out) == (0, whole.out), off
    assert "cache: off" in off.err


def test_address_space_that_is_too_small(moe: Path, tmp_path: Path) -> None:
    """Whatever runs out of memory says so in a line."""
    for limit in (600 << 20, 400 << 20):
        flags = ("-p", "Hi", "-n", "1", "-t", "1", "-c", "2000000")
        done = run("-m", moe, *flags, limits={"RLIMIT_AS": limit})
        assert done.code in (1, 2), done
        assert done.last.startswith("bmoe: "), done.err
        assert "Traceback" not in done.err


# ---- stdout and stderr ------------------------------------------------------------------------------------


def test_text_alone_on_stdout(moe: Path) -> None:
    done = run("-m", moe, "-p", "Hello", "-n", "8", *FAST)
    with bmoe.Engine.open(moe, threads=1, ctx=128) as engine:
        tokens = list(engine.generate("Hello", max_tokens=8))
    assert done.out == "".join(t.text for t in tokens) + "\n"
    assert "\r" not in done.err
    assert "\x1b" not in done.err
    assert [line.split(":")[0] for line in done.err.splitlines()[:2]] == ["model", "cache"]
    assert "generation: 8 tokens" in done.err
    quiet = run("-m", moe, "-p", "Hello", "-n", "8", *FAST, "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")


def test_progress_on_a_terminal(moe: Path) -> None:
    ours, theirs = pty.openpty()
    flags = ("-m", moe, "-p", "word " * 200, "-n", "2", "-t", "1", "--ubatch", "16")
    process = start(*flags, stderr=theirs, env={"TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 20)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"\x1b[" in shown
    assert b"prefill" in shown
    assert b"\x1b" not in out


def test_text_streams_as_it_comes(moe: Path) -> None:
    process = start("-m", moe, "-p", "Hello", "-n", "1900", "-t", "1", "--ignore-eos", "--cache-mb", "0")
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=20)
    assert first


def test_the_reader_of_stdout_goes(moe: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "m.json"
    flags = ("-n", "1900", "-t", "1", "--ignore-eos", "--metrics-json", metrics)
    process = start("-m", moe, "-p", "Hello", *flags)
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(20) == 1
    assert "Traceback" not in err
    assert "Exception" not in err
    assert "stopped: cancelled" in err
    data = json.loads(metrics.read_text())
    assert data["stop"] == "cancelled"
    assert 0 < data["tokens"] < 1900


def test_both_streams_piped_to_a_reader_that_goes(moe: Path) -> None:
    process = start("-m", moe, "-p", "Hello", "-n", "1900", "-t", "1", "--ignore-eos", stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(20) in (0, 1)


def test_stdout_on_a_full_disk(moe: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = start("-m", moe, "-p", "Hello", "-n", "8", *FAST, stdout=full)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.decode().splitlines()[-1] == "bmoe: standard output: No space left on device"
    assert b"Traceback" not in err


def test_closed_standard_streams(moe: Path) -> None:
    command = f"exec {sys.executable} -m bmoe -m {moe} -p - -n 4 -t 1 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], env=environment(), timeout=30).returncode == 2
    command = f"exec {sys.executable} -m bmoe -m {moe} -p x -n 4 -t 1 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], env=environment(), timeout=30).returncode == 0


# ---- characters ---------------------------------------------------------------------------------------------


def tokens_of(text: bytes) -> list[int]:
    """One token for each byte."""
    alphabet = vocabulary()[:256]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {b: chr(b) for b in printable}
    spelled |= {b: chr(0x100 + i) for i, b in enumerate(b for b in range(256) if b not in spelled)}
    return [alphabet.index(spelled[b]) for b in text]


TEXT = "né€😀 \u0301x\n"


def test_characters_are_never_cut(moe: Path) -> None:
    script = tokens_of(TEXT.encode())
    with bmoe.Engine.open(moe, threads=1, ctx=128) as engine:
        pieces = [t.text for t in engine.generate("Hello", max_tokens=len(script), script=script)]
        assert pieces == ["n", "", "é", "", "", "€", "", "", "", "😀", " ", "", "\u0301", "x", "\n"]
        generation = engine.generate("Hello", max_tokens=3, script=tokens_of("né€".encode())[:4])
        assert [t.text for t in generation] == ["n", "", "é"]
        generation = engine.generate("Hello", max_tokens=2, script=script)
        assert [t.text for t in generation] == ["n", ""]
        assert generation.result.text == "n\ufffd"
        broken = tokens_of(b"a\xffb\xe2\x82c")
        assert "".join(t.text for t in engine.generate("Hello", max_tokens=6, script=broken)) == "a\ufffdb\ufffdc"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", TEXT), ("ascii", "n??? ?x\n")])
def test_characters_that_stdout_lacks(moe: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    script, generate = tokens_of(TEXT.encode()), bmoe.Engine.generate
    monkeypatch.setattr(bmoe.Engine, "generate", lambda *a, **k: generate(*a, **k, script=script))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert main.main(["-m", str(moe), "-p", "Hello", "-n", str(len(script)), *FAST, "-q"]) == 0
    assert raw.getvalue().decode() == shown + "\n"


# ---- the demo and the metrics ----------------------------------------------------------------------------


def test_the_demo() -> None:
    done = run("-n", "8", "-t", "1")
    assert done.code == 0, done
    first = done.err.splitlines()[0]
    for part in ("bundled demo model", demo.MODEL, "sampling at temperature", f"seed {demo.SAMPLING.seed}"):
        assert part in first
    assert done.out == run("-n", "8", "-t", "1").out != run("-n", "8", "-t", "1", "--seed", "8").out
    assert "greedy" in run("-n", "1", "-t", "1", "-p", "def ").err.splitlines()[0]


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
        assert part["resident_bytes"] <= part["budget_bytes"]
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
