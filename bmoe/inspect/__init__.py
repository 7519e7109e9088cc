"""What a model takes and how fast it will be here, before it is run: `python -m bmoe inspect` (docs/inspect.md).

Facts of the header (`inspection`), bounded measurements (`measurement`), and models of hits and speed that are pure.

Imports: engine, experts, gguf, host, llama, speculation, streamer.
"""
