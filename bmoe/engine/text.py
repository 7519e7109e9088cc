"""The text of a generation, as its tokens come: bytes made characters, stop strings watched for."""

from __future__ import annotations

import codecs
from collections.abc import Mapping

from ..speculation.verify import Choice
from .stop_strings import StopStrings


class TokenText:
    """Makes a text of the tokens that were chosen. `pieces`: what each has given out; together they are the text.

    `stops`: strings that end it; `stop_tokens`: ids that do, and the string that each stands for (special tokens have
    no text of their own); `stop_at_end`: so does an end-of-generation token.
    """

    def __init__(self, stops: StopStrings, stop_tokens: Mapping[int, str], stop_at_end: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops, self._stop_tokens, self._stop_at_end = stops, stop_tokens, stop_at_end
        self.pieces: list[str] = []
        self.stop = ""
        """Why the text has ended: "end", "stop", or "" so far."""
        self.stop_string = ""

    def add(self, choice: Choice) -> str:
        """What of the text is certain now that `choice` has come, and was not given out before."""
        piece = ""
        if choice.end and self._stop_at_end:
            self.stop = "end"
        elif choice.id in self._stop_tokens:
            self.stop, self.stop_string = "stop", self._stop_tokens[choice.id]
        else:
            piece = self._stops.feed(self._decoder.decode(choice.text))
            if self._stops.hit:
                self.stop, self.stop_string = "stop", self._stops.hit
        self.pieces.append(piece)
        return piece

    def finish(self) -> str:
        """What was held back at the end: the beginning of a stop string that did not come, or of a character."""
        held = self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.finish()
        self.pieces.append(held)
        return held

    @property
    def text(self) -> str:
        return "".join(self.pieces)
