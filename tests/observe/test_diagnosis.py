"""What bounds a run: each answer from counters that call for it, and the flag that goes with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bmoe.accounting.timing import TimeSplit
from bmoe.observe.diagnosis import Evidence, diagnose

MS = 1_000_000
MiB = 1 << 20


def split(**ms: float) -> TimeSplit:
    """A split of so many milliseconds; the wall time is their sum."""
    parts = {name: int(MS * value) for name, value in ms.items()}
    return TimeSplit(wall=sum(parts.values()), **parts)


BUSY = Evidence(
    tokens=100, time=split(compute=800, stall=100, loop=20), cpu_s=1.5, threads=4, cores=4, slots=50, experts=200,
    hits=800, misses=200, rereads=180, read_bytes=200 * MiB, disk_ns=400 * MS, budget=512 * MiB, room=2048 * MiB,
)  # fmt: skip
WAITS = replace(BUSY, time=split(compute=200, stall=700, loop=20), cpu_s=0.5)


@pytest.mark.parametrize(
    ("evidence", "bound", "flag", "says"),
    [
        (BUSY, "compute", "--ngram", "87 % of decode (8.00 ms/token) on 4 of 4 cores, 11 % waiting for reads"),
        (replace(BUSY, threads=2), "compute", "-t", "-t 4"),
        (replace(BUSY, drafter="mtp"), "compute", "--n-expert-used", "lossy"),
        (replace(BUSY, greedy=False, experts=0), "compute", "", "no flag"),
        (replace(WAITS, overlap=False), "disk", "--overlap", "76 % of decode waited for reads (7.00 ms/token; 2.0 MiB"),
        (WAITS, "disk", "--cache-mb", "at 500 MiB/s, 80.0 % hit), computing 22 %; a --cache-mb above 512"),
        (replace(WAITS, slots=0), "disk", "--cache-mb", "--cache-mb auto"),
        (replace(WAITS, rereads=10), "disk", "--cache-state", "190 of 200 misses were first reads"),
        (replace(WAITS, room=MiB), "disk", "--drop-cold-experts", "lossy"),
        (replace(WAITS, room=MiB, dropping=True), "disk", "--drop-cold-experts", "a larger --drop-cold-experts"),
        (replace(BUSY, faults=1420), "memory pressure", "--cache-mb", "14.2 major faults per token"),
        (replace(BUSY, faults=100, dense_weights="mmap"), "memory pressure", "--dense-weights", "1.0 major faults"),
        (replace(BUSY, faults=100, budget=0), "memory pressure", "-c", "smaller -c"),
        (
            replace(BUSY, time=split(compute=200, draft=700), drafter="mtp", drafted=300, accepted=30),
            "drafting", "--draft", "78 % of decode (7.00 ms/token), 0 % waiting for reads, 10.0 % of 300 drafts",
        ),
        (replace(WAITS, unused_bytes=120 * MiB, drafted=9), "drafting", "--draft", "120.0 of 200.0 MiB"),
        (replace(BUSY, time=split(compute=200, output=700)), "output", "", "writing the text took 78 % of decode"),
        (replace(BUSY, time=split(compute=200, loop=500, build=200)), "overhead", "", "work around the graph"),
        (replace(BUSY, tokens=7), "cannot tell", "-n", "7 tokens were decoded"),
        (Evidence(tokens=0), "cannot tell", "-n", "0 tokens"),
        (
            replace(BUSY, time=split(compute=440, stall=410, loop=150)),
            "cannot tell", "", "computing took 44 % and waiting for reads 41 % of decode, too close",
        ),
        (replace(BUSY, time=split(compute=39, stall=20, loop=21, draft=20)), "cannot tell", "", "too close"),
        (replace(BUSY, cpu_s=0.5), "cannot tell", "", "had only 0.50 s of CPU in 0.80 s of it"),
    ],
)  # fmt: skip
def test_what_bounds_a_run(evidence: Evidence, bound: str, flag: str, says: str) -> None:
    found = diagnose(evidence)
    assert (found.bound, found.flag) == (bound, flag), found.sentence
    assert says in found.sentence
    assert found.flag in found.sentence
    assert "\n" not in found.sentence
    assert found.as_dict() == {"by": bound, "flag": flag, "sentence": found.sentence}


def test_faults_are_told_before_all_else() -> None:
    """They lie in what counts as compute, or as waiting."""
    assert diagnose(replace(BUSY, faults=99)).bound == "compute"
    assert {diagnose(replace(e, faults=100)).bound for e in (BUSY, WAITS)} == {"memory pressure"}
