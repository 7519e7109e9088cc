"""The compiled mechanism: reads, the expert cache and its admission policy, the graph hook, plan and kernel.

The sources are in ext/bmoe/streamer, one module for each mechanism.

Imports: llama.
"""
