"""One record for each token: all that was measured of it, and the columns that files and programs have of that. Pure.

docs/telemetry.md has the columns. What was not measured is None: an empty field in CSV, null in JSON, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .bytes_by_cause import CAUSES
from .counters import StreamCounters
from .timing import TimeSplit

if TYPE_CHECKING:
    from ..host.sampling import HostSample  # where records are not asked for, nothing of it is loaded

MiB = 1 << 20

Value = int | float | None


class TokenRecord(NamedTuple):
    """One token and all that was measured of it. Times in nanoseconds, sizes in bytes.

    `turn`: generations of the engine, from 0; `step`: the token's index in its generation, of `steps` that were asked
    for; `phase`: 0 for the first token, which has the whole prefill in its record, 1 for the others. `batch`: tokens of
    the batch that decoded this one and what follows it, `drafted` of them guesses, of which `accepted` were right: 0 in
    all rows of a group but its first, which has the whole group's cost. `faults` and `cpu_ns`: major faults and CPU of
    the process since the record before. `host`: the system when the token was there.
    """

    turn: int
    step: int
    steps: int
    phase: int
    token_id: int
    time: TimeSplit
    stream: StreamCounters
    flash: Mapping[str, tuple[int, int]]
    batch: int
    drafted: int
    accepted: int
    cache_budget: int
    slots_used: int
    slots: int
    page_size: int
    faults: int
    cpu_ns: int
    host: HostSample

    def values(self) -> dict[str, Value]:
        """What a CSV row has, by column."""
        return dict(zip(COLUMNS, _values(self), strict=True))


COLUMNS: tuple[str, ...] = (
    # Named and placed as the original engine has them.
    "step", "steps", "wall_ms", "io_ms", "compute_ms", "read_bytes", "cache_hit_pct", "stall_ms", "mgmt_ms", "majflt",
    "cpu_ms", "dense_resident_frac", "turn", "majflt_mib", "cache_budget_mib", "rss_mib", "rss_anon_mib",
    "rss_file_mib", "swap_mib", "mem_available_mib", "mem_free_mib", "swap_free_mib", "loop_overhead_ms",
    "mtp_batch", "mtp_draft_ms",
    # bmoe's own.
    "mtp_draft_stall_ms", "output_ms", "build_ms", "rest_ms", "lane_cpu_ms", "phase", "token_id", "drafted", "accepted",
    "routed", "hits", "misses", "evictions", "rereads", "dropped", "slots_used", "slots",
    *(f"{cause}_bytes" for cause in CAUSES), "reread_bytes",
    "cgroup_usage_mib", "cgroup_limit_mib", "tight_usage_mib", "tight_limit_mib",
)  # fmt: skip

TIME_COLUMNS = (
    "compute_ms", "stall_ms", "mgmt_ms", "build_ms", "mtp_draft_ms", "loop_overhead_ms", "output_ms", "rest_ms",
)  # fmt: skip
"""Columns that add up to `wall_ms`."""


def _values(r: TokenRecord) -> list[Value]:
    t, s, h = r.time, r.stream, r.host
    rate = s.hit_rate
    causes = [r.flash.get(cause, (0, 0)) for cause in CAUSES]
    return [
        r.step, r.steps, _ms(t.wall), _ms(s.disk_ns), _ms(t.compute), s.bytes,
        None if rate is None else 100.0 * rate, _ms(t.stall), _ms(t.manage), r.faults,
        _ms(r.cpu_ns), h.dense_resident, r.turn, r.faults * r.page_size / MiB, _mib(r.cache_budget),
        _mib(h.rss), _mib(h.rss_anon), _mib(h.rss_file),
        _mib(h.swap), _mib(h.mem_available), _mib(h.mem_free), _mib(h.swap_free), _ms(t.loop), r.batch, _ms(t.draft),
        _ms(t.draft_stall), _ms(t.output), _ms(t.build), _ms(t.rest), _ms(s.lane_cpu_ns), r.phase,
        r.token_id, r.drafted, r.accepted,
        s.routed, s.hits, s.misses, s.evictions, s.rereads, s.dropped, r.slots_used, r.slots,
        *(total for total, _ in causes), sum(again for _, again in causes),
        _mib(h.cgroup_usage), _mib(h.cgroup_limit), _mib(h.tight_usage), _mib(h.tight_limit),
    ]  # fmt: skip


def _ms(ns: int) -> float:
    return ns / 1e6


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MiB
