"""The only place that knows llama.cpp: its bindings, models, contexts, samplers, and the layout check (docs/abi.md).

Imports: nothing.
"""
