"""What the operating system says of this process and its memory, often: files stay open, one read each.

`memory` reads the same facts once, with more detail. Linux; what a system does not have is None, never 0.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import _memory, _procfs, memory

MOST_LEVELS = 4
"""Enclosing cgroups that are read: the own one and, of the others, those with the tightest limits."""
PAGES = 64
"""Pages of dense weights that stand for all of them; each sample looks at eight."""

_STATUS = (b"\nVmRSS:", b"\nRssAnon:", b"\nRssFile:", b"\nVmSwap:")
_MEMINFO = (b"\nMemAvailable:", b"\nMemFree:", b"\nSwapFree:")


class HostSample(NamedTuple):
    """One moment. Bytes; None: not measured here.

    `major_faults` and `cpu_ns` (user and system) count since the process started, all threads. `rss_file` has no shared
    memory. `cgroup_...`: the innermost cgroup that counts this process's memory, its limit None where it has none;
    `tight_...`: of all that enclose it and have a limit, the one with the least room. `dense_resident`: share of the
    dense weights that is in memory, 0 to 1, by a sample of their pages.
    """

    major_faults: int
    cpu_ns: int
    rss: int | None = None
    rss_anon: int | None = None
    rss_file: int | None = None
    swap: int | None = None
    mem_available: int | None = None
    mem_free: int | None = None
    swap_free: int | None = None
    cgroup_usage: int | None = None
    cgroup_limit: int | None = None
    tight_usage: int | None = None
    tight_limit: int | None = None
    dense_resident: float | None = None


class HostSampler:
    """Keeps the files open; `sample()` reads them. Made and used in one process. Close it; may be closed twice.

    `dense`: (address, bytes) of weights whose pages are looked at, which must outlive it. `root`: where /proc and the
    cgroup mounts are, for tests.
    """

    def __init__(self, dense: Sequence[tuple[int, int]] = (), root: Path = Path("/")) -> None:
        self._pages = _memory.PageProbe(list(dense), PAGES)
        self._fds: list[int] = []
        self._status = self._open(root / "proc/self/status")
        self._meminfo = self._open(root / "proc/meminfo")
        self._own, self._tight = self._open_cgroups(root)

    def sample(self) -> HostSample:
        """Reads everything once."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        rss, anon, file, swap = _procfs.kib_fields(self._status, _STATUS)
        available, free, swap_free = _procfs.kib_fields(self._meminfo, _MEMINFO)
        own_usage, own_limit = self._own.read() if self._own is not None else (None, None)
        tight_usage, tight_limit = self._tightest()
        return HostSample(
            usage.ru_majflt,
            int(1e9 * (usage.ru_utime + usage.ru_stime)),
            rss,
            anon,
            file,
            swap,
            available,
            free,
            swap_free,
            own_usage,
            own_limit,
            tight_usage,
            tight_limit,
            self._pages.share(),
        )

    def close(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        self._status = self._meminfo = -1
        self._own, self._tight = None, []

    def _tightest(self) -> tuple[int | None, int | None]:
        best: tuple[int | None, int | None] = (None, None)
        least = 0
        for level in self._tight:
            usage, limit = level.read()
            if usage is not None and limit is not None and (best[1] is None or limit - usage < least):
                best, least = (usage, limit), limit - usage
        return best

    def _open(self, path: Path) -> int:
        """A descriptor, -1 where there is no such file."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        self._fds.append(fd)
        return fd

    def _open_cgroups(self, root: Path) -> tuple[_Level | None, list[_Level]]:
        """The innermost cgroup that counts memory, and those with a limit."""
        limits = {limit.path: limit.limit for limit in memory.read_memory_facts(root).limits}
        levels = []
        for at in memory.cgroup_levels(root):
            names = ("usage_in_bytes", ["limit_in_bytes"]) if at.version == 1 else ("current", ["max", "high"])
            usage = self._open(at.directory / f"memory.{names[0]}")
            if usage < 0:
                continue  # a hierarchy without the memory controller, or the root of v2
            files = [fd for fd in (self._open(at.directory / f"memory.{name}") for name in names[1]) if fd >= 0]
            # The limits of what a container cannot see are known by their sum only, and that at opening.
            levels.append((limits.get(at.path), _Level(usage, files, limits.get(at.path) if at.top else None)))
        limited = sorted((n, i) for i, (n, _) in enumerate(levels) if n is not None)
        keep = sorted(i for _, i in limited[:MOST_LEVELS])
        return (levels[0][1] if levels else None), [levels[i][1] for i in keep]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class _Level(NamedTuple):
    """Descriptors of one cgroup; `known`: a limit that holds besides those of its files."""

    usage: int
    limits: list[int]
    known: int | None

    def read(self) -> tuple[int | None, int | None]:
        """Usage and limit, bytes; None: no limit, or not readable."""
        found = [_procfs.number(fd) for fd in self.limits] + [self.known]
        finite = [n for n in found if n is not None and n < memory.UNLIMITED]
        return _procfs.number(self.usage), min(finite) if finite else None
