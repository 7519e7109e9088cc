"""The library's heart: an engine opens a model, a generation decodes with it, a scoring reads a text with it.

Imports: accounting, experts, gguf, host, llama, observe, speculation, streamer.
"""
