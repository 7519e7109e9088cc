"""`python -m bmoe`, and the `bmoe` command."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """The command line, with a quiet end for a Ctrl-C that comes while it is still being loaded."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command_line

    return command_line.main(take_interrupt=ours)


if __name__ == "__main__":
    sys.exit(main())
