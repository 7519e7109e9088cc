"""What a run shows of itself: records of tokens, traces of routes and reads, what bounds it.

It watches the streamer and writes files; what reads these is `bmoe.analysis`.

Imports: accounting, experts, gguf, host, streamer.
"""
