"""A model on disk: headers, shards, tensors, and which of them are experts. Nothing else knows how a file is laid out.

`header`: one file's header, by llama.cpp's own parser; `file`: a whole model, its tensors and its experts.

Imports: llama.
"""

from __future__ import annotations

from .file import PAGE, ExpertLayer, ExpertTensor, ModelFile, Tensor, expert_layers, open_model_file
from .header import GgufHeader, GgufTensor

__all__ = [
    "PAGE",
    "ExpertLayer",
    "ExpertTensor",
    "GgufHeader",
    "GgufTensor",
    "ModelFile",
    "Tensor",
    "expert_layers",
    "open_model_file",
]
