"""Which drafters to use, with what settings, in which order. Pure policy: no model, no llama.cpp.

`make(name, **config)` gives one drafter to use alone; `make_drafter(spec)` gives the decode loop its `Drafter`,
several sources in order of precedence; `add_draft_flags` and `spec_from_args` are the command line's part.
The drafters themselves are in ext/bmoe/speculation/_drafters.pyx, what they do is in docs/drafting.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from . import _drafters
from .draft_width import DRAFT_POLICIES, DraftPolicy

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel

Tokens: TypeAlias = npt.NDArray[np.int32]

# In order of precedence. llama.cpp's types are in its order (common/speculative.cpp); `ngram` is last because
# it drafts on the least evidence and would leave the others nothing to do.
TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram")
# The model's own head (bmoe/speculation/mtp.py) stands behind all that read the text: those cost nothing.
MTP = "mtp"
ALL_TYPES = (*TYPES, MTP)

# llama.cpp's limit of every n-gram flag (common/arg.cpp).
MAX_SIZE = 1024

_NO_TOKENS: Tokens = np.empty(0, np.int32)
_NO_TOKENS.setflags(write=False)


class Source(Protocol):
    """One producer of drafts, as `make` returns it; a draft model can be another.

    `draft` gets int32[n], all confirmed tokens before `last`, and returns int32[k], k <= n_max, empty to
    abstain. `accept` tells what became of the draft, its own or (`is_other`) another source's.
    """

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stats(self) -> dict[str, int]: ...
    def begin(self, prompt: Tokens) -> None: ...
    def draft(self, history: Tokens, last: int, n_max: int | None = None) -> Tokens: ...
    def accept(self, n_accepted: int, is_other: bool = False) -> None: ...
    def trim(self, n: int) -> None: ...


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


_CONFIGS: dict[str, type[NgramConfig] | type[MapConfig] | type[ModConfig]] = {
    "ngram": NgramConfig,
    "ngram-simple": MapConfig,
    "ngram-map-k": MapConfig,
    "ngram-map-k4v": MapConfig,
    "ngram-mod": ModConfig,
}


def make(name: str, *, compat: bool = False, **config: Any) -> _drafters.Drafter:
    """One drafter by llama.cpp's name for it, or `ngram`.

    Args:
        name: one of TYPES.
        compat: draft what llama.cpp's own drafter would, token for token, defects included.
        config: the fields of its config class (NgramConfig, MapConfig, ModConfig).

    Raises UsageError for an unknown name or setting, or a value out of range.
    """
    if name not in _CONFIGS:
        raise UsageError(f"--spec-type: {name!r} is none of {', '.join(TYPES)}")
    known = [f.name for f in fields(_CONFIGS[name])]
    unknown = [key for key in config if key not in known]
    if unknown:
        raise UsageError(f"{name}: no setting {unknown[0]!r}; it has {', '.join([*known, 'compat'])}")
    settings = _CONFIGS[name](**config)
    if isinstance(settings, NgramConfig):
        settings.check()
        return _drafters.Ngram(compat=compat, **vars(settings))
    if isinstance(settings, ModConfig):
        settings.check()
        return _drafters.NgramMod(compat=compat, **vars(settings))
    settings.check(name)
    if name == "ngram-simple":
        return _drafters.NgramSimple(compat=compat, **vars(settings))
    return _drafters.NgramMap(four_values=name == "ngram-map-k4v", compat=compat, **vars(settings))


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

    def config(self, name: str) -> NgramConfig | MapConfig | ModConfig:
        """The settings of one of TYPES."""
        config = getattr(self, name.replace("-", "_"))
        assert isinstance(config, NgramConfig | MapConfig | ModConfig)
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


class DrafterStack:
    """The decode loop's drafter: sources in order of precedence, of which the first that drafts wins.

    Without sources it never drafts, which is plain decoding. `free_only`: sources that take time to draft (their
    attribute `costs`) are not asked.
    """

    def __init__(self, sources: Sequence[Source] = (), n_max: int | None = None) -> None:
        self.sources = tuple(sources)
        self.n_max = n_max
        self.free_only = False
        self._winner: Source | None = None

    @property
    def name(self) -> str:
        return ",".join(source.name for source in self.sources) or "none"

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by the sources."""
        return sum(source.nbytes for source in self.sources)

    @property
    def stats(self) -> dict[str, dict[str, int]]:
        """Each source's counts, by its name."""
        return {source.name: source.stats for source in self.sources}

    @property
    def winner(self) -> str | None:
        """The source whose draft is waiting for `accept`; None after an abstention."""
        return None if self._winner is None else self._winner.name

    @property
    def matched(self) -> int:
        """Tokens by which the draft that is waiting was found; 0 for a source that does not look it up."""
        return int(getattr(self._winner, "matched", 0))

    def begin(self, prompt: Tokens | Sequence[int]) -> None:
        """Starts a request with its prompt: int32[n]."""
        self._winner = None
        tokens = np.ascontiguousarray(prompt, np.int32)
        for source in self.sources:
            source.begin(tokens)

    def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
        """Tokens expected after `history`, int32[n] with the last confirmed token at its end: int32[k], k <= n_max.

        Empty when every source abstains, when the history is empty, and for `n_max` 0.
        """
        self._winner = None
        if self.n_max is not None:
            n_max = self.n_max if n_max is None else min(n_max, self.n_max)
        if len(history) == 0 or n_max == 0:
            return _NO_TOKENS
        before, last = history[:-1], int(history[-1])
        for source in self.sources:
            if self.free_only and getattr(source, "costs", False):
                continue
            tokens = source.draft(before, last, n_max)
            if len(tokens):
                self._winner = source
                return tokens
        return _NO_TOKENS

    def trim(self, n: int) -> None:
        """Only the first `n` tokens of the last draft are verified; 0: none, and nobody is told of it."""
        if self._winner is None:
            return
        self._winner.trim(n)
        if n == 0:
            self._winner = None

    def accept(self, n_accepted: int) -> None:
        """Reports that the target confirmed `n_accepted` tokens of the last draft; nothing after an abstention."""
        winner, self._winner = self._winner, None
        if winner is None:
            return
        winner.accept(n_accepted)
        for source in self.sources:
            if source is not winner:
                source.accept(n_accepted, True)


def make_drafter(spec: DraftSpec, draft_model: Source | None = None) -> DrafterStack:
    """The drafter that `spec` describes; `draft_model` is what `mtp` stands for, asked when all others abstain."""
    sources: list[Source] = [make(name, **vars(spec.config(name))) for name in spec.ordered() if name != MTP]
    if draft_model is not None:
        sources.append(draft_model)
    return DrafterStack(sources, spec.n_max)


# The command line. (flag, type it belongs to, field of its config, help); defaults are None so that a flag given
# without its type is noticed.
_FLAGS: list[tuple[str, str, str, str]] = [
    ("--ngram-min-match", "ngram", "min_match", "shortest run of matching tokens that drafts"),
    ("--ngram-max-match", "ngram", "max_match", "longer matches count as this long, so that the most recent wins"),
    ("--spec-ngram-mod-n-match", "ngram-mod", "n_match", "tokens looked up"),
    ("--spec-ngram-mod-n-min", "ngram-mod", "n_min", "fewest tokens drafted"),
    ("--spec-ngram-mod-n-max", "ngram-mod", "n_max", "most tokens drafted"),
]
for _name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
    _FLAGS += [
        (f"--spec-{_name}-size-n", _name, "size_n", "tokens looked up"),
        (f"--spec-{_name}-size-m", _name, "size_m", "tokens drafted"),
        (f"--spec-{_name}-min-hits", _name, "min_hits", "occurrences needed before it drafts"),
    ]


def _dest(flag: str) -> str:
    return flag[2:].replace("-", "_")


def add_draft_flags(group: argparse._ActionsContainer) -> None:
    """Adds the draft flags to an argument group or parser; `spec_from_args` reads them."""
    group.add_argument("--ngram", action="store_true", help="the same as --spec-type ngram")
    group.add_argument("--mtp", action="store_true", help="the same as --spec-type mtp: the model's own head")
    group.add_argument(
        "--spec-type",
        metavar="A[,B...]",
        help=f"draft sources, tried in this order of precedence: {', '.join(ALL_TYPES)} (default: none)",
    )
    group.add_argument("--draft", type=int, metavar="N", help="tokens that ngram and mtp draft per step (default: 3)")
    group.add_argument(
        "--mtp-p-min",
        type=float,
        metavar="F",
        help="mtp: stop before a token that the head gives less than this probability (default: 0)",
    )
    group.add_argument(
        "--spec-draft-n-max",
        type=int,
        metavar="N",
        help="no source drafts more tokens than this per step (default: each its own length)",
    )
    group.add_argument(
        "--draft-policy",
        choices=DRAFT_POLICIES,
        metavar="|".join(DRAFT_POLICIES),
        help="verify what is expected to pay, or every draft whole (default: adaptive)",
    )
    for flag, name, key, text in _FLAGS:
        default = getattr(_CONFIGS[name](), key)
        group.add_argument(flag, type=int, metavar="N", help=f"{name}: {text} (default: {default})")


def spec_from_args(args: argparse.Namespace) -> DraftSpec:
    """The DraftSpec that parsed flags describe. Raises UsageError for a conflict or a value out of range."""
    listed = [name.strip() for name in ("none" if args.spec_type is None else args.spec_type).split(",")]
    if "none" in listed and len(listed) > 1:
        raise UsageError(f"--spec-type: {args.spec_type} names none beside other types: give one or the other")
    types = () if listed == ["none"] else tuple(listed)
    short = tuple(name for name in ("ngram", MTP) if getattr(args, name))
    if short:
        if args.spec_type is not None and set(types) != set(short):
            flag, name = f"--{short[0]}", ",".join(short)
            raise UsageError(
                f"{flag} is --spec-type {name}, which --spec-type {args.spec_type} contradicts: use --spec-type alone"
            )
        types = short
    if args.mtp_p_min is not None and MTP not in types:
        raise UsageError("--mtp-p-min has no effect without --spec-type mtp")
    given: dict[str, dict[str, int]] = {name: {} for name in TYPES}
    for flag, name, key, _ in _FLAGS:
        value = getattr(args, _dest(flag))
        if value is None:
            continue
        if name not in types:
            raise UsageError(f"{flag} has no effect without --spec-type {name}")
        given[name][key] = value
    if args.draft_policy is not None and not types:
        raise UsageError("--draft-policy has no effect without --spec-type, --ngram or --mtp")
    draft = DraftSpec.draft if args.draft is None else args.draft
    if "ngram" in types:
        given["ngram"]["n_max"] = draft
    return DraftSpec(
        types=types,
        draft=draft,
        n_max=args.spec_draft_n_max,
        policy=args.draft_policy or DraftSpec.policy,
        mtp_p_min=DraftSpec.mtp_p_min if args.mtp_p_min is None else args.mtp_p_min,
        ngram=NgramConfig(**given["ngram"]),
        ngram_simple=MapConfig(**given["ngram-simple"]),
        ngram_map_k=MapConfig(**given["ngram-map-k"]),
        ngram_map_k4v=MapConfig(**given["ngram-map-k4v"]),
        ngram_mod=ModConfig(**given["ngram-mod"]),
    )


def llama_draft_model(drafter: Source) -> LlamaDraftModel:
    """`drafter` as the `draft_model` of `llama_cpp.Llama`, which reports nothing back: what was accepted is read
    off the next call's tokens, and tokens that do not continue the last call's start a new request."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Adapter(LlamaDraftModel):
        def __init__(self) -> None:
            self.seen = _NO_TOKENS
            self.drafted = _NO_TOKENS

        def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> Tokens:
            ids = np.ascontiguousarray(input_ids, np.int32)
            n = len(self.seen)
            if n == 0 or len(ids) <= n or not np.array_equal(ids[:n], self.seen):
                drafter.begin(ids[:-1])
            elif len(self.drafted):
                size = min(len(self.drafted), len(ids) - n)
                differs = np.flatnonzero(ids[n : n + size] != self.drafted[:size])
                drafter.accept(int(differs[0]) if len(differs) else size)
            self.seen = ids.copy()
            self.drafted = drafter.draft(ids[:-1], int(ids[-1])) if len(ids) else _NO_TOKENS
            return self.drafted

    return Adapter()
