"""What an engine drafts with: the drafters' names and settings, and `DraftSpec`, which has them all. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import UsageError
from .draft_width import DRAFT_POLICIES, DraftPolicy

# In order of precedence. llama.cpp's types are in its order (common/speculative.cpp); `ngram` is last because
# it drafts on the least evidence and would leave the others nothing to do.
TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram")
# The model's own head (bmoe/speculation/mtp.py) stands behind all that read the text: those cost nothing.
MTP = "mtp"
ALL_TYPES = (*TYPES, MTP)

# llama.cpp's limit of every n-gram flag (common/arg.cpp).
MAX_SIZE = 1024


@dataclass(frozen=True)
class NgramConfig:
    """Settings of `ngram`, in tokens: the draft's length, the shortest match that drafts, where matches are capped."""

    n_max: int = 3
    min_match: int = 3
    max_match: int = 16

    def check(self) -> None:
        _in_range("--draft", self.n_max, 1)
        _in_range("--ngram-min-match", self.min_match, 1)
        _in_range("--ngram-max-match", self.max_match, 1)
        if self.max_match < self.min_match:
            raise UsageError(
                f"--ngram-max-match: {self.max_match} is below --ngram-min-match {self.min_match}: nothing would match"
            )


@dataclass(frozen=True)
class MapConfig:
    """Settings of `ngram-simple` and `ngram-map-*`: tokens looked up, tokens drafted, occurrences needed.

    The defaults are llama.cpp's (common/common.h, common_params_speculative_ngram_map).
    """

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1

    def check(self, kind: str) -> None:
        _in_range(f"--spec-{kind}-size-n", self.size_n, 1)
        _in_range(f"--spec-{kind}-size-m", self.size_m, 1)
        _in_range(f"--spec-{kind}-min-hits", self.min_hits, 0, 16380)


@dataclass(frozen=True)
class ModConfig:
    """Settings of `ngram-mod`: tokens hashed, fewest and most tokens drafted, slots of the table.

    The defaults are llama.cpp's (common/common.h, common_params_speculative_ngram_mod).
    """

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64
    table_size: int = 4194304

    def check(self) -> None:
        _in_range("--spec-ngram-mod-n-match", self.n_match, 1)
        _in_range("--spec-ngram-mod-n-min", self.n_min, 0)
        _in_range("--spec-ngram-mod-n-max", self.n_max, 0)
        _in_range("table_size", self.table_size, 1, 2**31)


def _in_range(flag: str, value: int, low: int, high: int = MAX_SIZE) -> None:
    if not low <= value <= high:
        raise UsageError(f"{flag}: {value} is out of range, give {low} to {high}")


DrafterConfig: TypeAlias = NgramConfig | MapConfig | ModConfig

CONFIGS: dict[str, type[NgramConfig] | type[MapConfig] | type[ModConfig]] = {
    "ngram": NgramConfig,
    "ngram-simple": MapConfig,
    "ngram-map-k": MapConfig,
    "ngram-map-k4v": MapConfig,
    "ngram-mod": ModConfig,
}
"""The settings' class of each of TYPES."""


@dataclass(frozen=True)
class DraftSpec:
    """What to draft with: the command line's draft flags. Checked as it is made: raises UsageError.

    types: any of ALL_TYPES, in any order; precedence is ALL_TYPES'. Empty: no speculation.
    draft: tokens that `mtp` drafts, and `ngram` too (--draft).
    policy: "adaptive" verifies the part of a draft that is expected to pay (`draft_width`), "always" all of it.
    n_max: no draft is longer (--spec-draft-n-max); None leaves each source its own length.
    mtp_p_min: `mtp` stops before a token that its head gives less than this probability (--mtp-p-min).
    """

    types: tuple[str, ...] = ()
    draft: int = 3
    n_max: int | None = None
    policy: DraftPolicy = "adaptive"
    mtp_p_min: float = 0.0
    ngram: NgramConfig = field(default_factory=NgramConfig)
    ngram_simple: MapConfig = field(default_factory=MapConfig)
    ngram_map_k: MapConfig = field(default_factory=MapConfig)
    ngram_map_k4v: MapConfig = field(default_factory=MapConfig)
    ngram_mod: ModConfig = field(default_factory=ModConfig)

    def __post_init__(self) -> None:
        for name in self.types:
            if name not in ALL_TYPES:
                raise UsageError(f"--spec-type: {name!r} is none of none, {', '.join(ALL_TYPES)}")
        if len(set(self.types)) < len(self.types):
            raise UsageError(f"--spec-type: {','.join(self.types)} names a type twice")
        _in_range("--draft", self.draft, 1)
        if self.n_max is not None:
            _in_range("--spec-draft-n-max", self.n_max, 0)
        if self.policy not in DRAFT_POLICIES:
            raise UsageError(f"--draft-policy: {self.policy!r} is none of {', '.join(DRAFT_POLICIES)}")
        if not 0.0 <= self.mtp_p_min <= 1.0:
            raise UsageError(f"--mtp-p-min: {self.mtp_p_min} is out of range, give 0 (never stops) to 1")
        self.ngram.check()
        for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
            config = self.config(name)
            assert isinstance(config, MapConfig)
            config.check(name)
            _in_range(f"--spec-{name}-min-hits", config.min_hits, 1, 16380)
        self.ngram_mod.check()
        if self.ngram_mod.n_min > self.ngram_mod.n_max:
            raise UsageError(
                f"--spec-ngram-mod-n-min: {self.ngram_mod.n_min} is above --spec-ngram-mod-n-max"
                f" {self.ngram_mod.n_max}: no draft could be long enough"
            )

    def config(self, name: str) -> DrafterConfig:
        """The settings of one of TYPES."""
        config = getattr(self, name.replace("-", "_"))
        assert isinstance(config, DrafterConfig)
        return config

    def ordered(self) -> tuple[str, ...]:
        """`types` in order of precedence."""
        return tuple(name for name in ALL_TYPES if name in self.types)

    def longest(self) -> int:
        """The most tokens that any of the types drafts at once: what a verify batch must have room for, less one."""
        sizes = [self.draft if MTP in self.types else 0]
        for name in (name for name in self.types if name != MTP):
            config = self.config(name)
            sizes.append(config.size_m if isinstance(config, MapConfig) else config.n_max)
        longest = max(sizes)
        return longest if self.n_max is None else min(longest, self.n_max)
