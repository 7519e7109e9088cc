"""What the operating system says about memory: how much is free, under which limits, and what we hold.

The only module that asks. Linux answers from /proc and the cgroup file systems; elsewhere psutil does, with
less detail. Every size is in bytes. Nothing here raises for a file that is missing or unreadable: what cannot
be read bounds nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

MiB = 1 << 20

# An unlimited v1 cgroup shows LONG_MAX rounded down to a page, and pages differ: no real limit is near it.
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class CgroupLimit:
    """One cgroup that encloses this process and has a finite memory limit.

    `path` is the cgroup's name as /proc/self/cgroup spells it ("/" is the top of what this process can see),
    `version` 1 or 2, `reclaimable` the page cache charged to it that the kernel can drop at once.
    """

    path: str
    version: int
    limit: int
    usage: int
    reclaimable: int

    def room(self) -> int:
        """Bytes that can still be allocated under this limit, page cache given back first; never negative."""
        return max(0, self.limit - self.usage + min(self.reclaimable, self.usage))


@dataclass(frozen=True)
class Bound:
    """One thing that bounds our memory: `room` bytes are left of `size`."""

    name: str
    size: int
    room: int


@dataclass(frozen=True)
class MemoryFacts:
    """The machine's memory and every limit around this process, read at one moment."""

    mem_total: int
    mem_available: int
    limits: tuple[CgroupLimit, ...] = ()

    def bounds(self) -> tuple[Bound, ...]:
        """Everything that bounds us: the machine first, then the own cgroup and outwards."""
        machine = Bound("MemAvailable", self.mem_total, self.mem_available)
        return (machine, *(Bound(f"cgroup {c.path}", c.limit, c.room()) for c in self.limits))

    def available(self) -> int:
        """Bytes this process can still take: the smaller of MemAvailable and the room under every limit."""
        return min(bound.room for bound in self.bounds())

    def binding(self) -> str:
        """What `available()` is bound by: "MemAvailable" or "cgroup /foo (limit 2500 MiB)"."""
        bound = min(self.bounds(), key=lambda bound: bound.room)
        return bound.name if bound.name == "MemAvailable" else f"{bound.name} (limit {bound.size // MiB} MiB)"


@dataclass(frozen=True)
class ProcessMemory:
    """What this process holds. `rss` is the sum of its anonymous, file-backed and shared-memory pages."""

    rss: int
    rss_anon: int
    rss_file: int
    swap: int
    peak_rss: int
    rss_shmem: int = 0


def read_memory_facts(root: Path = Path("/"), pid: str = "self") -> MemoryFacts:
    """Reads the memory of the machine and the limits of every cgroup, v1 and v2, around process `pid`.

    `root` is where /proc and the cgroup mounts are looked up, for tests. The mounts come from
    /proc/<pid>/mountinfo, so only what that process can see counts.
    """
    meminfo = read_meminfo(root)
    if "MemTotal" in meminfo and "MemAvailable" in meminfo:
        total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    else:  # not Linux, or older than 3.14
        memory = psutil.virtual_memory()
        total, available = memory.total, memory.available
    return MemoryFacts(total, available, tuple(_limits(root, pid)))


def read_meminfo(root: Path = Path("/")) -> dict[str, int]:
    """/proc/meminfo as {name: bytes}; empty where there is none."""
    facts = {}
    for line in _read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isdigit():
            facts[name] = int(fields[0]) << (10 if fields[-1] == "kB" else 0)
    return facts


_STATUS = re.compile(rb"^(VmHWM|VmRSS|RssAnon|RssFile|RssShmem|VmSwap):\s*(\d+) kB", re.MULTILINE)


def read_process_memory(root: Path = Path("/"), pid: str = "self") -> ProcessMemory:
    """Reads what process `pid` holds from /proc/<pid>/status.

    Where there is no such file psutil gives this process's totals, and all of it counts as anonymous.
    """
    try:
        fd = os.open(f"{root}/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(fd, 1 << 16)
        finally:
            os.close(fd)
    except OSError:
        rss = psutil.Process().memory_info().rss
        return ProcessMemory(rss, rss_anon=rss, rss_file=0, swap=0, peak_rss=rss)
    held = {name: int(kib) << 10 for name, kib in _STATUS.findall(status)}
    return ProcessMemory(
        rss=held.get(b"VmRSS", 0),
        rss_anon=held.get(b"RssAnon", 0),
        rss_file=held.get(b"RssFile", 0),
        swap=held.get(b"VmSwap", 0),
        peak_rss=held.get(b"VmHWM", 0),
        rss_shmem=held.get(b"RssShmem", 0),
    )


@contextlib.contextmanager
def allocations_within(room: int) -> Iterator[None]:
    """Inside the block, memory that would take this process more than `room` bytes further is refused.

    Linux grants memory that it does not have and kills whoever touches it. RLIMIT_DATA makes malloc fail instead,
    for all threads of the process; where that limit does not exist, or is not ours to set, nothing changes.
    """
    held = re.search(r"^VmData:\s*(\d+) kB", _read_text(Path("/proc/self/status")), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (int(held[1]) << 10) + room if held else resource.RLIM_INFINITY
    if not held or (soft != resource.RLIM_INFINITY and soft <= limit) or limit >= 1 << 62:
        yield
        return
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    except (ValueError, OSError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def major_faults() -> int:
    """Page faults of this process, all threads, that had to wait for a disk, since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


# --- cgroups ---


@dataclass(frozen=True)
class CgroupLevel:
    """One cgroup around this process that may count its memory; `top`: the outermost that can be seen."""

    path: str
    version: int
    directory: Path
    top: bool


def cgroup_levels(root: Path = Path("/"), pid: str = "self") -> Iterator[CgroupLevel]:
    """The cgroups around `pid`, the own one first, of both versions: a hybrid machine has two hierarchies."""
    own = _own_cgroups(root, pid)
    seen: set[tuple[int, int]] = set()
    for version, mount_root, mount_point in _memory_mounts(root, pid):
        levels = _levels(root / mount_point.lstrip("/"), mount_root, own.get(version, "/"), pid)
        for name, directory in levels:
            try:
                status = directory.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) in seen:  # the same hierarchy, mounted twice
                continue
            seen.add((status.st_dev, status.st_ino))
            yield CgroupLevel(name, version, directory, top=directory == levels[-1][1])


def _limits(root: Path, pid: str) -> Iterator[CgroupLimit]:
    """Every finite limit around `pid`, the own cgroup first."""
    for at in cgroup_levels(root, pid):
        read = _read_v1(at.path, at.directory, at.top) if at.version == 1 else _read_v2(at.path, at.directory)
        if read is not None:
            yield read


def _own_cgroups(root: Path, pid: str) -> dict[int, str]:
    """{version: path} of the memory cgroups of `pid`. Lines read "4:memory:/path", "0::/path" for v2."""
    own = {}
    for line in _read_text(root / "proc" / pid / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            own[1] = path
        elif hierarchy == "0" and not controllers:
            own[2] = path
    return own


def _memory_mounts(root: Path, pid: str) -> Iterator[tuple[int, str, str]]:
    """(version, root, mount point) of each mount that may show memory cgroups; root is a cgroup's path."""
    for line in _read_text(root / "proc" / pid / "mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        mount_root, mount_point = _unescape(fields[3]), _unescape(fields[4])
        if kind[0] == "cgroup2":
            yield 2, mount_root, mount_point
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, mount_root, mount_point


def _unescape(field: str) -> str:
    """mountinfo writes a space, tab, newline or backslash in a path as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _levels(mount: Path, mount_root: str, own: str, pid: str) -> list[tuple[str, Path]]:
    """(name, directory) of the cgroup `own` and its ancestors, inwards to outwards, as far as `mount` shows.

    Both paths are relative to this process's cgroup namespace, so `own` below `mount_root` is `mount` plus
    the rest. Where it is not below it, all that can be taken for ours is the top of the mount: so it is in
    a container whose /proc/self/cgroup still has the host's names.
    """
    above = [part for part in mount_root.split("/") if part]
    below = [part for part in own.split("/") if part]
    if below[: len(above)] == above:
        below = below[len(above) :]
    elif set(above) == {".."}:
        below = _search(mount, below, len(above), pid)
    else:
        below = []
    if ".." in below:
        below = []
    shown = PurePosixPath("/", *(part for part in above if part != ".."))
    depths = range(len(below), -1, -1)
    return [(str(shown.joinpath(*below[:depth])), mount.joinpath(*below[:depth])) for depth in depths]


def _search(mount: Path, own: list[str], depth: int, pid: str) -> list[str]:
    """The path in `mount` of our cgroup, when the mount starts `depth` levels above our namespace's root.

    That is a new cgroup namespace with the old mounts (`unshare --cgroup`): the kernel shows ".." for names
    that the namespace hides, so we look at that depth for the cgroup that holds us.
    """
    while own and own[0] == "..":
        own, depth = own[1:], depth - 1
    wanted = str(os.getpid()) if pid == "self" else pid
    pattern = ["*"] * depth + [glob.escape(part) for part in own]
    for directory in mount.glob("/".join(pattern)):
        if wanted in _read_text(directory / "cgroup.procs").split():
            return list(directory.relative_to(mount).parts)
    return []


def _read_v1(name: str, directory: Path, top: bool) -> CgroupLimit | None:
    stat = _read_stat(directory)
    limits = [_read_number(directory / "memory.limit_in_bytes")]
    if top:
        # The tightest limit of all ancestors, also of those that a container cannot see. Their usage cannot
        # be seen either; it is at least that of the topmost cgroup that can.
        limits.append(stat.get("hierarchical_memory_limit"))
    usage = _read_number(directory / "memory.usage_in_bytes")
    reclaimable = _reclaimable(stat, "total_", "total_dirty", "total_writeback")
    return _limit(name, 1, limits, usage, reclaimable)


def _read_v2(name: str, directory: Path) -> CgroupLimit | None:
    # Above memory.high a process is not killed but throttled to a crawl, which is no better for an engine.
    limits = [_read_number(directory / "memory.max"), _read_number(directory / "memory.high")]
    usage = _read_number(directory / "memory.current")
    reclaimable = _reclaimable(_read_stat(directory), "", "file_dirty", "file_writeback")
    return _limit(name, 2, limits, usage, reclaimable)


def _limit(
    name: str, version: int, limits: list[int | None], usage: int | None, reclaimable: int
) -> CgroupLimit | None:
    finite = [limit for limit in limits if limit is not None and limit < UNLIMITED]
    return CgroupLimit(name, version, min(finite), usage or 0, reclaimable) if finite else None


def _reclaimable(stat: dict[str, int], prefix: str, dirty: str, writeback: str) -> int:
    """Bytes of page cache that the kernel gives back at once, from a cgroup's memory.stat."""
    # Both file lists count, as in MemAvailable: what was read twice ("active") is dropped under pressure all
    # the same. tmpfs and locked pages are on other lists. Dirty pages need a disk first, and v1 does not make
    # their writers wait, so they do not count. Mapped pages do: ours are the model's own weights, and
    # whoever sizes from this pays for those in full (`bmoe.experts.budget.decide`).
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, files - stat.get(dirty, 0) - stat.get(writeback, 0))


def _read_stat(directory: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read_text(directory / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_number(path: Path) -> int | None:
    """The number in a one-line file; None for "max", "-1", or a file that cannot be read."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    """The file's text, "" if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
