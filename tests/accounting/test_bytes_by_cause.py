"""Bytes by cause: every byte is charged once."""

from __future__ import annotations

from bmoe.accounting.bytes_by_cause import FlashSplit


def test_flash_split_charges_every_byte_once() -> None:
    split = FlashSplit()
    split.charge("prefill", 100, 3)
    split.charge_batch([10, 20, 30, 40], [1, 2, 3, 4], accepted=2)
    split.charge_batch([7], [0], accepted=0)
    assert split.as_dict() | {} == {
        **dict.fromkeys(split.bytes, 0),
        "prefill": 100,
        "base": 17,
        "accepted": 50,
        "rejected": 40,
    }
    assert split.total == 207
    assert split.rereads == {**dict.fromkeys(split.bytes, 0), "prefill": 3, "base": 1, "accepted": 5, "rejected": 4}
