"""Parameters and GGUF: writing a file that stock llama.cpp loads, and reading one back as what it computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from .model import Params
from .shape import Shape
from .text import END

ARCH = "glm4moe"
NAME = "bmoe demo (Python source and documentation)"


def quantized(name: str, ndim: int) -> bool:
    """Whether a tensor is stored as Q8_0: the large matrices; routers, norms and biases stay float32."""
    return ndim >= 2 and "ffn_gate_inp" not in name


def write(path: Path, shape: Shape, params: Params, tokenizer: Path, *, q8: bool = True, card: dict[str, Any]) -> None:
    """Writes the whole model; `q8` False keeps every tensor in float32, for the comparison with the trainer."""
    w = gguf.GGUFWriter(path, ARCH)
    w.add_name(NAME)
    w.add_description(card["description"])
    w.add_license(card["license"])
    w.add_context_length(shape.context)
    w.add_embedding_length(shape.embd)
    w.add_block_count(shape.blocks)
    w.add_feed_forward_length(shape.ff * shape.used)
    w.add_head_count(shape.heads)
    w.add_head_count_kv(shape.kv_heads)
    w.add_key_length(shape.head_dim)
    w.add_value_length(shape.head_dim)
    w.add_rope_dimension_count(shape.rotary)
    w.add_rope_freq_base(shape.rope_base)
    w.add_layer_norm_rms_eps(shape.eps)
    w.add_expert_count(shape.experts)
    w.add_expert_used_count(shape.used)
    w.add_expert_feed_forward_length(shape.ff)
    w.add_expert_shared_count(1)
    w.add_leading_dense_block_count(0)
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(1.0)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_nextn_predict_layers(1)
    bpe = json.loads(tokenizer.read_text())["model"]
    vocab: dict[str, int] = bpe["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    # A vocabulary that came out smaller than the matrix: the rest of the rows is never chosen.
    tokens += [f"<|unused{i}|>" for i in range(shape.vocab - len(tokens))]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([control if t == END else normal if t in vocab else unused for t in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]])
    w.add_bos_token_id(vocab[END])
    w.add_eos_token_id(vocab[END])
    w.add_add_bos_token(True)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if q8 else gguf.LlamaFileType.ALL_F32)
    for name, value in params.items():
        data = value.detach().float().numpy()
        if q8 and quantized(name, data.ndim):
            w.add_tensor(name, gguf.quants.quantize(data, Type.Q8_0), raw_dtype=Type.Q8_0)
        else:
            w.add_tensor(name, np.ascontiguousarray(data))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read(path: Path) -> tuple[Shape, Params]:
    """Shape and parameters of a file that `write` has made, dequantized to float32."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(f"{ARCH}.{key}")
        if field is None:
            raise ValueError(f"{path} has no {ARCH}.{key}: it is not of this recipe")
        return field.contents()

    params = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).copy())
        for t in reader.tensors
    }
    shape = Shape(
        vocab=len(params["token_embd.weight"]),
        embd=value("embedding_length"),
        layers=value("block_count") - value("nextn_predict_layers"),
        heads=value("attention.head_count"),
        kv_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        rotary=value("rope.dimension_count"),
        experts=value("expert_count"),
        used=value("expert_used_count"),
        ff=value("expert_feed_forward_length"),
        context=value("context_length"),
        rope_base=float(value("rope.freq_base")),
        eps=float(value("attention.layer_norm_rms_epsilon")),
    )
    return shape, params
