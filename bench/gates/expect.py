"""Exact gates: counts of scripted runs against committed ones. Any difference fails, on any machine.

The counts are in expected.json. `python -m pytest bench --gate --rebase` writes them anew and shows what has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).parent / "expected.json"
REBASE = "a change that is meant: python -m pytest bench --gate --rebase"

SHOWN = 6
"""Counts that one line tells of."""

Counts = Mapping[str, int]


@dataclass
class Expectations:
    """The committed counts: scenario -> count -> number. With `rebase`, what differs is noted, not refused."""

    path: Path = EXPECTED
    rebase: bool = False
    changes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._checked: set[str] = set()
        self._known: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def known(self, scenario: str) -> bool:
        """Whether there is something to compare with."""
        return scenario in self._known

    def breach(self, scenario: str, got: Counts, tolerance: float = 0.0) -> str:
        """What is wrong with the counts of a scenario in one line, "" for nothing.

        `tolerance`: how far a count may be off, as a part of it.
        """
        self._checked.add(scenario)
        expected = self._known.get(scenario)
        if expected is None and not self.rebase:
            return f"gate breached: {scenario}: nothing is expected yet; {REBASE}"
        found = differences(expected or {}, got, tolerance)
        if not found:
            return ""
        if self.rebase:
            self.changes += [f"{scenario}: {line}" for line in (found if expected else [f"{len(got)} counts are new"])]
            self._known[scenario] = dict(got)
            return ""
        more = [f"{len(found) - SHOWN} more counts"] * (len(found) > SHOWN)
        return f"gate breached: {scenario}: {'; '.join(found[:SHOWN] + more)}; {REBASE}"

    def forget_the_rest(self) -> None:
        """With `rebase`, after a run of all gates: takes out what none of them has asked for.

        What belongs to a toolchain (its name has an @) stays: this machine has one of them only.
        """
        for scenario in [s for s in self._known if "@" not in s and s not in self._checked]:
            del self._known[scenario]
            self.changes.append(f"{scenario}: is gone")

    def write(self) -> None:
        """Writes what `rebase` has noted; nothing where nothing has changed."""
        if self.changes:
            self.path.write_text(json.dumps(self._known, indent=1, sort_keys=True) + "\n")


def differences(expected: Counts, got: Counts, tolerance: float = 0.0) -> list[str]:
    """One entry for each count that differs, with both numbers and the distance."""
    found = []
    for key in sorted({*expected, *got}):
        if key not in got:
            found.append(f"{key} is gone, expected {expected[key]}")
        elif key not in expected:
            found.append(f"{key} {got[key]} is new")
        elif abs(got[key] - expected[key]) > tolerance * abs(expected[key]):
            off = got[key] - expected[key]
            part = f", {off / expected[key]:+.1%}" if tolerance and expected[key] else ""
            found.append(f"{key} {got[key]}, expected {expected[key]} ({off:+}{part})")
    return found
