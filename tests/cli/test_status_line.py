"""The line under the text of a terminal: it says how the run is doing, and the text is what it is without it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

from cli_process import environment, read_terminal
from hypothesis import given, settings
from hypothesis import strategies as st
from screen import Screen

from bmoe.accounting.counters import StreamCounters
from bmoe.accounting.results import Token
from bmoe.accounting.token_cost import Cost
from bmoe.cli.status_line import LiveLine, Recent, fitting, follow

PIECES = st.lists(
    st.one_of(
        st.text(alphabet="ab ,.", max_size=9), st.sampled_from(["\n", "\n\n", "日本語", "é", "x" * 30, "Ж", "a\nb"])
    ),
    max_size=60,
)


def token(index: int = 1, **changes: Any) -> Token:
    stream = StreamCounters(hits=3, misses=1, bytes=2 << 20, wait_ns=5_000_000)
    return Token(index, 7, "", 0.02, 0.01, stream, {}, Cost(stream, {}, (0, 20_000_000, 0, 0)), **changes)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.integers(12, 60), st.integers(3, 8), st.integers(1, 4))
def test_the_text_is_what_it_is_without_a_line(pieces: list[str], columns: int, rows: int, every: int) -> None:
    bare, shared = Screen(columns, rows), Screen(columns, rows)
    clock = iter(range(10**6))
    line = LiveLine(lambda: (3, 4), True, shared.feed, lambda: columns, shared.feed, lambda: float(next(clock)))
    for i, piece in enumerate(pieces):
        bare.feed(piece)
        line.write(piece)
        if i % every == 0:
            line.token(token(i))
        # From the second token on there is something to say, wherever the cursor is not at the end of its row.
        shows = i >= every and bare.x <= columns - 3
        assert ("tok/s" in shared.text()) == shows
        if shows:
            assert (shared.x, shared.y + len(shared.away)) == (bare.x, bare.y + len(bare.away))
    line.close()
    assert shared.text() == bare.text()


def test_the_line_says_what_it_should() -> None:
    recent = Recent()
    assert recent.line((0, 8)) == []
    for _ in range(40):
        recent.add(token())
    parts = recent.line((6, 8))
    assert parts == ["50.0 tok/s", "75 % hit", "2.0 MiB/token", "25 % waiting for reads", "cache 75 % full"]
    assert fitting(parts, 25) == "50.0 tok/s | 75 % hit"
    assert fitting(parts, 5) == ""
    dense = Recent()
    none = StreamCounters()
    dense.add(Token(1, 7, "", 0.02, 0.01, none, {}, Cost(none, {}, (0, 10_000_000, 0, 0))))
    assert dense.line(None) == ["100.0 tok/s"]


def test_where_a_text_ends() -> None:
    def cells(c: str) -> int:
        return 2

    assert follow("abc", 0, True, 10, cells) == (3, False, True)
    assert follow("abc", 8, True, 10, cells) == (1, True, True)
    assert follow("ab", 8, True, 10, cells) == (10, False, True)
    assert follow("日", 9, True, 10, cells) == (2, True, True)
    assert follow("\u2764", 0, True, 10, cells) == (2, False, False)
    assert follow("\u2764\nab", 0, True, 10, cells) == (2, True, True)
    assert follow("\tx\r", 3, True, 20, cells) == (0, False, True)


def on_a_terminal(path: Path, *flags: str, columns: int = 60, out: bool = True) -> tuple[str, str]:
    """What a run puts on a terminal, with its stdout there too or (`out` False) in a pipe; then the pipe's text."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    argv = [sys.executable, "-m", "bmoe", "-m", str(path), "-t", "1", "-c", "512", "--ignore-eos", *flags]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=theirs if out else subprocess.PIPE, stderr=theirs,
        env=environment(TERM="xterm"),
    )  # fmt: skip
    os.close(theirs)
    shown = read_terminal(ours)
    text = process.communicate(timeout=120)[0]
    os.close(ours)
    assert process.returncode == 0
    return shown.decode("utf-8", "replace"), (text or b"").decode()


if not hasattr(termios, "tcsetwinsize"):  # Python 3.10
    import fcntl
    import struct

    def _size(fd: int, size: tuple[int, int]) -> None:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    termios.tcsetwinsize = _size  # type: ignore[attr-defined]


def test_a_run_on_a_terminal(moe: Path) -> None:
    shown, _ = on_a_terminal(moe, "-p", "Hello", "-n", "200", "--overlap")
    assert "\x1b7\x1bD\r" in shown
    assert "tok/s | " in shown
    assert "a token after the first takes" in shown
    last = shown.replace("\r\n", "\n").rstrip("\n").rpartition("\n")[2]
    assert last.startswith(("bound by", "cannot tell what bounds this run: "))
    # The line is taken away before the table comes.
    assert shown.rindex("\x1b7\x1bD\r\x1b[K\x1b8") < shown.index("a token after the first takes")


def test_no_line_where_none_is_wanted(moe: Path) -> None:
    for flags in (["--quiet"], ["--progress"]):
        shown, _ = on_a_terminal(moe, "-p", "Hello", "-n", "20", *flags)
        assert "\x1bD" not in shown
        assert " | " not in shown
    shown, text = on_a_terminal(moe, "-p", "Hello", "-n", "100", out=False)
    assert "\x1bD" not in shown  # alone on its terminal, it needs no place under a text
    assert "tok/s | " in shown
    assert "\x1b" not in text
