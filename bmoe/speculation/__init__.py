"""Drafting and verifying: the drafters' Python side, the draft width policy, verify steps, the model's own head.

Imports: accounting, gguf, llama.
"""
