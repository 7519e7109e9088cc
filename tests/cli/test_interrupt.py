"""Ctrl-C, at any time: the run ends within a second, says what it did, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import held
import pytest
from cli_process import environment, interruptible, start

import bmoe

INTERRUPTED = 130
# One token of it takes a few milliseconds, most of that reading.
SLOW = {"n_layer": 4, "n_expert": 32, "n_used": 4, "n_embd": 256, "n_ff": 256}
LONG = "word " * 3000
PREFILL = ("-p", LONG, "-c", "16384", "-t", "1", "--cache-mb", "0")
DECODE = ("-p", "Hello", "-c", "16384", "-n", "16000", "-t", "1", "--cache-mb", "0", "--ignore-eos")


@pytest.fixture(scope="module")
def moe(tiny: Any) -> Path:
    return tiny("qwen3moe", "Q8_0", **SLOW)


@pytest.fixture(scope="module")
def dense(tiny: Any) -> Path:
    return tiny("llama", "Q8_0", n_layer=8, n_embd=512, n_ff=1024)


def within_s() -> float:
    """The second that an interrupted run has, or as much of the clock as this busy machine gives for it."""
    wall, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu < 0.1:
        pass
    return max(1.0, (time.monotonic() - wall) / 0.1)


def wait_for(process: subprocess.Popen[bytes], mark: bytes) -> bytes:
    """Reads stderr until a line begins with `mark`."""
    assert process.stderr is not None
    seen = b""
    for line in process.stderr:
        seen += line
        if line.startswith(mark):
            return seen
    raise AssertionError(seen.decode())


def end(process: subprocess.Popen[bytes], *, signals: int = 1, number: int = signal.SIGINT) -> tuple[str, str, float]:
    """Signals the process and waits: stdout, the rest of stderr, seconds from the first signal to the end."""
    started = time.monotonic()
    for _ in range(signals):
        process.send_signal(number)
        time.sleep(0.02 if signals > 1 else 0.0)
    try:
        out, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return (out or b"").decode(), err.decode(), time.monotonic() - started


def check(
    process: subprocess.Popen[bytes], err: str, seconds: float, metrics: Path, *, streams: bool = True
) -> dict[str, Any]:
    """What every interrupted run has in common; the metrics of it. `streams`: whether the model has experts."""
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    assert "ignored" not in err
    assert err.count("stopped: interrupted") == 1, err
    assert ("\nmoe-stream: " in err) == streams
    assert seconds < within_s()
    assert os.listdir(metrics.parent) == [metrics.name]
    data = json.loads(metrics.read_text())
    assert data["stop"] == "interrupted"
    assert data["tokens"] == len(data["token_ids"])
    return data


@pytest.mark.parametrize("ubatch", ["1", "512"])
def test_in_prefill(moe: Path, tmp_path: Path, ubatch: str) -> None:
    metrics = tmp_path / "m.json"
    process = start("-m", moe, *PREFILL, "--ubatch", ubatch, "--metrics-json", metrics, preexec_fn=interruptible)
    wait_for(process, b"cache: ")
    time.sleep(0.3)
    out, err, seconds = end(process)
    data = check(process, err, seconds, metrics)
    assert out.strip() == ""
    assert data["tokens"] == data["decode_steps"] == 0
    assert data["prefill_tokens"] < data["prompt_tokens"], "only what was computed counts"
    assert data["prefill_tokens"] % int(ubatch) == 0
    assert data["expert"]["bytes_read"] == 0, "what prefill has read is prefill's"
    assert data["prefill"]["expert"]["bytes_read"] > 0


@pytest.mark.parametrize("flags", [("--overlap",), ("--io-threads", "1", "--no-odirect")])
def test_in_decode(moe: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    metrics = tmp_path / "m.json"
    process = start("-m", moe, *DECODE, *flags, "--metrics-json", metrics, preexec_fn=interruptible)
    assert process.stdout is not None
    first = process.stdout.read(20).decode()
    out, err, seconds = end(process)
    data = check(process, err, seconds, metrics)
    assert 5 <= data["tokens"] < 16000
    assert data["decode_steps"] in (data["tokens"] - 1, data["tokens"])
    assert len(first + out) <= data["tokens"] * 8
    assert data["expert"]["bytes_per_token"] * data["decode_steps"] == pytest.approx(data["expert"]["bytes_read"])


def test_while_python_loads_the_program() -> None:
    """Before there is anything to sum up: the process just ends, as one without handlers does."""
    command = [sys.executable, "-X", "importtime", "-m", "bmoe", "--version"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=interruptible
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"numpy" in line:
            break
    _, err, _ = end(process)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err


@pytest.mark.parametrize("flags", [PREFILL, DECODE])
def test_a_dense_model(dense: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    metrics = tmp_path / "dense.json"
    process = start("-m", dense, *flags, "--metrics-json", metrics, preexec_fn=interruptible)
    wait_for(process, b"note: ")
    time.sleep(0.3)
    _, err, seconds = end(process)
    check(process, err, seconds, metrics, streams=False)


@pytest.mark.parametrize("signals", [2, 5])
def test_an_impatient_user(moe: Path, tmp_path: Path, signals: int) -> None:
    metrics = tmp_path / "m.json"
    process = start("-m", moe, *DECODE, "--metrics-json", metrics, preexec_fn=interruptible)
    assert process.stdout is not None
    process.stdout.read(20)
    _, err, seconds = end(process, signals=signals)
    check(process, err, seconds, metrics)


def test_a_terminal_that_reads_no_more(moe: Path) -> None:
    """Ctrl-C gets through while a write blocks: the pipe is full and nobody reads it."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    process = start("-m", moe, *DECODE, stdout=theirs, preexec_fn=interruptible)
    os.close(theirs)
    wait_for(process, b"cache: ")
    time.sleep(0.3)
    _, err, seconds = end(process)
    os.close(ours)
    assert process.returncode == INTERRUPTED
    assert "stopped: interrupted" in err
    assert seconds < within_s()


def test_terminated(moe: Path) -> None:
    process = start("-m", moe, *DECODE)
    assert process.stdout is not None
    process.stdout.read(20)
    _, err, seconds = end(process, number=signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in err
    assert seconds < within_s()


def test_a_run_that_ignores_it(moe: Path) -> None:
    """As under nohup, or behind an & in a script."""
    process = start(
        "-m", moe, "-p", "Hello", "-n", "40", "-t", "1", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    wait_for(process, b"cache: ")
    _, err, _ = end(process)
    assert process.returncode == 0
    assert "stopped: length" in err or "stopped: end" in err


OPENER = """
import os, random, signal, sys, time
import bmoe.cli.main
from bmoe import llama
llama.check()
random.seed(1)
flags = ["-m", sys.argv[1], "-p", "x", "-n", "0", "-t", "1", "-c", "4096", "-q"]
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 0
        try:
            while not code:
                code = bmoe.cli.main.main(flags)
        except KeyboardInterrupt:  # between two runs
            code = 130
        sys.stderr.flush()
        os._exit(code)
    time.sleep(random.uniform(0.03, 0.15))
    started, done = time.monotonic(), 0
    os.kill(pid, signal.SIGINT)
    while not done:
        time.sleep(0.002)
        done, status = os.waitpid(pid, os.WNOHANG)
        if time.monotonic() - started > 5:
            os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(status), time.monotonic() - started, flush=True)
"""


def test_while_opening(moe: Path) -> None:
    """At any moment: in Python, in llama.cpp, in one of its calls back."""
    done = subprocess.run(
        [sys.executable, "-c", OPENER, moe, "24"], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    ends = [line.split() for line in done.stdout.splitlines() if line]
    assert [code for code, _ in ends] == [str(INTERRUPTED)] * 24, done.stderr
    assert max(float(seconds) for _, seconds in ends) < within_s()
    assert set(done.stderr.splitlines()) <= {"bmoe: interrupted"}


@pytest.fixture
def alarm() -> Iterator[threading.Timer]:
    """Ctrl-C in 0.3 s, for whom the default handler waits."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()
    timer.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_an_engine_goes_on_afterwards(moe: Path, alarm: threading.Timer, where: str) -> None:
    before = held.threads()
    with bmoe.Engine.open(moe, threads=1, ctx=16384, cache_mb=0, io_threads=3) as engine:
        wanted = [t.id for t in engine.generate("Hello there", max_tokens=8)]
        prompt = LONG if where == "prefill" else "Hello there"
        generation = engine.generate(prompt, max_tokens=16000, stop_at_end=False)
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            list(generation)
        assert generation.result.stop == "interrupted"
        assert bool(generation.result.token_ids) == (where == "decode")
        assert [t.id for t in engine.generate("Hello there", max_tokens=8)] == wanted
    alarm.join()
    assert held.threads() <= before, "the lanes are joined"
