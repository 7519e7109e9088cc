"""Stop strings: ends a text where one of them begins, and holds back what may be the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError


class StopStrings:
    """Watches a text that comes in pieces.

    `hit` is the stop string that ended it, "" so far. Raises UsageError for an empty string.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        if isinstance(strings, str):
            raise UsageError(f"stop: give a list of strings, not {strings!r}")
        if "" in strings:
            raise UsageError("--stop: an empty string would stop every text before its first character")
        self.strings = tuple(dict.fromkeys(strings))
        self.hit = ""
        self._held = ""

    def feed(self, piece: str) -> str:
        """Takes the next piece; what of the text is certain to stay, and was not given out before."""
        if self.hit:
            return ""
        if not self.strings:
            return piece
        text, self._held = self._held + piece, ""
        found = [(at, -len(s), s) for s in self.strings if (at := text.find(s)) >= 0]
        if found:
            # The one that begins first; of those that begin together the longest.
            at, _, self.hit = min(found)
            return text[:at]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Characters at the end of `text` that a stop string may begin with."""
        longest = max(map(len, self.strings)) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self.strings):
                return n
        return 0
