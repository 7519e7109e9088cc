"""What bounds a run, from its counters: one sentence, and the flag that would change it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..accounting.timing import NO_TIME, TimeSplit

Bound = Literal["compute", "disk", "memory pressure", "drafting", "output", "overhead", "cannot tell"]

MiB = 1 << 20
FEW_TOKENS = 8
"""Decoded tokens below which nothing is said: the first ones fill the cache and wake the threads."""
CLEAR = 0.4
"""Share of the wall time from which one part can be what bounds a run."""
CLOSE = 0.8
"""A second part with more than this share of the first leaves it open which of them does."""
FAULTS = 1.0
"""Major faults per decoded token that are memory pressure: each waits for a disk inside what counts as compute."""
STARVED = 0.7
"""CPU of the process by time computing, below which not even one compute thread has had a core for itself."""
ROOM = 64 * MiB
"""Free memory below which a larger cache is not proposed."""


@dataclass(frozen=True)
class Evidence:
    """Counters of decode, and the settings that matter. Sizes in bytes.

    `unused_bytes`: read for drafts that were rejected, and for the draft source itself. `slots`: of the cache;
    `experts`: of the whole model; `room`: what the process could still take; `cores` it may run on.
    """

    tokens: int
    time: TimeSplit = NO_TIME
    cpu_s: float = 0.0
    read_bytes: int = 0
    unused_bytes: int = 0
    disk_ns: int = 0
    hits: int = 0
    misses: int = 0
    rereads: int = 0
    faults: int = 0
    drafted: int = 0
    accepted: int = 0
    slots: int = 0
    experts: int = 0
    budget: int = 0
    room: int = 0
    threads: int = 1
    cores: int = 1
    overlap: bool = True
    drafter: str = "none"
    greedy: bool = True
    dropping: bool = False
    cache_state: bool = False
    dense_weights: str = "anon"


class Diagnosis(NamedTuple):
    """`flag`: what would change it, "" where none would. `sentence` has both, and the numbers."""

    bound: Bound
    flag: str
    sentence: str

    def as_dict(self) -> dict[str, str]:
        return {"by": self.bound, "flag": self.flag, "sentence": self.sentence}


def diagnose(e: Evidence) -> Diagnosis:
    """What the run would have been faster without."""
    t = e.time
    if e.tokens < FEW_TOKENS or t.wall <= 0:
        return _unknown(
            f"{e.tokens} tokens were decoded after the first, at least {FEW_TOKENS} are needed to tell", "-n"
        )
    if e.faults >= FAULTS * e.tokens:
        return _memory(e)
    parts: dict[Bound, int] = {
        "compute": t.compute,
        "disk": t.stall,
        "drafting": t.draft,
        "output": t.output,
        "overhead": t.loop + t.manage + t.build + t.rest,
    }
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    if parts[first] < CLEAR * t.wall or parts[second] > CLOSE * parts[first]:
        return _unknown(
            f"{_WHAT[first]} took {_share(parts[first], t)} and {_WHAT[second]} {_share(parts[second], t)} of decode, "
            f"too close to tell",
            "",
        )
    if first == "compute":
        return _compute(e)
    if first == "disk":
        return _drafts(e) if 2 * e.unused_bytes > e.read_bytes > 0 else _disk(e)
    if first == "drafting":
        return _drafts(e)
    what = f"{_WHAT[first]} took {_share(parts[first], t)} of decode ({_ms(parts[first], e)})"
    what += f", computing {_share(t.compute, t)}"
    if first == "output":
        return Diagnosis("output", "", f"bound by whoever reads the text: {what}; no flag changes that, a file would")
    return Diagnosis("overhead", "", f"bound by bmoe's own work: {what}; no flag changes that, a larger model would")


_WHAT: dict[Bound, str] = {
    "compute": "computing",
    "disk": "waiting for reads",
    "drafting": "drafting",
    "output": "writing the text",
    "overhead": "work around the graph",
}


def _compute(e: Evidence) -> Diagnosis:
    t = e.time
    if e.cpu_s < STARVED * t.compute / 1e9:
        return _unknown(
            f"computing took {_share(t.compute, t)} of decode, but the process had only {e.cpu_s:.2f} s of CPU in "
            f"{t.compute / 1e9:.2f} s of it: something else takes the cores",
            "",
        )
    if e.threads < e.cores:
        flag, how = "-t", f"-t {e.cores} would use all cores"
    elif e.drafter == "none" and e.greedy:
        flag, how = "--ngram", "--ngram would compute several tokens at once where the text repeats itself"
    elif e.experts:
        flag, how = "--n-expert-used", "only --n-expert-used would compute less (lossy)"
    else:
        flag, how = "", "no flag changes that, a smaller quantization would"
    return Diagnosis(
        "compute",
        flag,
        f"bound by compute: {_share(t.compute, t)} of decode ({_ms(t.compute, e)}) on {e.threads} of {e.cores} cores, "
        f"{_share(t.stall, t)} waiting for reads; {how}",
    )


def _disk(e: Evidence) -> Diagnosis:
    t, looked = e.time, e.hits + e.misses
    if not e.overlap:
        flag, how = "--overlap", "--overlap would compute while it reads"
    elif not e.slots:
        flag, how = "--cache-mb", "--cache-mb auto would keep experts in memory"
    elif not e.cache_state and e.rereads * 2 < e.misses:
        flag = "--cache-state"
        how = (
            f"{e.misses - e.rereads} of {e.misses} misses were first reads of an expert: --cache-state would read the "
            "most used ones ahead at the next start"
        )
    elif e.slots < e.experts and e.room >= ROOM:
        flag, how = "--cache-mb", f"a --cache-mb above {e.budget // MiB} would hit more ({e.room // MiB} MiB are free)"
    elif not e.dropping:
        flag, how = "--drop-cold-experts", "--drop-cold-experts would read less (lossy)"
    else:
        flag, how = "--drop-cold-experts", "a larger --drop-cold-experts would read less (lossy)"
    hit = f"{100 * e.hits / looked:.1f} % hit" if looked else "nothing routed"
    speed = f" at {e.read_bytes / MiB / (e.disk_ns / 1e9):.0f} MiB/s" if e.disk_ns else ""
    return Diagnosis(
        "disk",
        flag,
        f"bound by the disk: {_share(t.stall, t)} of decode waited for reads ({_ms(t.stall, e)}; "
        f"{e.read_bytes / MiB / e.tokens:.1f} MiB/token{speed}, {hit}), computing {_share(t.compute, t)}; {how}",
    )


def _memory(e: Evidence) -> Diagnosis:
    if e.dense_weights in ("mmap", "warm"):
        flag, how = "--dense-weights", "--dense-weights anon would keep the dense weights in memory"
    elif e.budget:
        flag, how = "--cache-mb", f"a --cache-mb below {e.budget // MiB} would leave memory to the rest"
    else:
        flag, how = "-c", "a smaller -c would take less memory"
    return Diagnosis(
        "memory pressure",
        flag,
        f"bound by memory pressure: {e.faults / e.tokens:.1f} major faults per token, each a wait for the disk, and "
        f"{e.room // MiB} MiB free; {how}",
    )


def _drafts(e: Evidence) -> Diagnosis:
    t = e.time
    share = f"{100 * e.accepted / e.drafted:.1f} % of {e.drafted} drafts accepted" if e.drafted else "nothing drafted"
    how = "a smaller --draft would guess less, none at all would tell what it brings"
    if e.drafter.startswith("mtp") and e.drafted:
        how = "a smaller --draft or a larger --mtp-p-min would guess less"
    return Diagnosis(
        "drafting",
        "--draft",
        f"bound by drafting: {_share(t.draft, t)} of decode ({_ms(t.draft, e)}), {_share(t.stall, t)} waiting for "
        f"reads, {share}, "
        f"{e.unused_bytes / MiB:.1f} of {e.read_bytes / MiB:.1f} MiB read for it or for rejected drafts; {how}",
    )


def _unknown(why: str, flag: str) -> Diagnosis:
    how = "; a longer -n would say" if flag == "-n" else ""
    return Diagnosis("cannot tell", flag, f"cannot tell what bounds this run: {why}{how}")


def _share(part: int, t: TimeSplit) -> str:
    return f"{100 * part / t.wall:.0f} %"


def _ms(part: int, e: Evidence) -> str:
    return f"{part / 1e6 / e.tokens:.2f} ms/token"
