"""The vocabulary that all tiny models have: byte-level BPE with a few merges, and a chat template."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.models.byte_alphabet import byte_alphabet

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens longer than a byte, each one character longer than an earlier one; "Ġ" is how the GPT-2
# alphabet spells a space. The order is that of the merges.
MERGED = (
    "Ġt Ġth Ġthe Ġa Ġan Ġand Ġo Ġof Ġs Ġw Ġc Ġb Ġf Ġp Ġh th the he in ing an and er on re ou is es at en "
    "ll or it al ar st ed le lo"
)


def vocabulary() -> list[str]:
    """Token texts, by id: the 256 bytes, one token per merge, then the specials."""
    return [*byte_alphabet(), *MERGED.split(), *SPECIALS]


def token_scale() -> NDArray[np.float32]:
    """Relative size of each token's output row.

    Bytes outside printable ASCII get small rows, so that what a model writes is mostly readable text.
    Specials get next to nothing, so that no run ends early.
    """
    scale = np.ones(len(vocabulary()), np.float32)
    scale[:256] = 0.3
    scale[0x20:0x7F] = 1.0
    scale[-len(SPECIALS) :] = 0.02
    return scale


def prompt_ids(n: int, seed: int = 0) -> list[int]:
    """A prompt of `n` ordinary tokens of the tiny models; another seed, another first token."""
    usable = len(vocabulary()) - len(SPECIALS)
    rest = np.random.default_rng(seed).integers(0, usable, n - 1)
    return [seed % usable, *map(int, rest)]
