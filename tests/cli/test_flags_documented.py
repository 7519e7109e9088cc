"""Every flag of a command is in a group of its --help and in a document."""

from __future__ import annotations

import argparse
import re

import pytest
from cli_process import ROOT

from bmoe.cli import commands, main

PARSERS = {"bmoe": main.build_parser, **{name: c.build_parser for name, c in commands.COMMANDS.items()}}


def _documents() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_flag_is_in_a_document(name: str) -> None:
    text = _documents()
    flags = {s for a in PARSERS[name]()._actions for s in a.option_strings}
    missing = [f for f in flags - {"-h", "--help"} if not re.search(rf"(?<![\w-]){re.escape(f)}(?![\w-])", text)]
    assert not missing
    assert len(flags) > 2


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_is_in_a_group(name: str) -> None:
    parser = PARSERS[name]()
    loose = {"help", "version"}
    for group in parser._action_groups:
        if group.title in ("positional arguments", "options"):
            assert {a.dest for a in group._group_actions} <= loose
    assert all(a.help and a.help is not argparse.SUPPRESS for a in parser._actions)


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"({p.name})" not in index]
    assert not missing, "put it under what its reader wants to do"
