"""Commands beside generating text: `python -m bmoe NAME ...`, one module each.

A command's module has `build_parser()` and `run(args)`, which returns the exit code and raises as `bmoe.cli.main`
expects: BmoeError, OutputError, KeyboardInterrupt. It is loaded when it is asked for: other runs keep the memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

SUMMARIES = {
    "inspect": "what a model takes, and how fast it will run here",
    "perplexity": "how well a model predicts a text",
    "trace": "what a trace says",
    "report": "what --csv files say",
    "abi": "whether the installed llama-cpp-python is as assumed",
}
ALIASES = {"seam": "abi"}
"""Names that commands had before: they go on working, and no help lists them."""


class Command(Protocol):
    """What a module of this package offers."""

    def build_parser(self) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


class _Commands(Mapping[str, Command]):
    def __getitem__(self, name: str) -> Command:
        if name not in SUMMARIES:
            raise KeyError(name)
        return cast(Command, import_module(f".{name}", __name__))

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


COMMANDS: Mapping[str, Command] = _Commands()


def find(words: Sequence[str]) -> Command | None:
    """The command that a command line names as its first word; None where it names none."""
    return COMMANDS.get(ALIASES.get(words[0], words[0])) if words else None


def summary() -> str:
    """One sentence for --help."""
    return "Commands: " + ", ".join(f"{name} ({text})" for name, text in SUMMARIES.items()) + "."
