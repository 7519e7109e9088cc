"""The recipe of the bundled demo model: text, tokenizer, training, GGUF, checks. `python -m bench.demo_model --help`.

Needs the extra `[train]` (torch, tokenizers, gguf). Nothing of it is part of the engine.
"""
