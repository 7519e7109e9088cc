"""Makes a record of each token of one generation. Loaded where records are asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..accounting.token_cost import Cost
from ..accounting.token_record import TokenRecord
from ..host.sampling import HostSample, HostSampler
from ..speculation.verify import Step

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Recorder:
    """Looks at the system and puts everything together. Close it."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._steps = engine, steps
        self._probe = HostSampler(visible_dense(engine))
        self._last = self._probe.sample()
        self._page_size = os.sysconf("SC_PAGE_SIZE")

    def sample(self) -> HostSample:
        """The system now."""
        return self._probe.sample()

    def record(self, index: int, token_id: int, cost: Cost, step: Step | None, host: HostSample) -> TokenRecord:
        """The record of a token; `step`: the batch that it is the first of, None for all others."""
        engine, last = self._engine, self._last
        self._last = host
        cache = engine.cache
        return TokenRecord(
            engine.traces.turn,
            index,
            self._steps,
            int(index > 0),
            token_id,
            cost.time,
            cost.stream,
            cost.flash,
            step.drafted + 1 if step else 0,
            step.drafted if step else 0,
            step.accepted if step else 0,
            engine.budget_bytes,
            cache.n_resident if cache else 0,
            cache.n_slots if cache else 0,
            self._page_size,
            host.major_faults - last.major_faults,
            host.cpu_ns - last.cpu_ns,
            host,
        )

    def close(self) -> None:
        self._probe.close()


def visible_dense(engine: Engine) -> list[tuple[int, int]]:
    """Where the dense weights are, as (address, bytes); nothing where the kernel would not tell what is in memory.

    Of a file that is neither ours nor ours to write, mincore says that all of it is.
    """
    if engine.config.dense_weights in ("mmap", "warm"):
        for path in engine.weights.paths:
            if not os.access(path, os.W_OK) and path.stat().st_uid != os.geteuid():
                return []
    return engine.weights.dense
