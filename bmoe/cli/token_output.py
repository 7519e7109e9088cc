"""What a run gives out beside its text, token by token: `--csv`, `--progress`. A failure ends these, not the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..accounting.results import GenerationResult, Token
from ..host.files import LineFile
from ..observe.record_format import csv_head, csv_row, csv_summary, json_line


class CsvFile:
    """One CSV file. `run`: what its preamble says. Raises UsageError where it cannot be made."""

    flag = "--csv"

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.file = LineFile(path, self.flag)
        self.file.write(csv_head(run))

    @property
    def failure(self) -> str:
        """Why it ended early, one line; "" where it did not."""
        return self.file.failure

    def token(self, token: Token) -> None:
        """Appends the row of a token that has a record."""
        if token.record is not None:
            self.file.write(csv_row(list(token.record.values().values())))

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """`summary`: the trailer; without it the file says that the run did not end."""
        if summary is not None:
            self.file.write(csv_summary(summary))
        self.file.close()


class ProgressLines:
    """A line of JSON on stderr for each token, until nobody reads it."""

    failure = ""

    def __init__(self) -> None:
        self._on = True

    def token(self, token: Token) -> None:
        if not self._on or token.record is None:
            return
        try:
            sys.stderr.write(json_line(token.record, token.text) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self._on = False  # there is no place left to say so

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Nothing is open."""


def run_summary(result: GenerationResult) -> dict[str, Any]:
    """The trailer of a CSV file: of the whole generation, also what came after its last token. Seconds, bytes."""
    return {
        "tokens": len(result.token_ids),
        "stop": result.stop,
        "prompt_tokens": result.prompt_tokens,
        "prefill_tokens": result.prefill_tokens,
        "prefill_s": result.prefill_s,
        "ttft_s": result.ttft_s,
        "decode_s": result.decode_s,
        "total_s": result.total_s,
        "decode_tok_s": result.decode_tok_s,
        "effective_tok_s": result.effective_tok_s,
        "read_bytes": result.prefill.bytes + result.decode.bytes,
        "major_faults": result.major_faults,
    }
