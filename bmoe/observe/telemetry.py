"""Telemetry of a generation: looks at the system and makes a record of each token. Loaded where that is asked for."""

from __future__ import annotations

import os
from typing import Protocol

from ..accounting.token_cost import Cost
from ..accounting.token_record import TokenRecord
from ..host.sampling import HostSample, HostSampler


class Fill(Protocol):
    """How full a cache is (`bmoe.streamer._cache.ExpertCache`)."""

    @property
    def n_resident(self) -> int: ...
    @property
    def n_slots(self) -> int: ...


class Telemetry:
    """Makes the records of turn `turn`, of at most `steps` tokens. Close it.

    `cache`: None where there is none, `budget_bytes` what it was granted; `dense`: where the dense weights lie, as
    (address, bytes).
    """

    def __init__(
        self, turn: int, steps: int, cache: Fill | None, budget_bytes: int, dense: list[tuple[int, int]]
    ) -> None:
        self._turn, self._steps, self._cache, self._budget = turn, steps, cache, budget_bytes
        self._probe = HostSampler(dense)
        self._last = self._probe.sample()
        self._page_size = os.sysconf("SC_PAGE_SIZE")

    def sample(self) -> HostSample:
        """The system now."""
        return self._probe.sample()

    def record(
        self, index: int, token_id: int, cost: Cost, batch: tuple[int, int, int], host: HostSample
    ) -> TokenRecord:
        """The record of a token.

        `batch`: tokens of the verify batch that decoded it, how many of them were drafted, and of these accepted; zeros
        where it is not the first token of its batch.
        """
        last, self._last = self._last, host
        cache = self._cache
        return TokenRecord(
            self._turn,
            index,
            self._steps,
            int(index > 0),
            token_id,
            cost.time,
            cost.stream,
            cost.flash,
            *batch,
            self._budget,
            cache.n_resident if cache else 0,
            cache.n_slots if cache else 0,
            self._page_size,
            host.major_faults - last.major_faults,
            host.cpu_ns - last.cpu_ns,
            host,
        )

    def close(self) -> None:
        self._probe.close()
