"""Write random-weight GGUF files with the real shapes of public Mixture-of-Experts models, for benchmarks.

    python bench/models/make_model.py qwen3-30b-a3b --layers 12 --out FILE [--router uniform|zipf] [--seed 0]
    python bench/models/make_model.py qwen3.6-35b-a3b --layers 4 --mtp --out FILE

The files load in stock llama.cpp, take text prompts, and have the sizes, tensor types and layout of the
model they are named after; what they say is noise. Weights are normal with a standard deviation of
1/sqrt(fan_in): a pool of quantized units is made once per tensor type, and each tensor is a fresh random
sequence of those units, so no two experts are alike and the disk, not the quantizer, sets the speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf import GGUFWriter

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.models.made.plan import Plan
from bench.models.made.pools import Pools
from bench.models.made.shapes import SHAPES, Shape, scaled, vocabulary

FILE_TYPES = {"q4_k_m": 15, "mxfp4": 38}  # llama.cpp's numbers for general.file_type


class MakeModelError(Exception):
    """A request that cannot be honoured; the message is one line."""


@dataclass(frozen=True)
class ModelInfo:
    """What was written: `expert_bytes` is the routed experts' weights, `dense_bytes` all other tensors."""

    path: Path
    bytes: int
    dense_bytes: int
    expert_bytes: int
    layers: int
    n_expert: int
    n_used: int
    quant: str
    router: str


def _metadata(writer: GGUFWriter, s: Shape, name: str, quant: str) -> None:
    tokens, types, merges = vocabulary(s)
    turn = s.turn.format(role="{{ m.role }}", text="{{ m.content }}")
    start = s.turn.partition("{text}")[0].format(role="assistant")
    loop = "{% for m in messages %}" + turn + "{% endfor %}"
    # fmt: off
    values = {
        "name": f"{name} (random weights)", "file_type": FILE_TYPES[quant], "quantization_version": 2,
        "block_count": s.n_layer + s.nextn, "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "head_count": s.n_head, "head_count_kv": s.n_head_kv, "key_length": s.head_dim,
        "value_length": s.head_dim, "layer_norm_rms_eps": s.eps, "rope_freq_base": s.rope_base,
        "expert_count": s.n_expert, "expert_used_count": s.n_used, "expert_feed_forward_length": s.n_ff,
        **({"expert_shared_feed_forward_length": s.n_ff} if s.arch == "qwen35moe" else {}), **s.keys,
        **({"nextn_predict_layers": s.nextn} if s.nextn else {}),
        "tokenizer_model": "gpt2", "tokenizer_pre": s.pre, "token_list": tokens, "token_types": types,
        "token_merges": merges, "bos_token_id": tokens.index(s.special[0]),
        "eos_token_id": tokens.index(s.eos), "pad_token_id": tokens.index("<|endoftext|>"),
        "add_bos_token": False,
        "chat_template": loop + "{% if add_generation_prompt %}" + start + "{% endif %}",
    }
    # fmt: on
    for method, value in values.items():
        getattr(writer, f"add_{method}")(value)


def make_model(
    path: str | os.PathLike[str],
    shape: str = "qwen3-30b-a3b",
    layers: int | None = 12,
    router: str = "uniform",
    zipf_s: float = 1.0,
    seed: int = 0,
    quant: str | None = None,
    *,
    scale: int = 1,
    mtp: bool = False,
    force: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> ModelInfo:
    """Write one model file and say what is in it. It appears under its name only when it is whole.

    No `layers` is all of them, no `quant` the model's own; `scale` divides the sizes, for tests; `mtp` adds a
    multi-token-prediction block, whose router is uniform; `progress` gets the bytes done and the bytes in all.
    """
    path, full = Path(path), SHAPES.get(shape)
    if full is None:
        raise MakeModelError(f"unknown model {shape!r}: choose from {', '.join(SHAPES)}")
    quant = full.quants[0] if quant is None else quant
    if quant not in full.quants:
        raise MakeModelError(f"{shape} has no quantization {quant!r}: choose from {', '.join(full.quants)}")
    if router not in ("uniform", "zipf"):
        raise MakeModelError(f"unknown router {router!r}: choose from uniform, zipf")
    if mtp and full.arch != "qwen35moe":
        raise MakeModelError(f"{shape} has no multi-token-prediction block: --mtp is for qwen3.6-35b-a3b")
    sizes = replace(full, n_layer=full.n_layer if layers is None else layers, nextn=int(mtp))
    if not 1 <= sizes.n_layer <= full.n_layer:
        raise MakeModelError(f"{shape} can have 1 to {full.n_layer} layers, not {layers}")
    if not 0 < zipf_s <= 4 or seed < 0 or scale < 1:
        raise MakeModelError("out of range: the zipf exponent is in (0, 4], the seed at least 0")
    if path.exists() and not (force and path.is_file()):
        raise MakeModelError(f"{path} exists" + (": give --force to replace it" if path.is_file() else ""))
    if not path.parent.is_dir():
        raise MakeModelError(f"{path.parent} is not a folder")
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a run that was killed
    sizes = scaled(sizes, scale) if scale > 1 else sizes
    tensors = list(Plan(sizes, quant, zipf_s if router == "zipf" else None).tensors())
    total = sum(tensor.nbytes for tensor in tensors)
    need, free = (total + 32 * sizes.n_vocab) / 2**30, shutil.disk_usage(path.parent).free / 2**30
    if need > free:
        raise MakeModelError(f"{path} needs {need:.1f} GiB and the disk has {free:.1f} GiB free")
    writer, pools, done = GGUFWriter(partial, sizes.arch), Pools(seed), 0
    try:
        _metadata(writer, sizes, shape, quant)
        for tensor in tensors:
            # Any dtype but uint8, which would have the writer read the shape as bytes.
            writer.add_tensor_info(tensor.name, tensor.dims, np.dtype("f4"), tensor.nbytes, tensor.qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        out = writer.fout[0]
        writer.write_padding(out, out.tell())
        for tensor in tensors:
            # Not write_tensor_data: it wants the whole tensor in memory, and some take 600 MB.
            for piece in pools.pieces(tensor):
                out.write(piece.data)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            writer.write_padding(out, tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())
        os.replace(partial, path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    experts = sum(tensor.nbytes for tensor in tensors if tensor.name.endswith("_exps.weight"))
    counts = (sizes.n_layer, sizes.n_expert, sizes.n_used)
    return ModelInfo(path, path.stat().st_size, total - experts, experts, *counts, quant, router)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"make_model: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = _Parser(prog="make_model", description="Write random weights in the shape of a public model.")
    parser.add_argument("shape", help=", ".join(SHAPES))
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer layers than the model has")
    parser.add_argument("--router", default="uniform", help="uniform (default) or zipf")
    parser.add_argument("--zipf-s", type=float, default=1.0, metavar="S", help="default: 1.0; 1.3 is like real models")
    parser.add_argument("--quant", help="q4_k_m or mxfp4 (default: the model's usual one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide the sizes by N, for tests")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction block (qwen3.6-35b-a3b)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    options = vars(parser.parse_args(argv))
    from rich.console import Console  # here: making models from Python does without
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    screen = Console(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    task = bar.add_task("writing", total=None)
    options["progress"] = lambda done, total: bar.update(task, completed=done, total=total)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        with bar:
            info = make_model(options.pop("out"), **options)
    except (MakeModelError, ImportError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("make_model: stopped, nothing was left behind", file=sys.stderr)
        return 130
    gib = [size / 2**30 for size in (info.bytes, info.expert_bytes, info.dense_bytes)]
    print(f"{info.path}: {info.layers} layers, {gib[0]:.2f} GiB ({gib[1]:.2f} experts, {gib[2]:.2f} dense)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
