"""GGUF headers taken apart and put together again, well-formed or not."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class Tensor:
    """One entry of the directory; `offset` from the start of the data."""

    name: bytes
    dims: list[int]
    type: int
    offset: int


class Gguf:
    """A file in parts. `kv`: key -> (type, encoded value); `data`: everything behind the header."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        self.version, n_tensors, n_kv = struct.unpack_from("<IQQ", raw, 4)
        self._raw, self._at = raw, 24
        self.kv: dict[str, tuple[int, bytes]] = {}
        for _ in range(n_kv):
            key = self._string().decode()
            kind = self._number("<I")
            start = self._at
            self._skip(kind)
            self.kv[key] = (kind, raw[start : self._at])
        self.tensors: list[Tensor] = []
        for _ in range(n_tensors):
            name = self._string()
            dims = [self._number("<Q") for _ in range(self._number("<I"))]
            self.tensors.append(Tensor(name, dims, self._number("<I"), self._number("<Q")))
        self.data = raw[-(-self._at // 32) * 32 :]
        self.n_kv: int | None = None
        self.n_tensors: int | None = None

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack_from(kind, self._raw, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    def _string(self) -> bytes:
        n = self._number("<Q")
        self._at += n
        return self._raw[self._at - n : self._at]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            of, n = self._number("<I"), self._number("<Q")
            for _ in range(n if of == _STRING else 0):
                self._string()
            self._at += 0 if of == _STRING else n * _SIZES[of]
        else:
            self._at += _SIZES[kind]

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name.encode())

    def set(self, key: str, value: Any, kind: int | None = None) -> Gguf:
        """Sets a key: int as uint32, float as float32, bool, str, or a list of str; `kind` with raw bytes."""
        if kind is not None:
            self.kv[key] = (kind, value)
        elif isinstance(value, bool):
            self.kv[key] = (7, struct.pack("<?", value))
        elif isinstance(value, int):
            self.kv[key] = (4, struct.pack("<I", value))
        elif isinstance(value, float):
            self.kv[key] = (6, struct.pack("<f", value))
        elif isinstance(value, str):
            self.kv[key] = (_STRING, _text(value))
        else:
            self.kv[key] = (_ARRAY, struct.pack("<IQ", _STRING, len(value)) + b"".join(map(_text, value)))
        return self

    def drop(self, *keys: str) -> Gguf:
        for key in keys:
            del self.kv[key]
        return self

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.kv) if self.n_kv is None else self.n_kv
        parts = [b"GGUF", struct.pack("<IQQ", self.version, n_tensors, n_kv)]
        for key, (kind, value) in self.kv.items():
            parts += [_text(key), struct.pack("<I", kind), value]
        for t in self.tensors:
            parts += [_text(t.name), struct.pack(f"<I{len(t.dims)}Q", len(t.dims), *t.dims)]
            parts.append(struct.pack("<IQ", t.type, t.offset))
        raw = b"".join(parts)
        return raw + bytes(-len(raw) % 32)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.header() + self.data)
        return path
