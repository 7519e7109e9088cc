"""The operating system: memory and its limits, maps, files that are written whole or not at all.

`memory`: how much there is and under which limits, read once; `files`: files that a run writes; `_memory`: memory and
maps. `sampling` reads memory at every token and is loaded by who wants that, so it is not part of this face.

Imports: nothing.
"""

from __future__ import annotations

from .files import LineFile, check_outputs, check_writable, write_output, write_whole
from .memory import MemoryFacts, ProcessMemory, major_faults, read_memory_facts, read_process_memory

__all__ = [
    "LineFile",
    "MemoryFacts",
    "ProcessMemory",
    "check_outputs",
    "check_writable",
    "major_faults",
    "read_memory_facts",
    "read_process_memory",
    "write_output",
    "write_whole",
]
