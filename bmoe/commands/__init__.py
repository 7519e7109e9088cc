"""Commands beside generating text: `python -m bmoe NAME ...`, one module each.

A command's module has `SUMMARY` (a few words for --help), `build_parser()` and `run(args)`, which returns the exit
code and raises as `bmoe.cli.main` expects: BmoeError, OutputError, KeyboardInterrupt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from . import perplexity, trace


class Command(Protocol):
    """What a module of this package offers."""

    SUMMARY: str

    def build_parser(self) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {"perplexity": perplexity, "trace": trace}


def find(words: Sequence[str]) -> Command | None:
    """The command that a command line names as its first word; None where it names none."""
    return COMMANDS.get(words[0]) if words else None


def summary() -> str:
    """One sentence for --help."""
    return "Commands: " + ", ".join(f"{name} ({c.SUMMARY})" for name, c in COMMANDS.items()) + "."
