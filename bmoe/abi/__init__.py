"""What bmoe takes for granted about llama.cpp, one check for each assumption: `python -m bmoe abi` (docs/abi.md).

`check` is what a check is and how one is run, each in a process of its own; `names`, `layout`, `graph`, `streaming`
and `heads` are the checks, from cheap to costly; `stock` runs a model by llama.cpp alone, `tiny` writes one. A module
of checks enters them when it is imported, so nothing is imported here.

Imports: engine, gguf, llama, speculation.
"""
