"""llama.cpp's log, captured while something is opened: why it gave up is there and nowhere else."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

from . import _ggml

_lock = threading.RLock()


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects what llama.cpp logs inside the block: the messages are there after it. Then who had the log has it back.

    One block at a time in a process: the log is global.
    """
    lines: list[str] = []
    with _lock:
        _ggml.capture_log()
        try:
            yield lines
        finally:
            lines += _ggml.release_log().decode("utf-8", "replace").split("\0")


@contextlib.contextmanager
def assertions_caught() -> Iterator[list[str]]:
    """`captured_log` around a call that catches C++ exceptions: a failed assertion inside becomes one of its errors."""
    with captured_log() as log:
        _ggml.throw_on_abort(True)
        try:
            yield log
        finally:
            _ggml.throw_on_abort(False)


def first_complaint(lines: list[str]) -> str:
    """The first complaint of the GGUF parser: those after it only say that it gave up."""
    return next((re.sub(r"^\w+: ", "", line.strip()) for line in lines if line.strip()), "no reason given")


def last_complaint(lines: list[str]) -> str:
    """The line of llama.cpp's log that says why it gave up."""
    for line in reversed(lines):
        text = line.strip()
        if "error" in text.lower() and not text.endswith("failed to load model"):
            return re.sub(r"^\w+: ", "", text)
    return next((line.strip() for line in reversed(lines) if "fail" in line.lower()), "no reason given")
