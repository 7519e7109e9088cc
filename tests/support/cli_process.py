"""The command line as the tests run it: each run is a process of its own.

`run(...)` forks it from a process that has imported bmoe already, which costs hundredths of a second, not an
interpreter's start. `start(...)` is the real `python -m bmoe`, for signals and pipes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Argument = str | os.PathLike[str]
FAST = ("-t", "1", "-c", "128")
"""Flags of most runs: one thread, a short context."""


def environment(**changes: str) -> dict[str, str]:
    """The tests' environment, with bmoe importable from any directory."""
    base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return {**base, "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive", **changes}


@dataclass(frozen=True)
class Finished:
    """What a run left behind. `code` is negative for a signal, None where it did not end in time."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line of stderr."""
        return self.err.rstrip("\n").rpartition("\n")[2]


def check_refused(done: Finished, *parts: str, code: int = 1) -> None:
    """One line on stderr that starts with the program's name and holds each of `parts`, and nothing else."""
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("bmoe: "), done.err
    assert done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err


def check_usage(done: Finished, *parts: str) -> None:
    """A flag or an input that cannot be: the last line says why and holds each of `parts`."""
    assert (done.code, done.out) == (2, ""), done
    assert done.last.startswith("bmoe: "), done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.last


def run(
    *argv: Argument,
    cwd: Argument | None = None,
    stdin: bytes = b"",
    timeout: float = 30.0,
    limits: dict[str, int] | None = None,
) -> Finished:
    """Runs `bmoe argv...`; `limits`: of its resources, by the names that `resource` has for them."""
    with tempfile.TemporaryDirectory(prefix="bmoe-run-") as name:
        place = Path(name)
        (place / "in").write_bytes(stdin)
        request = {
            "argv": [os.fspath(a) for a in argv],
            "cwd": os.fspath(cwd or ROOT),
            "files": [str(place / "in"), str(place / "out"), str(place / "err")],
            "timeout": timeout,
            "limits": limits or {},
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        reply = json.loads(server.stdout.readline())
        out, err = ((place / n).read_bytes().decode("utf-8", "replace") for n in ("out", "err"))
    return Finished(reply["code"], out, err, reply["seconds"])


def start(*argv: Argument, **options: Any) -> subprocess.Popen[bytes]:
    """Starts `python -m bmoe argv...`, by default with pipes for stdout and stderr."""
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    settings["env"] = environment(**settings.pop("env", {}))
    process = subprocess.Popen([sys.executable, "-m", "bmoe", *map(os.fspath, argv)], **settings)
    atexit.register(process.kill)  # for a test that fails before it has waited
    return process


def interruptible() -> None:
    """For a child's `preexec_fn`: a shell that puts pytest into the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_terminal(fd: int) -> bytes:
    """All that comes on a terminal until its other end is closed."""
    shown = b""
    while select.select([fd], [], [], 120)[0]:
        try:
            shown += os.read(fd, 4096)
        except OSError:  # the other end is closed
            break
    return shown


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """The process that forks: one thread, bmoe imported, llama.cpp loaded."""
    from bmoe import llama
    from bmoe.cli.main import main

    llama.check()
    replies = os.fdopen(os.dup(1), "w")
    while request := sys.stdin.readline():
        asked = json.loads(request)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(main, asked["argv"], asked)
        code = _wait(pid, started + asked["timeout"])
        replies.write(json.dumps({"code": code, "seconds": time.monotonic() - started}) + "\n")
        replies.flush()


def _wait(pid: int, deadline: float) -> int | None:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


def _child(main: Any, argv: Sequence[str], asked: dict[str, Any]) -> None:
    code = 70
    try:
        for fd, path in enumerate(asked["files"]):
            os.dup2(os.open(path, os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the old one has read requests ahead
        os.chdir(asked["cwd"])
        for name, limit in {"RLIMIT_CORE": 0, **asked["limits"]}.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        code = main(argv)
        sys.stdout.flush()
    except SystemExit as e:
        sys.stdout.flush()
        code = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
