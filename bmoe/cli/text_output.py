"""Where the text of a run goes: plainly to stdout, or with a line under it on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

from ..accounting.results import Token
from .terminal import write


class Text(Protocol):
    """Where the text of a run goes."""

    def write(self, text: str) -> None:
        """Text, at once. Raises OutputError."""
        ...

    def token(self, token: Token) -> None:
        """The token that the text came with."""
        ...

    def close(self) -> None: ...


class PlainText:
    """Text on stdout and nothing else (`Text`)."""

    def write(self, text: str) -> None:
        write(text)

    def token(self, token: Token) -> None: ...

    def close(self) -> None: ...


def text_view(live: bool, slots: Callable[[], tuple[int, int] | None]) -> Text:
    """Where text goes: with a line under it that says how the run is doing, where `live` and stderr is a terminal."""
    if not live or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainText()
    # Loaded here: a run without a terminal does not need it.
    from .status_line import on_terminal

    return on_terminal(slots)
