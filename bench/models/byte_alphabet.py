"""How a byte-level BPE vocabulary spells bytes."""

from __future__ import annotations


def byte_alphabet() -> list[str]:
    """The visible character that stands for each byte: its own if it has one, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]
