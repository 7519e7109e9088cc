"""The read lanes against a plain loop of preads over the same windows of the same file.

python -m pytest bench/gates/bench_reads.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.conftest import Compare
from bench.gates import native
from bench.gates.gate import Side, timed
from bmoe.host._memory import Region
from bmoe.streamer import Lanes

FILE = 8 << 20


@contextmanager
def _sides(path: Path, size: int, n: int, n_lanes: int, direct: bool) -> Iterator[tuple[Side, Side]]:
    """`n` reads of `size` bytes, spread over the file, by lanes and one after the other."""
    with ExitStack() as stack:
        path.write_bytes(os.urandom(1 << 20) * (FILE >> 20))
        region = Region(size * n, huge=False)
        stack.callback(region.close)
        region.populate(0, region.size)
        lanes = Lanes([str(path)], n_lanes, direct)
        stack.callback(lanes.close)
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if lanes.direct else 0))
        stack.callback(os.close, fd)
        step = (FILE - size) // n // 4096 * 4096
        windows = [(0, i * step, size, size, region.address + i * size) for i in range(n)]
        plain = native.as_windows([(at, length, address) for _, at, length, _, address in windows])
        yield timed(lambda: lanes.read_windows(windows)), timed(lambda: native.plain_reads(fd, plain))


@pytest.mark.ratio
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("n_lanes", [1, 4])
def test_large_reads(n_lanes: int, compare: Compare, tmpfs: Path) -> None:
    """Slices of 256 KiB from memory: what a lane adds to the copy itself."""
    with _sides(tmpfs / "file", 256 << 10, 24, n_lanes, direct=False) as (ours, plain):
        compare(f"lanes/large x {n_lanes}", ours, plain)


@pytest.mark.ratio
@pytest.mark.usefixtures("one_core")
def test_small_reads(compare: Compare, tmpfs: Path) -> None:
    """4 KiB from memory: queue, wake-up and count-down, with next to nothing to copy."""
    with _sides(tmpfs / "file", 4096, 1000, 1, direct=False) as (ours, plain):
        compare("lanes/small", ours, plain)


@pytest.mark.ratio
def test_from_a_disk(compare: Compare, tmp_path: Path) -> None:
    """Slices of 256 KiB past the page cache, four lanes: several requests at once are what lanes are for."""
    with _sides(tmp_path / "file", 256 << 10, 24, 4, direct=True) as (ours, plain):
        compare("lanes/disk", ours, plain)
