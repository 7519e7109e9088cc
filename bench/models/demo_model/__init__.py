"""The recipe of the bundled demo model: text, tokenizer, training, GGUF, checks (`-m bench.models.demo_model -h`).

Needs the extra `[train]` (torch, tokenizers, gguf). Nothing of it is part of the engine.
"""
