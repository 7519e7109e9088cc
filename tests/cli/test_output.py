"""What goes to stdout and what to stderr: text as it comes, readers that go, characters."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import FAST, environment, read_terminal, run, start

import bmoe
from bmoe.cli import main

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
    shown = read_terminal(ours)
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
    assert process.wait(20) == 1


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


# The tiny models' first 256 tokens are the bytes: a text's bytes are a script.
TEXT = "né€😀 \u0301x\n"


def test_characters_are_never_cut(moe: Path) -> None:
    script = list(TEXT.encode())
    with bmoe.Engine.open(moe, threads=1, ctx=128) as engine:
        pieces = [t.text for t in engine.generate("Hello", max_tokens=len(script), script=script)]
        assert pieces == ["n", "", "é", "", "", "€", "", "", "", "😀", " ", "", "\u0301", "x", "\n"]
        generation = engine.generate("Hello", max_tokens=3, script=list("né€".encode())[:4])
        assert [t.text for t in generation] == ["n", "", "é"]
        generation = engine.generate("Hello", max_tokens=2, script=script)
        assert [t.text for t in generation] == ["n", "\ufffd"]
        assert generation.result.text == "n\ufffd"
        broken = list(b"a\xffb\xe2\x82c")
        assert "".join(t.text for t in engine.generate("Hello", max_tokens=6, script=broken)) == "a\ufffdb\ufffdc"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", TEXT), ("ascii", "n??? ?x\n")])
def test_characters_that_stdout_lacks(moe: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    script, generate = list(TEXT.encode()), bmoe.Engine.generate
    monkeypatch.setattr(bmoe.Engine, "generate", lambda *a, **k: generate(*a, **k, script=script))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert main.main(["-m", str(moe), "-p", "Hello", "-n", str(len(script)), *FAST, "-q"]) == 0
    assert raw.getvalue().decode() == shown + "\n"
