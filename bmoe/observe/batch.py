"""What traces call a batch, a layer and a word: shared by those of routes and of reads. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..gguf.file import ExpertLayer


@dataclass(frozen=True)
class Batch:
    """What the engine decodes at once: `n_tokens` tokens, the first at `position` of the sequence.

    `cause`: "dense" (opening), "prefill", "decode" or "recovery".
    """

    turn: int
    cause: str
    position: int
    n_tokens: int

    @property
    def phase(self) -> int:
        """0 up to the end of a prompt, 1 for all else: the counters of a result are split in the same way."""
        return 0 if self.cause in ("dense", "prefill") else 1


def layer_number(layer: ExpertLayer, index: int) -> int:
    """The number that a block's name has (`blk.3` is 3); its index where it has none."""
    found = re.search(r"(\d+)$", layer.block)
    return int(found[1]) if found else index


def word(text: str) -> str:
    """`text` as one word of a preamble."""
    return re.sub(r"[^\x21-\x7e]", "_", text) or "_"
