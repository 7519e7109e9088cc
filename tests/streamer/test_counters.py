"""Counters go by their names, from where the event happens to `StreamCounters`."""

from __future__ import annotations

from pathlib import Path

from conftest import OpenEngine, Tiny

from bench.models.tiny import prompt_ids
from bench.reference import drive
from bmoe.accounting.counters import StreamCounters
from bmoe.streamer import Lanes, Streamer


def test_every_counter_has_one_source(tmp_path: Path) -> None:
    """A name that only one side knows, or that two count, is an error."""
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(4096))
    lanes = Lanes([str(path)], 1)
    streamer = Streamer(lanes, [], 1, False)
    names = [*streamer.counters(), *lanes.counters()]
    assert sorted(names) == sorted(StreamCounters._fields)
    assert StreamCounters(**streamer.counters(), **lanes.counters()) == StreamCounters()
    lanes.close()
    streamer.close()


def test_they_arrive_where_they_belong(tiny: Tiny, open_engine: OpenEngine) -> None:
    """What can be said of each from outside, in a run that uses all of the mechanism but the ring."""
    engine = open_engine(tiny("qwen3moe", "Q8_0", n_layer=4, n_expert=16, n_used=4), 20, overlap=True,
                         prefetch="next-layer", drop_cold_experts=0.9)  # fmt: skip
    _, result = drive(engine, prompt_ids(20, seed=2), 40)
    c = engine.counters()
    assert c == StreamCounters(**engine.streamer.counters(), **engine.lanes.counters())
    # The last layer routes only the prompt's last token.
    assert c.routed == 4 * (3 * 20 + 1 + 4 * 39)
    assert c.drop_positions == len(engine.layers) * 39
    assert c.drop_routed == 4 * c.drop_positions
    assert 0 < c.dropped < c.drop_routed
    assert 0 < c.drop_mass < c.drop_positions
    assert c.hits + c.misses <= c.routed - c.dropped
    assert c.evictions <= c.misses
    assert c.rereads <= c.misses
    assert c.guess_hits <= min(c.guessed, c.misses)
    assert c.guess_cancelled <= c.guessed
    assert c.disk_bytes >= c.bytes
    assert c.lane_cpu_ns > 0
    assert c.lane_ns > 0
    assert c.disk_ns > 0
    assert 0 < c.plan_ns < c.moe_ns
    assert 0 < c.guess_ns < c.manage_ns
    assert c.compute_ns > 0
    assert c.build_ns > 0
    assert c.draft_compute_ns == c.draft_wait_ns == c.draft_manage_ns == c.draft_build_ns == 0
    ahead, split = engine.streamer.read_ahead_bytes(), result.flash_split
    assert {"used", "wasted", "used_rereads", "wasted_rereads"} == set(ahead)
    for what in ("used", "wasted"):
        assert split.bytes[f"prefetch_{what}"] == ahead[what]
        assert split.rereads[f"prefetch_{what}"] == ahead[f"{what}_rereads"]
