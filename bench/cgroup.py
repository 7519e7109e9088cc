"""A memory cgroup for one measurement, and the page cache dropped before it. Linux, root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def can_cap() -> str:
    """ "" where a memory cgroup can be made here, else why not."""
    if os.geteuid() != 0:
        return "not root: memory cannot be capped"
    if os.access(_V1 / "memory.limit_in_bytes", os.R_OK) and os.access(_V1, os.W_OK):
        return ""
    controllers = _V2 / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text() and os.access(_V2, os.W_OK):
        return ""
    return "no writable memory controller: memory cannot be capped"


def drop_page_cache() -> bool:
    """Writes dirty pages out and empties the page cache; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


@contextmanager
def capped(limit_mib: int) -> Iterator[Path]:
    """A cgroup with a hard limit; yields its `cgroup.procs`, to which a child writes its pid before it execs."""
    v1 = os.access(_V1 / "memory.limit_in_bytes", os.R_OK)
    group = (_V1 if v1 else _V2) / f"bmoe-bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_mib << 20))
        yield group / "cgroup.procs"
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
