"""The command line: flags, prompts, models and budgets, and the demo."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from cli_process import FAST, check_usage, run
from conftest import SMALL
from gguf_edit import Gguf

import bmoe
from bench.models.tiny import SPECIALS
from bmoe.engine import demo


@pytest.fixture(scope="module")
def dense(tiny: Any) -> Path:
    return tiny("llama", **SMALL)


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
    else:
        assert refused.out == whole.out
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


# ---- the demo ------------------------------------------------------------------------------------------------


def test_the_demo() -> None:
    done = run("-n", "8", "-t", "1")
    assert done.code == 0, done
    first = done.err.splitlines()[0]
    for part in ("bundled demo model", demo.MODEL, "sampling at temperature", f"seed {demo.SAMPLING.seed}"):
        assert part in first
    assert done.out == run("-n", "8", "-t", "1").out != run("-n", "8", "-t", "1", "--seed", "8").out
    assert "greedy" in run("-n", "1", "-t", "1", "-p", "def ").err.splitlines()[0]
