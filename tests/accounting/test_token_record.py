"""The columns of a token's record."""

from __future__ import annotations

from bmoe.accounting.bytes_by_cause import CAUSES
from bmoe.accounting.token_record import COLUMNS, TIME_COLUMNS


def test_columns_are_what_the_original_has() -> None:
    """Their places, too: a program that reads by position goes on working."""
    assert ",".join(COLUMNS[:25]) == (
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
        "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
        "mem_available_mib,mem_free_mib,swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms"
    )
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert {f"{cause}_bytes" for cause in CAUSES} | set(TIME_COLUMNS) <= set(COLUMNS)
