"""The one place that knows how a model lies in its files: shards, tensors, and which of them are experts."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from .header import GgufHeader, Value

PAGE = 4096
"""Alignment of direct reads, bytes."""

# Types that no tensor of a model has and that no matmul of llama.cpp can read: it would jump to address 0.
_NOT_WEIGHTS = {9: "q8_1", 15: "q8_K", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"}
_ID_TABLE = "tid2eid"  # token to expert, of integers by design
_KINDS = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix", "mmproj": "a multimodal projector"}

_SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_EXPERTS = re.compile(r"^(?P<block>.+)\.[^.]*_exps\.weight$")


@dataclass(frozen=True)
class Tensor:
    """One tensor: `offset` from the start of file `file` (an index into `ModelFile.paths`), bytes."""

    name: str
    type: int
    shape: tuple[int, int, int, int]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertTensor:
    """A routed-expert tensor: `n_expert` slices of `nbytes` bytes each, one after the other."""

    name: str
    file: int
    offset: int
    nbytes: int
    n_expert: int

    @property
    def area(self) -> int:
        """Bytes that hold any one slice as an aligned read brings it in."""
        whole = -(-self.nbytes // PAGE) * PAGE
        return whole if self.offset % PAGE == 0 and self.nbytes % PAGE == 0 else whole + PAGE


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one block: an expert is one slice of each tensor."""

    block: str
    n_expert: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the file."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one expert."""
        return sum(t.area for t in self.tensors)


@dataclass(frozen=True)
class ModelFile:
    """A model on disk: its files, its header as one file would have it, its tensors and its small keys."""

    paths: tuple[Path, ...]
    header: bytes
    virtual_size: int
    tensors: tuple[Tensor, ...]
    keys: dict[str, Value]

    @property
    def arch(self) -> str:
        return str(self.keys.get("general.architecture", "unknown"))

    def number(self, key: str, default: int = 0) -> int:
        """The integer at `<arch>.<key>`, or `default`."""
        value = self.keys.get(f"{self.arch}.{key}", default)
        return value if isinstance(value, int) else default

    def largest(self, key: str) -> int:
        """The integer at `<arch>.<key>`, the largest where each layer has its own; 0 where there is none."""
        value = self.keys.get(f"{self.arch}.{key}", 0)
        return max(value) if isinstance(value, tuple) else self.number(key)

    @property
    def file_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def open_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Reads the header(s) of the model at `path`: one file, or the first of its shards.

    Raises ModelError, naming the file, for: no such file, no GGUF, no model, a damaged header, a shard that is
    missing, foreign or not the first, and a tensor that ends past the end of its file.
    """
    first = Path(path)
    _check_magic(first)
    with ExitStack() as stack:
        header = stack.enter_context(GgufHeader(str(first)))
        keys = header.values()
        count = _whole_number(keys, "split.count", first)
        paths = _shard_paths(first, _whole_number(keys, "split.no", first), count) if count > 1 else [first]
        _check_keys(keys, first)
        if count <= 1:
            tensors = _tensors(header, 0)
            with open(first, "rb") as f:
                raw = f.read(header.data_offset)
            return ModelFile((first,), raw, first.stat().st_size, tuple(tensors), keys)
        headers = [header]
        for i, shard in enumerate(paths[1:], 1):
            _check_magic(shard)
            headers.append(stack.enter_context(GgufHeader(str(shard))))
            _check_shard(headers[i], i, count, shard)
        tensors = [t for i, h in enumerate(headers) for t in _tensors(h, i)]
        _check_whole(tensors, keys, first)
        raw = header.merged_with(headers[1:])
        size = len(raw) + sum(-(-t.nbytes // 32) * 32 for t in tensors)
        return ModelFile(tuple(paths), raw, size, tuple(tensors), keys)


def _check_magic(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a file; give a .gguf file, or the first of its shards")
        with open(path, "rb") as f:
            magic = f.read(4)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as e:
        raise ModelError(f"{path}: cannot read: {e.strerror}") from None
    if not magic:
        raise ModelError(f"{path}: the file is empty; download or copy it again")
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r}); convert the model with llama.cpp first")


def _whole_number(keys: dict[str, Value], key: str, path: Path) -> int:
    value = keys.get(key, 0)
    if not isinstance(value, int):
        raise ModelError(f"{path}: damaged header: key {key} is {value!r}, not a whole number")
    return value


def _check_keys(keys: dict[str, Value], path: Path) -> None:
    """Refuses what is no language model, and values that llama.cpp takes on trust and dies or hangs of."""
    kind = keys.get("general.type", "model")
    if kind in _KINDS:
        raise ModelError(f"{path}: this is {_KINDS[str(kind)]}, not a model")
    arch = keys.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ModelError(f"{path}: the header has no key general.architecture; this is no model that llama.cpp runs")
    if keys.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        raise ModelError(f"{path}: the file has no vocabulary (key tokenizer.ggml.model); convert the model with one")
    latent = f"{arch}.attention.kv_lora_rank" in keys  # such a model can do without rope
    for key, value in keys.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or isinstance(value, (str, tuple)):
            continue
        if (
            value != value
            or (isinstance(value, int) and not 0 <= value < 1 << 31)
            or (name.endswith("epsilon") and not 0 <= value < 1)
            or (name == "full_attention_interval" and value < 1)
            or (name.startswith("rope.dimension_count") and (value % 2 or not (value or latent)))
        ):
            raise ModelError(f"{path}: damaged header: key {key} is {value}; download or copy the file again")


def _tensors(header: GgufHeader, file: int) -> list[Tensor]:
    size = os.path.getsize(header.path)
    base = header.data_offset
    try:
        found = [Tensor(t.name, t.type, t.shape, file, base + t.offset, t.nbytes) for t in header.tensors()]
    except UnicodeDecodeError:
        raise ModelError(f"{header.path}: damaged header: the name of a tensor is not text") from None
    for t in found:
        if t.type in _NOT_WEIGHTS and _ID_TABLE not in t.name:
            raise ModelError(
                f"{header.path}: damaged header: tensor {t.name} has type {_NOT_WEIGHTS[t.type]}, which no model uses"
            )
        if t.offset + t.nbytes > size:
            raise ModelError(
                f"{header.path}: truncated: tensor {t.name} ends at byte {t.offset + t.nbytes}, "
                f"the file has {size}; download or copy it again"
            )
    return found


def _shard_paths(first: Path, number: int, count: int) -> list[Path]:
    name = _SHARD_NAME.match(first.name)
    if number != 0:
        hint = f"{name['stem']}-00001-of-{count:05d}.gguf" if name else "the first shard"
        raise ModelError(f"{first}: this is shard {number + 1} of {count}; open {hint}")
    if name is None or int(name["count"]) != count:
        raise ModelError(
            f"{first}: the header says shard 1 of {count}, so the name must end in -00001-of-{count:05d}.gguf"
        )
    paths = [first.with_name(f"{name['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{first.with_name(missing[0])}: shard is missing{more}; all {count} must lie side by side")
    return paths


def _check_shard(header: GgufHeader, index: int, count: int, path: Path) -> None:
    keys = header.values()
    number = _whole_number(keys, "split.no", path)
    if "split.no" not in keys or number != index or keys.get("split.count") != count:
        says = f"shard {number + 1} of {keys.get('split.count')}" if "split.no" in keys else "no shard"
        raise ModelError(f"{path}: foreign file: its header says {says}, expected shard {index + 1} of {count}")


def _check_whole(tensors: Iterable[Tensor], keys: dict[str, Value], first: Path) -> None:
    names = [t.name for t in tensors]
    expected = keys.get("split.tensors.count")
    if expected is not None and len(names) != expected:
        raise ModelError(
            f"{first}: its shards hold {len(names)} tensors, the header says {expected}: a shard is foreign"
        )
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ModelError(f"{first}: tensor {twice} is in two shards: one of them is foreign")


def expert_layers(tensors: Iterable[Tensor], loaded: Iterable[str]) -> tuple[ExpertLayer, ...]:
    """The routed experts among `tensors` that llama.cpp has loaded, a layer for each block, in file order.

    Found by name and shape, not by architecture: 3-D tensors `<block>.*_exps.weight`.
    """
    names = set(loaded)
    blocks: dict[tuple[str, int], list[ExpertTensor]] = defaultdict(list)
    for t in tensors:
        m = _EXPERTS.match(t.name)
        n_expert = t.shape[2]
        if m and t.name in names and n_expert > 1 and t.shape[3] == 1 and t.nbytes % n_expert == 0:
            blocks[m["block"], n_expert].append(ExpertTensor(t.name, t.file, t.offset, t.nbytes // n_expert, n_expert))
    return tuple(ExpertLayer(block, n, tuple(found)) for (block, n), found in blocks.items())
