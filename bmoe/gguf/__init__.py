"""A model on disk: headers, shards, tensors, and which of them are experts. Nothing else knows how a file is laid out.

Imports: llama.
"""
