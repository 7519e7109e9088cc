"""Hit rates of cache policies on recorded routes: `bench/studies/replay.py` under the name it has always had."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.studies.replay import main

if __name__ == "__main__":
    sys.exit(main())
