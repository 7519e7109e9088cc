"""The memory promise, measured from outside the process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

MiB = 1 << 20


def rss_of(pid: int) -> int:
    """Resident bytes of another process, file pages included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("flags", [["--cache-mb", "0"], ["--cache-mb", "26", "--force-cache"], [], ["--mtp"]])
@pytest.mark.parametrize("prompt_words", [5, 900])
def test_resident_memory_stays_within_what_was_promised(tmp_path: Path, flags: list[str], prompt_words: int) -> None:
    prompt, metrics = tmp_path / "prompt.txt", tmp_path / "m.json"
    prompt.write_text("def read_config(path):\n" + "    return path + name\n" * (prompt_words // 5))
    command = ["-f", str(prompt), "--overlap", "-n", "60", "-c", "2048", "--metrics-json", str(metrics), *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "bmoe", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    most = 0
    while process.poll() is None:
        try:
            most = max(most, rss_of(process.pid))
        except FileNotFoundError:
            break
        time.sleep(0.002)
    assert process.wait() == 0
    m = json.loads(metrics.read_text())
    promised = sum(m["memory"].values()) + m["config"]["budget_bytes"] + 64 * MiB
    assert m["peak_rss_bytes"] <= promised
    assert 0 < most <= promised


def test_what_a_run_does_not_need_is_not_loaded() -> None:
    """Each is megabytes: TLS and hashes, progress bars, the analysis of traces, the records of tokens."""
    names = ("hashlib", "ssl", "rich", "plotly", "bmoe.analysis", "bmoe.inspect", "bmoe.abi", "bmoe.observe.telemetry")
    code = f"import sys, bmoe.cli.main; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
