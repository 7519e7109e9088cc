"""The policy around the streamer: the budget, its slots, where weights lie, warm starts.

Imports: gguf, host, llama, streamer.
"""
