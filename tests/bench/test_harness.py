"""What the studies share: children, their failures and memory limits, cells in turn, and the arithmetic of rows."""

from __future__ import annotations

import sys

import pytest

from bench import cgroup, harness

ROWS = [
    {"cell": "plain", "round": 0, "tok_s": 10.0, "hit": None},
    {"cell": "fast", "round": 0, "tok_s": 20.0, "hit": 0.5},
    {"cell": "plain", "round": 1, "tok_s": 5.0, "hit": None},
    {"cell": "fast", "round": 1, "tok_s": 15.0, "hit": 0.7},
]


@pytest.fixture(autouse=True)
def _page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may need it."""
    monkeypatch.setattr(cgroup, "drop_page_cache", lambda: True)


def test_cells_take_turns() -> None:
    assert list(harness.rounds(2, iter("ab"))) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_ratios_are_to_the_base_of_the_same_round() -> None:
    cells = harness.grouped(ROWS, "cell")
    assert list(cells) == [("plain",), ("fast",)]
    found = harness.ratios(cells["fast",], cells["plain",], "tok_s")
    assert found == [2.0, 3.0]
    assert harness.spread(found) == "2.50 (2.00-3.00)"
    assert harness.spread(found, ".0f") == "2 (2-3)"


def test_a_median_is_of_what_was_measured() -> None:
    assert harness.median_of(ROWS, "hit") == pytest.approx(0.6)
    assert harness.median_of(ROWS[:1], "hit") is None
    assert harness.median_of(ROWS, "lost") is None


def test_a_child_is_given_its_input_and_gives_its_output() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.stdin.read().upper())"]
    assert harness.run_child(command, stdin="abc") == "ABC\n"


def test_a_child_that_fails_says_why() -> None:
    for code, last in (("import sys; print('x', file=sys.stderr); sys.exit(3)", "x"), ("raise SystemExit(3)", None)):
        with pytest.raises(harness.ChildFailed) as e:
            harness.run_child([sys.executable, "-c", code])
        assert e.value.code == 3
        assert str(e.value) == (last or "exit code 3")


@pytest.mark.skipif(bool(cgroup.can_cap()), reason=cgroup.can_cap())
def test_a_child_has_no_more_than_its_limit() -> None:
    command = [sys.executable, "-c", "x = bytearray(b'x') * (200 << 20); print(len(x) >> 20)"]
    assert harness.run_child(command, 300) == "200\n"
    with pytest.raises(harness.ChildFailed) as e:
        harness.run_child(command, 100)
    assert e.value.code == -9


def test_what_cannot_be_capped_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cgroup, "can_cap", lambda: "no cgroup")
    assert not harness.may_cap("; what follows")
    assert capsys.readouterr().out == "skipped: capped memory (no cgroup); what follows\n"
    monkeypatch.setattr(cgroup, "can_cap", lambda: "")
    assert harness.may_cap()
    assert capsys.readouterr().out == ""
