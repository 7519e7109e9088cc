"""Memory that is refused is an error, and nothing of what was asked for before it is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import resource, sys
from bmoe.streamer._cache import ExpertCache
from bmoe.streamer._reads import Lanes
from bmoe.streamer._streamer import Streamer

def size():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def streamer():
    return Streamer(lanes, [([], 1 << 26)], 1, False)

def cache():
    return ExpertCache([64], [0], [1 << 26])

def started():
    # The ring is asked for last: what the slots were given by then goes as well.
    n = 1 << 23
    few = Streamer(lanes, [([], 4)], 1, False)
    few.start(ExpertCache([4], [0], [n]), [(0, n, 0, 0)], [0], [1], 1 << 30, 0, 0)

def record():
    lanes.record(1 << 27)

lanes = Lanes([sys.argv[1]], 1)
start, what = size(), {"streamer": streamer, "cache": cache, "started": started, "record": record}[sys.argv[2]]
resource.setrlimit(resource.RLIMIT_AS, (start + (1 << 30), resource.RLIM_INFINITY))
for _ in range(8):
    try:
        what()
    except MemoryError:
        continue
    sys.exit("there was memory")
assert size() - start < 256 << 20, (size(), start)
lanes.read_windows([])
print("whole")
"""


@pytest.mark.parametrize("what", ["streamer", "cache", "started", "record"])
def test_what_is_refused_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    """Under a limit on the address space, eight times as much as it would bear is asked for in turn."""
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(4096))
    done = subprocess.run([sys.executable, "-c", CHILD, str(path), what], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
