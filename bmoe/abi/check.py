"""A check, and how it is run: in a process of its own, since a layout that is not what it was taken for can crash."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ..llama import library

SECONDS = 120.0
"""How long a check may take."""
OK, BROKEN, SKIPPED = "ok", "BROKEN", "not checked"


class BrokenError(Exception):
    """The assumption does not hold; the message says what was found and what was expected."""


class SkippedError(Exception):
    """The check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Files:
    """Models that checks run: the demo model, a tiny one, whole, in two shards and spoiled, and those of the user."""

    demo: Path
    tiny: Path
    shards: Path
    spoiled: Path
    models: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Check:
    """One assumption. `mend`: the file to change where it is broken; `needs`: checks without which this says nothing.

    `run` returns a few words on what was seen; raises BrokenError or SkippedError. Whatever else it raises is BROKEN.
    """

    name: str
    assumes: str
    mend: str
    run: Callable[[Files], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """How a check ended: OK, BROKEN or SKIPPED, and why."""

    check: Check
    state: str
    said: str


CHECKS: list[Check] = []
"""Every check, in the order in which they are made."""


def check(
    name: str, assumes: str, mend: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Files], str]], Callable[[Files], str]]:
    """Enters the function below it into CHECKS."""

    def enter(run: Callable[[Files], str]) -> Callable[[Files], str]:
        CHECKS.append(Check(name, assumes, mend, run, needs))
        return run

    return enter


def expect(what: str, found: object, expected: object) -> None:
    """Raises BrokenError where the two differ."""
    if found != expected:
        raise BrokenError(f"{what} is {found}, expected {expected}")


def none_missing(what: str, missing: Iterable[str]) -> None:
    """Raises BrokenError that lists what is missing."""
    if names := sorted(missing):
        raise BrokenError(f"{what}: {', '.join(names)}")


def run_all(checks: Sequence[Check], files: Files, installed: str) -> Iterator[Result]:
    """Runs the checks in turn; one whose needs are not met is not run. `installed`: the release that is there."""
    states: dict[str, str] = {}
    for one in checks:
        unmet = next((n for n in one.needs if states.get(n, OK) != OK), None)
        if unmet is not None:
            result = Result(one, SKIPPED, f"needs {unmet}")
        else:
            result = Result(one, *run_apart(lambda one=one: one.run(files), installed))  # type: ignore[misc]
        states[one.name] = result.state
        if result.state == OK:
            # It has been loaded once without a crash: from now on processes begin with it.
            import_module("llama_cpp.llama_cpp")
        yield result


def run_apart(work: Callable[[], str], installed: str, seconds: float = SECONDS) -> tuple[str, str]:
    """Runs `work` in a forked process; its state and what it said, where it crashed by which signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    with tempfile.TemporaryFile() as noise:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(work, installed, write, noise.fileno())
        os.close(write)
        reply = b""
        try:
            reply = _read(read, time.monotonic() + seconds)
        finally:
            os.close(read)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it has ended, or has to
            _, status = os.waitpid(pid, 0)
        if reply:
            state, said = pickle.loads(reply)
            return state, said
        return BROKEN, _how_it_died(status, seconds) + _last_words(noise.fileno())


def _read(fd: int, deadline: float) -> bytes:
    parts = []
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _child(work: Callable[[], str], installed: str, reply: int, noise: int) -> None:
    state, said = BROKEN, ""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["GGML_NO_BACKTRACE"] = "1"
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(noise, 2)
        # The release that is there is the one to be judged, whatever the pin.
        library.PINNED = installed
        state, said = OK, work()
    except SkippedError as e:
        state, said = SKIPPED, str(e)
    except BrokenError as e:
        said = str(e)
    except BaseException as e:
        said = f"{type(e).__name__}: {e}"
    with os.fdopen(reply, "wb") as out:
        out.write(pickle.dumps((state, " ".join(said.split()))))
    os._exit(0)  # nothing is torn down: what was found is said


def _how_it_died(status: int, seconds: float) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return f"did not end within {seconds:.0f} s, or was killed"
    return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"


def _last_words(fd: int) -> str:
    """The assertion that llama.cpp wrote before it gave up, without the path of its build."""
    size = os.lseek(fd, 0, os.SEEK_END)
    text = os.pread(fd, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    line = next((x for x in text.splitlines() if "GGML_ASSERT" in x or "terminate called" in x), "")
    return f": {line.rpartition('/')[2].strip()}" if line else ""
