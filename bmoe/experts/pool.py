"""The memory of a cache: one region, cut into the slots, spares and ring areas of a plan."""

from __future__ import annotations

import threading

from ..host import _memory
from .slots import SlotPlan

_POPULATE_STEP = 32 << 20


class SlotPool:
    """Memory for `plan`, made resident in the background: zeroing gigabytes would only delay the first token.

    Close it when no read can be under way any more. Raises MemoryBudgetError where there is none.
    """

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        self._region = _memory.Region(max(plan.total_bytes, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._populate, name="bmoe-populate", daemon=True)
        try:
            self._thread.start()
            self._started = True
        except RuntimeError:  # no thread to be had: pages then come as reads fill them
            self._started = False

    def classes(self) -> list[tuple[int, int, int, int]]:
        """Of each size class: address, slots, spares behind them, bytes of each."""
        plan, found, address = self.plan, [], self._region.address
        for n, spares, stride in zip(plan.class_slots, plan.class_spares, plan.class_stride, strict=True):
            found.append((address, n, spares, stride))
            address += (n + spares) * stride
        return found

    @property
    def ring_address(self) -> int:
        """Where the ring's areas begin, behind all slots."""
        return self._region.address + sum(
            (n + spares) * stride
            for n, spares, stride in zip(
                self.plan.class_slots, self.plan.class_spares, self.plan.class_stride, strict=True
            )
        )

    def _populate(self) -> None:
        for at in range(0, self._region.size, _POPULATE_STEP):
            if self._stop.is_set() or self._region.populate(at, _POPULATE_STEP):
                return

    def close(self) -> None:
        self._stop.set()
        if self._started:
            self._thread.join()
        self._region.close()
