"""Read lanes on their own: the right bytes at the right place, and no silence where a read fails."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import OpenEngine, Resident, Tiny, direct_works

import bmoe
from bench.models.tiny import prompt_ids
from bench.reference import differences, drive
from bmoe.errors import ModelError, ReadError
from bmoe.gguf import file as file_layout
from bmoe.host import _memory
from bmoe.streamer import ALIGNMENT, Lanes, window

PAGE = ALIGNMENT
# Ends inside a page, as model files do.
SIZE = 3 * (1 << 20) + 777

A, B = prompt_ids(64, seed=1), prompt_ids(30, seed=2)

Window = tuple[int, int, int, int, int]


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(5).bytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    return path


@pytest.fixture
def region() -> Iterator[_memory.Region]:
    region = _memory.Region(8 << 20)
    yield region
    region.close()


def memory(region: _memory.Region, at: int, n: int) -> bytes:
    return ctypes.string_at(region.address + at, n)


def windows_of(
    data: bytes, region: _memory.Region, n: int, seed: int = 0
) -> tuple[list[Window], list[tuple[int, bytes]]]:
    """`n` windows of random place and size, side by side in the region, and what must be there afterwards."""
    rng, at = random.Random(seed), 0
    windows, expected = [], []
    for _ in range(n):
        offset = rng.randrange(0, len(data)) // PAGE * PAGE
        need = min(rng.randrange(1, 5 * PAGE), len(data) - offset)
        length = -(-need // PAGE) * PAGE
        windows.append((0, offset, length, need, region.address + at))
        expected.append((at, data[offset : offset + need]))
        at += length
    assert at <= region.size
    return windows, expected


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("n_lanes", [1, 4])
def test_every_window_arrives(n_lanes: int, direct: bool, file: Path, data: bytes, region: _memory.Region) -> None:
    lanes = Lanes([str(file)], n_lanes, direct)
    assert lanes.n_lanes == n_lanes
    assert lanes.direct == (direct and direct_works(file))
    windows, expected = windows_of(data, region, 300)
    lanes.read_windows(windows)
    for at, content in expected:
        assert memory(region, at, len(content)) == content
    counters = lanes.counters()
    assert sum(w[3] for w in windows) <= counters["disk_bytes"] <= sum(w[2] for w in windows)
    assert counters["lane_ns"] > 0
    lanes.close()


def test_a_window_around_a_slice(file: Path, data: bytes, region: _memory.Region) -> None:
    """Wherever a slice begins and ends, whole pages are read, and it lies as far in as in its first page."""
    assert ALIGNMENT == file_layout.PAGE  # the areas of a slot are made for it
    rng, at = random.Random(3), 0
    windows, slices = [], []
    edges = [(0, 1), (0, PAGE), (1, PAGE), (PAGE - 1, 1), (PAGE - 1, 2), (PAGE, 3 * PAGE), (SIZE - 1, 1)]
    for offset, nbytes in [*edges, *((rng.randrange(SIZE - 9 * PAGE), rng.randrange(1, 9 * PAGE)) for _ in range(100))]:
        w = window(0, offset, nbytes, region.address + at)
        _, start, length, need, _ = w
        assert start == offset // PAGE * PAGE
        assert (start + need, length) == (offset + nbytes, -(-need // PAGE) * PAGE)
        windows.append(w)
        slices.append((at + offset - start, data[offset : offset + nbytes]))
        at += length
    lanes = Lanes([str(file)], 2)
    lanes.read_windows(windows)
    assert all(memory(region, where, len(content)) == content for where, content in slices)
    lanes.close()


@pytest.mark.parametrize("direct", [True, False])
def test_the_end_of_a_file_inside_a_page(direct: bool, file: Path, data: bytes, region: _memory.Region) -> None:
    lanes = Lanes([str(file)], 1, direct)
    start = SIZE // PAGE * PAGE
    need = SIZE - start
    lanes.read_windows([(0, start, PAGE, need, region.address)])
    assert memory(region, 0, need) == data[start:]
    with pytest.raises(ReadError, match="shorter than when it was opened"):
        lanes.read_windows([(0, start, PAGE, need + 1, region.address)])
    lanes.close()


def test_more_windows_than_the_queue_holds(file: Path, data: bytes, region: _memory.Region) -> None:
    """The queue begins with room for 1024; it grows with what is in it, from wherever its head stands."""
    lanes = Lanes([str(file)], 4, False)
    lanes.read_windows([(0, 0, PAGE, PAGE, region.address)] * 700)
    n, rng = region.size // PAGE, random.Random(1)
    offsets = [rng.randrange(SIZE // PAGE) * PAGE for _ in range(n)]
    lanes.read_windows([(0, o, PAGE, PAGE, region.address + i * PAGE) for i, o in enumerate(offsets)])
    assert n > 1024
    assert all(memory(region, i * PAGE, PAGE) == data[o : o + PAGE] for i, o in enumerate(offsets))
    assert lanes.counters()["disk_bytes"] == (700 + n) * PAGE
    lanes.close()


def test_the_queue_grows_with_what_waits_in_it(tmp_path: Path) -> None:
    """A graph queues on while its lanes are busy; here another thread does."""
    page_of = [i.to_bytes(4, "little") * (PAGE // 4) for i in range(2000)]
    path = tmp_path / "pages.bin"
    path.write_bytes(b"".join(page_of))
    region = _memory.Region(2000 * PAGE)
    lanes = Lanes([str(path)], 1)

    def read(pages: range) -> None:
        lanes.read_windows([(0, i * PAGE, PAGE, PAGE, region.address + i * PAGE) for i in pages])

    threads = [threading.Thread(target=read, args=(range(at, at + 1000),)) for at in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(memory(region, i * PAGE, PAGE) == page for i, page in enumerate(page_of))
    lanes.close()
    region.close()


def test_several_files(tmp_path: Path, region: _memory.Region) -> None:
    contents = [bytes([i]) * (2 * PAGE) for i in range(5)]
    paths = []
    for i, content in enumerate(contents):
        paths.append(tmp_path / f"{i}.bin")
        paths[i].write_bytes(content)
    lanes = Lanes([str(p) for p in paths], 2)
    lanes.read_windows([(i, PAGE, PAGE, PAGE, region.address + i * PAGE) for i in range(5)])
    assert memory(region, 0, 5 * PAGE) == b"".join(c[:PAGE] for c in contents)
    lanes.close()


def test_nothing_to_read_is_no_wait(file: Path) -> None:
    lanes = Lanes([str(file)], 1)
    lanes.read_windows([])
    assert lanes.failure() is None
    lanes.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks(direct: bool, file: Path, data: bytes, region: _memory.Region) -> None:
    lanes = Lanes([str(file)], 2, direct)
    os.truncate(file, 5 * PAGE + 100)
    lanes.read_windows([(0, 4 * PAGE, PAGE, PAGE, region.address)])
    for offset in (5 * PAGE, 6 * PAGE, 40 * PAGE):
        with pytest.raises(ReadError, match=rf"data\.bin: read at byte {offset} failed: only \d+ of {PAGE} bytes"):
            lanes.read_windows([(0, offset, PAGE, PAGE, region.address)])
        # Stays until it is cleared: whatever was read beside it is not to be trusted.
        message = lanes.failure()
        assert message is not None
        with pytest.raises(ReadError):
            lanes.raise_failure()
        lanes.clear_failure()
        assert lanes.failure() is None
    file.write_bytes(data)
    lanes.read_windows([(0, 40 * PAGE, PAGE, PAGE, region.address)])
    assert memory(region, 0, PAGE) == data[40 * PAGE : 41 * PAGE]
    lanes.close()


def test_a_place_that_cannot_be_written(file: Path) -> None:
    """The kernel's own error is named."""
    lanes = Lanes([str(file)], 1)
    with pytest.raises(ReadError, match="Bad address"):
        lanes.read_windows([(0, 0, PAGE, PAGE, PAGE)])
    lanes.close()


@pytest.mark.parametrize("name", ["absent.bin", "folder/absent.bin"])
def test_a_file_that_cannot_be_opened(name: str, tmp_path: Path, file: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match=r"absent\.bin: cannot open: No such file"):
        Lanes([str(file), str(tmp_path / name)], 2)
    assert set(os.listdir("/proc/self/fd")) == before


def test_direct_reads_are_verified(file: Path) -> None:
    lanes = Lanes([str(file)], 1)
    works = direct_works(file)
    for offset, nbytes in ((0, 1 << 16), (12_345, 4096), (SIZE - 100, 4096), (SIZE - 1, 1)):
        assert lanes.verify_direct(0, offset, nbytes) == works
    assert lanes.direct == works
    lanes.close()
    lanes = Lanes([str(file)], 1, False)
    assert not lanes.verify_direct(0, 0, 4096)
    lanes.close()


def test_closing_joins_the_threads_and_closes_the_files(file: Path, region: _memory.Region) -> None:
    threads, fds = len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    lanes = Lanes([str(file), str(file)], 6)
    assert len(os.listdir("/proc/self/task")) == threads + 6
    lanes.read_windows([(1, 0, PAGE, PAGE, region.address)])
    lanes.close()
    lanes.close()
    assert lanes.n_lanes == 0
    assert len(os.listdir("/proc/self/task")) == threads
    assert set(os.listdir("/proc/self/fd")) == fds


def test_dropping_them_does_the_same(file: Path) -> None:
    threads, fds = len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    lanes = Lanes([str(file)], 3)
    del lanes
    assert len(os.listdir("/proc/self/task")) == threads
    assert set(os.listdir("/proc/self/fd")) == fds


# ---- fault injection does what it says ------------------------------------------------------------


def test_sabotage_flips_a_byte(file: Path, data: bytes, region: _memory.Region) -> None:
    lanes = Lanes([str(file)], 1)
    lanes.sabotage(2)
    lanes.read_windows([(0, 0, PAGE, PAGE, region.address)])
    got = memory(region, 0, PAGE)
    assert [i for i in range(PAGE) if got[i] != data[i]] == [PAGE // 2]
    lanes.sabotage(0)
    lanes.read_windows([(0, 0, PAGE, PAGE, region.address)])
    assert memory(region, 0, PAGE) == data[:PAGE]
    lanes.close()


def test_sabotage_fails_every_read(file: Path, region: _memory.Region) -> None:
    lanes = Lanes([str(file)], 2)
    lanes.sabotage(3)
    with pytest.raises(ReadError, match="Input/output error"):
        lanes.read_windows([(0, 0, PAGE, PAGE, region.address)] * 5)
    lanes.sabotage(0)
    lanes.clear_failure()
    lanes.read_windows([(0, 0, PAGE, PAGE, region.address)])
    lanes.close()


# ---- in the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_a_failed_read_stops_the_generation(
    arch: str, threads: int, overlap: bool, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny(arch, "Q8_0")
    (expected,) = resident(path, [A], 8, threads=threads, ubatch=16)
    engine = open_engine(path, "few", overlap=overlap, threads=threads, ubatch=16)
    generation = engine.generate(A, max_tokens=50, stop_at_end=False)
    tokens = [next(generation).id for _ in range(3)]
    engine.lanes.sabotage(3)
    with pytest.raises(bmoe.ReadError, match=r"\.gguf: read at byte \d+ failed: Input/output error"):  # noqa: PT012
        for token in generation:
            tokens.append(token.id)
    # Nothing that was computed on bytes that never came is given out.
    assert tokens[:8] == expected.tokens[: len(tokens)]
    assert len(tokens) < 50
    with pytest.raises(bmoe.ReadError):
        drive(engine, B, 8)
    engine.lanes.sabotage(0)
    assert not differences(drive(engine, A, 8)[0], expected)


def test_a_file_that_shrinks_while_running(tiny: Tiny, tmp_path: Path, open_engine: OpenEngine) -> None:
    path = Path(shutil.copy(tiny("qwen3moe", "Q8_0"), tmp_path))
    engine = open_engine(path, "few", ubatch=16)
    before, _ = drive(engine, A, 8)
    whole = path.read_bytes()
    os.truncate(path, min(t.offset for layer in engine.layers for t in layer.tensors))
    with pytest.raises(bmoe.ReadError, match="shorter than when it was opened"):
        drive(engine, B, 8)
    path.write_bytes(whole)
    assert not differences(drive(engine, A, 8)[0], before)


def test_lanes_in_a_fork_read_nothing_and_hang_nowhere(file: Path, data: bytes, region: _memory.Region) -> None:
    """Its threads are not there: a use is an error at once, closing ends, and the parent reads on."""
    lanes, read = Lanes([str(file)], 2), window(0, 0, PAGE, region.address)
    lanes.read_windows([read])
    pid = os.fork()
    if pid == 0:
        said = 0
        try:
            signal.alarm(10)
            for use in (lambda: lanes.read_windows([read]), lanes.clear_failure):
                try:
                    use()
                except ReadError as e:
                    said += "of which this one is a fork" in str(e)
            lanes.close()
            del lanes
        finally:
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    lanes.read_windows([read])
    assert memory(region, 0, PAGE) == data[:PAGE]
    lanes.close()
