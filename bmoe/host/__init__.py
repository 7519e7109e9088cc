"""The operating system: memory and its limits, maps, files that are written whole or not at all.

Imports: nothing.
"""
