"""Opening an engine where the system refuses something."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

import bmoe
from bmoe.host import memory


def test_a_context_beyond_memory(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address space would hold it; only touching it would be fatal, so it must not be granted."""
    little = memory.MemoryFacts(mem_total=1 << 30, mem_available=100 << 20)
    monkeypatch.setattr(memory, "read_memory_facts", lambda: little)
    with pytest.raises(bmoe.BmoeError, match=r"cannot make a context of 1048576 tokens \(.*\): use a smaller -c"):
        bmoe.Engine.open(moe, threads=1, cache_mb=0, ctx=1 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    with bmoe.Engine.open(moe, threads=1, cache_mb=0, ctx=1 << 10) as engine:
        assert len(list(engine.generate("Hello there", max_tokens=2, stop_at_end=False))) == 2


def test_no_thread_for_the_background(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "bmoe-populate":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    # Room for what the tests before have left in this process, too: it is taken off the cache.
    with bmoe.Engine.open(moe, threads=1, cache_mb=512, ctx=64) as engine:
        assert len(list(engine.generate("Hello there", max_tokens=2, stop_at_end=False))) == 2
