"""Files that a run writes: checked before it, written whole or not at all, or appended to in whole lines."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import BmoeError, UsageError


def check_writable(path: Path, flag: str, inputs: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Raises UsageError where a file cannot be written at `path`, before anything has been computed.

    `inputs`: files that the run reads, which it must not replace.
    """
    try:
        if any(_same(path, Path(f)) for f in inputs):
            raise UsageError(f"{flag}: {path} is read by this run; give another path")
        if path.is_dir():
            raise UsageError(f"{flag}: {path} is a directory; give a file")
        if is_device(path):
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{flag}: cannot write {path}: no permission")
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()
    except OSError as e:
        raise UsageError(f"{flag}: cannot write {path}: {e.strerror}") from None


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[str | os.PathLike[str]] = ()) -> None:
    """`check_writable` for each flag's path, where it is given; no two may be one file."""
    seen: dict[str, Path] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        check_writable(path, flag, inputs)
        other = next((f for f, p in seen.items() if _same(path, p)), None)
        if other is not None:
            raise UsageError(f"{flag}: {path} is what {other} writes; give another path")
        seen[flag] = path


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file beside `path`, then renames it; a device or pipe is written to. Raises OSError."""
    if is_device(path):
        with open(path, "a", encoding="utf-8") as f:
            f.write(text)
        return
    temporary = _temporary(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path.resolve())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_output(path: Path, text: str, flag: str) -> None:
    """`write_whole` of what `flag` asks for. Raises BmoeError."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise BmoeError(f"{flag}: cannot write {path}: {e.strerror}") from None


def is_device(path: Path) -> bool:
    """True for what is written to in place: a device, a pipe, /dev/stdout (whatever that is)."""
    return path.exists() and (not path.is_file() or str(path.parent) in ("/dev", "/dev/fd", "/proc/self/fd"))


def _same(a: Path, b: Path) -> bool:
    if a.exists() and b.exists():
        return not is_device(a) and os.path.samefile(a, b)
    return a.absolute() == b.absolute()


def _temporary(path: Path) -> Path:
    """Where the file lies while it is written: beside `path`, or beside what it links to."""
    real = path.resolve()
    return real.with_name(f".{real.name}.{os.getpid()}.tmp")


class LineFile:
    """A file that grows by whole lines, each batch of them in one write; a failure ends it, not the run.

    `flag`: who asked for it. `failure`: why it ended, one line, "" while it lives. What did not fit on a full disk
    is cut off, back to the last line that was whole. Raises UsageError where the file cannot be made.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self.path, self.flag = path, flag
        self.failure = ""
        self._pending = b""
        self._at = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        except OSError as e:
            raise UsageError(f"{flag}: cannot write {path}: {e.strerror}") from None

    def write(self, lines: str) -> None:
        """Appends `lines`, which end with a line break."""
        if self._fd < 0:
            return
        self._pending += lines.encode()
        try:
            self._flush()
        except OSError as e:
            self.failure = f"{self.flag}: ended early: cannot write {self.path}: {e.strerror}"
            if self._regular:
                os.ftruncate(self._fd, self._at)
            self._pending = b""
            self.close()

    def _flush(self) -> None:
        # What an exception from a signal handler has cut short is written again, at the same place.
        data, at = memoryview(self._pending), self._at
        while data:
            n = os.pwrite(self._fd, data, at) if self._regular else os.write(self._fd, data)
            at += n
            data = data[n:]
        self._pending, self._at = b"", at

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
