"""Why each byte was read from disk: every read is charged to one cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CAUSES = ("prefill", "base", "accepted", "rejected", "draft_source", "prefetch_used", "prefetch_wasted", "recovery")
"""What a byte read from disk is charged to: the prompt; what the confirmed position routed; widening by drafts that
were accepted, by drafts that were not; the draft source's own routing; reading ahead; decoding again what a memory
that cannot go back had lost."""


@dataclass
class FlashSplit:
    """Bytes read from disk by cause, and of these the part of experts that had been read before."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    rereads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))

    def charge(self, cause: str, total: int, again: int) -> None:
        """Charges `total` bytes, `again` of them re-reads, to one cause."""
        self.bytes[cause] += total
        self.rereads[cause] += again

    def charge_batch(self, total: Sequence[int], again: Sequence[int], accepted: int) -> None:
        """Charges a verify batch by position: 0 is the confirmed token, then the drafts, `accepted` of them right."""
        self.charge("base", total[0], again[0])
        self.charge("accepted", sum(total[1 : 1 + accepted]), sum(again[1 : 1 + accepted]))
        self.charge("rejected", sum(total[1 + accepted :]), sum(again[1 + accepted :]))

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def copy(self) -> FlashSplit:
        """As it is now."""
        return FlashSplit(dict(self.bytes), dict(self.rereads))

    def since(self, before: FlashSplit) -> dict[str, tuple[int, int]]:
        """What was charged after `before` was copied: cause -> (bytes, re-reads among them), causes of 0 left out."""
        return {
            cause: (n - before.bytes[cause], self.rereads[cause] - before.rereads[cause])
            for cause, n in self.bytes.items()
            if n != before.bytes[cause]
        }

    def as_dict(self) -> dict[str, int]:
        """Cause -> bytes."""
        return dict(self.bytes)
