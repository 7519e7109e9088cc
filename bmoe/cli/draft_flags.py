"""The draft flags, and the `DraftSpec` that they stand for."""

from __future__ import annotations

import argparse

from ..errors import UsageError
from ..speculation import ALL_TYPES, CONFIGS, DRAFT_POLICIES, MTP, TYPES, DraftSpec, MapConfig, ModConfig, NgramConfig

# (flag, type it belongs to, field of its config, help); defaults are None so that a flag given
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
        default = getattr(CONFIGS[name](), key)
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
