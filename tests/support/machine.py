"""An invented machine: its /proc and cgroup files below a folder."""

from __future__ import annotations

from pathlib import Path

from bmoe.host.memory import (
    MemoryFacts,
    read_memory_facts,
)

MiB = 1 << 20


class Machine:
    """A tree of /proc and cgroup files below `root`, as process 1234 would see it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mountinfo: list[str] = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"]
        self.write("proc/meminfo", "MemTotal: 16384000 kB\nMemFree: 1 kB\nMemAvailable: 12288000 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def own(self, *lines: str) -> None:
        self.write("proc/1234/cgroup", "".join(line + "\n" for line in lines))

    def mount(self, kind: str, point: str, root: str = "/", options: str = "rw") -> None:
        (self.root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        # One optional field, none, or two: the " - " is what ends them.
        optional = ("", "shared:9 ", "shared:9 master:2 ")[len(self.mountinfo) % 3]
        escaped = [path.replace("\\", "\\134").replace(" ", "\\040") for path in (root, point)]
        self.mountinfo.append(f"35 31 0:32 {' '.join(escaped)} rw {optional}- {kind} {kind} {options}")
        self.write("proc/1234/mountinfo", "\n".join(self.mountinfo) + "\n")

    def v1(self, directory: str, limit: int, usage: int = 0, **stat: int) -> None:
        self.write(f"{directory}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{directory}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{directory}/memory.stat", "".join(f"{key} {value}\n" for key, value in stat.items()))

    def v2(self, directory: str, max_: str, usage: int = 0, high: str = "max", **stat: int) -> None:
        self.write(f"{directory}/memory.max", f"{max_}\n")
        self.write(f"{directory}/memory.high", f"{high}\n")
        self.write(f"{directory}/memory.current", f"{usage}\n")
        self.write(f"{directory}/memory.stat", "".join(f"{key} {value}\n" for key, value in stat.items()))

    def facts(self) -> MemoryFacts:
        return read_memory_facts(self.root, "1234")

    def found(self) -> list[tuple[str, int, int]]:
        return [(limit.path, limit.version, limit.limit) for limit in self.facts().limits]
