"""Types of the compiled drafters (ext/bmoe/speculation/_drafters.pyx)."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Tokens: TypeAlias = npt.NDArray[np.integer] | Sequence[int]

class Drafter:
    @property
    def name(self) -> str: ...
    @property
    def compat(self) -> bool: ...
    @property
    def matched(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stats(self) -> dict[str, int]: ...
    def begin(self, prompt: _Tokens) -> None: ...
    def draft(self, history: _Tokens, last: int, n_max: int | None = None) -> npt.NDArray[np.int32]: ...
    def accept(self, n_accepted: int, is_other: bool = False) -> None: ...
    def trim(self, n: int) -> None: ...
    def truncate(self, n: int) -> None: ...

class Ngram(Drafter):
    def __init__(self, *, min_match: int = 3, max_match: int = 16, n_max: int = 3, compat: bool = False) -> None: ...

class NgramSimple(Drafter):
    def __init__(self, *, size_n: int = 12, size_m: int = 48, min_hits: int = 1, compat: bool = False) -> None: ...

class NgramMap(Drafter):
    def __init__(
        self,
        *,
        size_n: int = 12,
        size_m: int = 48,
        min_hits: int = 1,
        four_values: bool = False,
        compat: bool = False,
    ) -> None: ...

class NgramMod(Drafter):
    def __init__(
        self,
        *,
        n_match: int = 24,
        n_min: int = 48,
        n_max: int = 64,
        table_size: int = 4194304,
        compat: bool = False,
    ) -> None: ...

def replay(
    drafter: Drafter, tokens: _Tokens, prompt_len: int
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
