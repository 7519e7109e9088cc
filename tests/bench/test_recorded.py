"""bench/studies/recorded.py: a head's drafts, recorded on one model and replayed on another, cost the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest

import bmoe
from bench.models.make_model import make_model
from bench.studies import recorded, speculation
from bmoe.speculation import DraftSpec

N = 32
CELLS = ["mtp 1", "mtp 3", "mtp 3, p 0.4", "mtp 4, p 0.6"]
COUNTS = ("drafted", "accepted", "decodes", "per_decode", "coverage", "acceptance")
DRAFT = DraftSpec(types=("ngram-mod", "mtp"), draft=recorded.PLACES, policy="always")


@pytest.fixture(scope="module")
def demo() -> Iterator[bmoe.Engine]:
    with bmoe.Engine.open(ctx=512, threads=1, draft=DRAFT) as engine:
        yield engine


@pytest.fixture(scope="module")
def record(demo: bmoe.Engine) -> recorded.Record:
    return recorded.record(demo, "prose", demo.tokenize("The Licensor grants to You a licence to"), N)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bmoe.Engine]:
    path = tmp_path_factory.mktemp("hybrid") / "m.gguf"
    make_model(path, "qwen3.6-35b-a3b", layers=4, scale=16, mtp=True)
    with bmoe.Engine.open(
        path, ctx=512, threads=1, cache_mb=40, force_cache=True, overlap=True, rs_snapshots=64, draft=DRAFT
    ) as engine:
        yield engine


def runs(record: recorded.Record) -> tuple[speculation.Run, speculation.Run]:
    """The text chosen by the model itself and drafted by its own head, and both as recorded."""
    return (
        speculation.Run("prose", "free", record.prompt, N),
        speculation.Run("prose", "recorded", record.prompt, N, record.script, record),
    )


def test_the_record_is_what_the_head_drafts(demo: bmoe.Engine, record: recorded.Record) -> None:
    assert len(record.script) == N
    # After each token but the last, which nothing follows.
    assert len(record.drafts) == len(record.sure) >= N - 2
    assert all(len(row) == recorded.PLACES for row in record.drafts)
    assert all(0 < p <= 1 for row in record.sure for p in row)
    reached = [record.accepted(i) for i in range(len(record.drafts))]
    assert 0 < sum(reached) < recorded.PLACES * len(reached)  # else the tests below tell nothing apart
    assert demo.sequence.head is not None
    assert not isinstance(demo.sequence.head, recorded.Replayed)


@pytest.mark.parametrize("cell", CELLS)
def test_replayed_at_home_it_counts_as_the_head_itself(demo: bmoe.Engine, record: recorded.Record, cell: str) -> None:
    head = demo.sequence.head
    free, replayed = (speculation.run_cell(demo, head, run, cell) for run in runs(record))
    demo.sequence.head = head
    assert replayed.token_ids == record.script == free.token_ids
    measured = [speculation.measures(result) for result in (free, replayed)]
    assert {k: measured[0][k] for k in COUNTS} == {k: measured[1][k] for k in COUNTS}
    assert measured[0]["drafted"] > 0


@pytest.mark.parametrize("cell", CELLS)
def test_elsewhere_the_counts_are_the_same_and_the_bytes_the_files(
    demo: bmoe.Engine, hybrid: bmoe.Engine, record: recorded.Record, cell: str
) -> None:
    found, heads = [], (demo.sequence.head, hybrid.sequence.head)
    for engine, head in zip((demo, hybrid), heads, strict=True):
        result = speculation.run_cell(engine, head, runs(record)[1], cell)
        engine.sequence.head = head
        assert result.token_ids == record.script
        found.append(speculation.measures(result))
    assert {k: found[0][k] for k in COUNTS} == {k: found[1][k] for k in COUNTS}
    split = found[1]["split"]
    assert sum(split.values()) == pytest.approx(found[1]["mib_per_token"])
    assert split["draft_source"] > 0
    assert split["base"] > 0
    assert (split["accepted"] > 0) == (found[1]["accepted"] > 0)
    assert split["recovery"] == 0


def test_a_place_is_drafted_where_the_head_was_sure() -> None:
    one = recorded.Record("x", [1], [5, 6, 7, 8], [[6, 7, 0, 9], [7, 0, 0, 0]], [[0.9, 0.5, 0.3, 0.8], [1, 1, 1, 1]])
    assert [one.accepted(0), one.accepted(0, 1), one.accepted(1)] == [2, 1, 1]
    assert [recorded.decide(one, 0, place, 0.4) for place in range(3)] == [(6, True), (7, True), (0, False)]
    assert recorded.decide(one, 0, 2, 0.0) == (0, True)
    assert recorded.decide(one, 2, 0, 0.0)[1] is False  # beyond the record
    assert recorded.fits(one, 10)
    assert not recorded.fits(one, 9)
    assert recorded.load(json.dumps([asdict(one)])) == {"x": one}


def test_no_more_is_drafted_than_was_recorded(demo: bmoe.Engine, record: recorded.Record) -> None:
    assert demo.sequence.head is not None
    with pytest.raises(ValueError, match="5 tokens to draft, and 4 are recorded"):
        recorded.Replayed(demo.sequence.head.head, record, 5, 0.0)


def test_cells_are_named() -> None:
    assert speculation.cells_of("table") == speculation.TABLE
    assert set(speculation.TABLE) <= set(speculation.CELLS)
    assert speculation.cells_of("plain;mtp 1") == ["plain", "mtp 1"]
    with pytest.raises(Exception, match="no cell 'mpt 1'"):
        speculation.cells_of("plain;mpt 1")
