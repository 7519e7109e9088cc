"""Drafting and verifying: the loop of the engine, what drafts in it, and how much of a draft is verified.

`settings` has the drafters' names and settings, `drafters` makes them (compiled: `_drafters`) and asks them in order;
`draft_width` decides how much of a draft is verified, `verify` is the decode loop. `mtp`, the model's own head, is no
part of the face: it needs llama.cpp's side, the others work without a model.

Imports: accounting, gguf, llama.
"""

from .draft_width import DRAFT_POLICIES, DraftPolicy, DraftWidth, make_draft_width
from .drafters import DrafterStack, Source, make_drafter
from .settings import ALL_TYPES, CONFIGS, MTP, TYPES, DraftSpec, MapConfig, ModConfig, NgramConfig
from .verify import Choice, Drafter, Step, Target, Tokens, accepted_prefix, verify_steps

__all__ = [
    "ALL_TYPES",
    "CONFIGS",
    "DRAFT_POLICIES",
    "MTP",
    "TYPES",
    "Choice",
    "DraftPolicy",
    "DraftSpec",
    "DraftWidth",
    "Drafter",
    "DrafterStack",
    "MapConfig",
    "ModConfig",
    "NgramConfig",
    "Source",
    "Step",
    "Target",
    "Tokens",
    "accepted_prefix",
    "make_draft_width",
    "make_drafter",
    "verify_steps",
]  # fmt: skip
